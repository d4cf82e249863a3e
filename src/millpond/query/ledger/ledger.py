"""Spark's exactly-once ledger: `offsets/<batch>`, written before a batch runs, and `commits/<batch>`, written after.

Millpond reads it at start and, to have Spark run a batch again, takes entries away and puts them back. Each change is
journalled below `millpond/rolled-back/` first, so that what a start left that did not end is undone by the next one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import check_fence
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.patience import patiently

Log = Literal["offsets", "commits"]

METADATA = "metadata"
"""Spark's record of the id of a query."""
LOGS: tuple[Log, ...] = ("offsets", "commits")
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UNFINISHED = re.compile(rf"\.\d+\.{_UUID}\.tmp|\.\.\d+\.{_UUID}\.tmp\.crc")
"""Spark's temporary files in its logs, and the checksums that Hadoop's local file system keeps of them."""

_FOLDER = "millpond/rolled-back/"
_PENDING = f"{_FOLDER}pending-"


class Ledger:
    """The two logs of one query's checkpoint, and its identity; `files` is the checkpoint location."""

    def __init__(self, files: FileSystem) -> None:
        self._files = files

    def query_id(self) -> str | None:
        """The id that the query has had since its first start, `None` before that.

        Raises:
            StateDamagedError: Spark's record of it is altered.
        """
        if not self._files.exists(METADATA):
            return None
        try:
            return str(json.loads(self._files.get(METADATA))["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise StateDamagedError(
                "Spark's record of the query's id is altered.",
                action="Restore it from a backup, or start with a new checkpointLocation.",
                file=self._files.locate(METADATA),
            ) from error

    def check_id(self) -> None:
        """Refuse logs without the query's id: sinks that know batches by it would take them once more.

        Raises:
            StateDamagedError: Spark's record of the id is gone.
        """
        if self._files.exists(METADATA):
            return
        last = max(map(self.last, LOGS))
        if last >= 0:
            raise StateDamagedError(
                f"[STREAMING_CHECKPOINT_MISSING_METADATA_FILE] offsets/ and commits/ have batches up to {last}, and "
                "the file metadata, which holds the query's id, is gone. Under another id, a sink that knows batches "
                "by it would take them twice.",
                action='Put the file back, from a backup or as one line {"id":"…"} with the id that the query had '
                "(its progress and Spark's event log show it), or start with a new checkpointLocation.",
                file=self._files.locate(METADATA),
            )

    def check_offsets(self) -> None:
        """Refuse commits of batches that were never planned: Spark would run batches again that the state has.

        Raises:
            StateDamagedError: entries of `offsets/` are gone.
        """
        planned, committed = self.last("offsets"), self.last("commits")
        if planned < committed:
            there = f"offsets/ has batches up to {planned} only" if planned >= 0 else "offsets/ is empty or gone"
            raise StateDamagedError(
                f"commits/ has batches up to {committed}, and {there}: what later batches read is not known.",
                action="Put back what was in it, from a backup of the checkpoint, or start with a new "
                "checkpointLocation, which reads the source from its beginning.",
                file=self._files.locate("offsets/"),
            )

    def identify(self) -> str:
        """The query's id, chosen if this is its first start: Spark takes up the one that it finds."""

        def choose() -> None:
            if self.query_id() is None:
                self._files.put(METADATA, [json.dumps({"id": str(uuid.uuid4())}).encode()], create=True)

        with suppress(AlreadyExistsError):
            patiently(choose)
        if isinstance(self._files, LocalFiles):
            self._files.tidy()
        identity = self.query_id()
        assert identity is not None
        return identity

    @property
    def next(self) -> int:
        """The batch that Spark runs next. It plans one when the one before is committed, whether or not it says so."""
        return max(self.last("commits") + 1, self.last("offsets"), 0)

    def last(self, log: Log) -> int:
        """The newest batch in a log, −1 if it is empty."""
        names = (info.name.rpartition("/")[2] for info in self._files.list(f"{log}/"))
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def stores(self) -> int | None:
        """Into how many partitions Spark divides state stores, as its offset log says; None before the first batch.

        Raises:
            StateDamagedError: the newest entry cannot be read.
        """
        last = self.last("offsets")
        if last < 0:
            return None
        try:
            entry = json.loads(bytes(memoryview(self._files.get(f"offsets/{last}"))).decode().splitlines()[1])
            return int(entry["conf"]["spark.sql.shuffle.partitions"])
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise StateDamagedError(
                "An entry of Spark's offset log cannot be read.",
                action="Restore it from a backup, or start with a new checkpointLocation.",
                file=self._files.locate(f"offsets/{last}"),
            ) from error

    def written(self, log: Log) -> dict[int, float]:
        """When each entry of a log was written, by batch: seconds since the epoch, by the store's clock."""
        entries = ((info.name.rpartition("/")[2], info.modified) for info in self._files.list(f"{log}/"))
        return {int(name): modified for name, modified in entries if name.isdigit()}

    def retained(self) -> range:
        """The batches that Spark can go back to: those planned, without a gap, up to the newest."""
        planned = self.written("offsets")
        last = max(planned, default=-1)
        first = last
        while first - 1 in planned:
            first -= 1
        return range(max(first, 0), last + 1)

    def forget_interrupted_start(self) -> None:
        """Remove what a crash left of Spark's first entry, if there is no entry yet.

        Spark writes to a temporary file, then renames it. Before batch 0 it refuses a checkpoint in whose logs there is
        anything at all, so that a query whose driver died in its first moment could never be started again.
        """
        if self.last("offsets") >= 0:
            return
        for log in LOGS:
            for info in self._files.list(f"{log}/"):
                if _UNFINISHED.fullmatch(info.name.removeprefix(f"{log}/")):
                    self._files.delete(info.name)

    def read(self, log: Log, batch: int) -> bytes | None:
        """One entry's bytes, `None` if it is not there."""
        if not any(info.name == f"{log}/{batch}" for info in self._files.list(f"{log}/")):
            return None
        return self._files.get(f"{log}/{batch}")

    def put(self, log: Log, batch: int, entry: bytes) -> None:
        """Write one entry."""
        self._forget_checksum(log, batch)
        self._files.put(f"{log}/{batch}", [entry])

    def remove(self, log: Log, batch: int) -> None:
        """Take one entry away; it may be gone already."""
        self._forget_checksum(log, batch)
        if any(info.name == f"{log}/{batch}" for info in self._files.list(f"{log}/")):
            self._files.delete(f"{log}/{batch}")

    def _forget_checksum(self, log: Log, batch: int) -> None:
        # Hadoop's local file system keeps a checksum beside each file and refuses a file that does not match it.
        if any(info.name == f"{log}/.{batch}.crc" for info in self._files.list(f"{log}/")):
            self._files.delete(f"{log}/.{batch}.crc")


class _RollBack(msgspec.Struct):
    """What was taken out of the ledger: enough to put it back.

    `again` is the batch that Spark is made to run; `commit` its entry in `commits/` (`None`: it had none, and the one
    that the extra run makes must go again); `planned` the entry of the following batch in `offsets/`, if there was one.
    """

    again: int
    commit: str | None
    planned: str | None
    format: int = FORMAT


class RollBack:
    """Makes Spark run one batch again, and puts the ledger back as it was.

    The ledger belongs to the newest generation: it puts back what others have left, and they touch nothing any more.
    """

    def __init__(self, files: FileSystem, ledger: Ledger, state: FileSystem, generation: int) -> None:
        """For a run.

        Args:
            files: the checkpoint. ledger: of it.
            state: the `millpond/` folder of the state. generation: that the run has claimed there.
        """
        self._files = files
        self._ledger = ledger
        self._state = state
        self._generation = generation

    def undo_interrupted(self) -> None:
        """Finish what starts that were cut off in the middle of a roll-back left behind."""
        journals = [info.name for info in self._files.list(_FOLDER) if info.name.startswith(_PENDING)]
        for journal in sorted(journals, reverse=True):  # each found the ledger as those before it had left it
            try:
                record = read_document(self._files, journal, _RollBack)
            except StateDamagedError as error:
                raise StateDamagedError(
                    f"The journal of an interrupted recovery is damaged: {error.message}",
                    file=error.file,
                    action="Restore it from a backup: it holds what was taken out of offsets/ and commits/.",
                ) from error
            self._restore(record, journal)

    @contextmanager
    def again(self, batch: int) -> Iterator[None]:
        """Within this context the ledger says that `batch` is planned, not committed, and followed by nothing.

        If it is left by an error, the ledger stays so until the next start: what runs the batch may go on for a while,
        and would write to a ledger that was put back.

        Raises:
            FencedError: another start of the query has taken the ledger over.
        """
        check_fence(self._state, self._generation)
        commit, planned = self._ledger.read("commits", batch), self._ledger.read("offsets", batch + 1)
        record = _RollBack(
            again=batch,
            commit=commit.decode() if commit is not None else None,
            planned=planned.decode() if planned is not None else None,
        )
        journal = f"{_PENDING}{digits(self._generation)}.json"
        write_document(self._files, journal, record)
        # The plan of the next batch goes first: with `commits/C` gone and `offsets/C+1` there, Spark skips to C+2.
        self._ledger.remove("offsets", batch + 1)
        self._ledger.remove("commits", batch)
        yield
        check_fence(self._state, self._generation)
        self._restore(record, journal)

    def _restore(self, record: _RollBack, journal: str) -> None:
        if record.commit is None:
            # Only what Spark has committed is followed by a plan: an older run, still alive, has gone on since.
            gone_on = record.planned is None and self._ledger.read("offsets", record.again + 1) is not None
            if not gone_on:
                self._ledger.remove("commits", record.again)
        elif self._ledger.read("commits", record.again) is None:
            self._ledger.put("commits", record.again, record.commit.encode())
        if record.planned is not None:
            self._ledger.put("offsets", record.again + 1, record.planned.encode())
        self._files.put(f"{_FOLDER}batch-{record.again}.json", [self._files.get(journal)])
        self._files.delete(journal)


def is_rolled_back(files: FileSystem) -> bool:
    """Whether entries of the ledger have been taken out and not put back, by a start that did not end.

    Args:
        files: the checkpoint.
    """
    return any(info.name.startswith(_PENDING) for info in files.list(_FOLDER))


def batch_time(entry: bytes) -> int:
    """The `batchTimestampMs` of an entry of `offsets/`: milliseconds since the epoch."""
    return int(json.loads(entry.decode().splitlines()[1])["batchTimestampMs"])

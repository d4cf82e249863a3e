"""Spark's offset log (`offsets/<batch>`, written before a batch runs) and commit log (`commits/<batch>`, after it).

Millpond reads them at start. To make Spark run a batch again, it removes entries and restores them afterwards. Each
change is first recorded in a journal below `millpond/rolled-back/`, so that the next start undoes an interrupted one.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from millpond.checkpoint.formats.documents import FORMAT, digits, read_document, write_document
from millpond.checkpoint.generation import check_fence
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import AlreadyExistsError, FileSystem, MissingFileError
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.retry import with_retries
from millpond.tasks.offset_log import LogEntry, newest_batch

log = logging.getLogger("millpond")

Log = Literal["offsets", "commits"]

METADATA = "metadata"
"""The file in which Spark keeps the id of a query."""
LOGS: tuple[Log, ...] = ("offsets", "commits")
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UNFINISHED = re.compile(rf"\.\d+\.{_UUID}\.tmp|\.\.\d+\.{_UUID}\.tmp\.crc")
"""Spark's temporary files in its logs, and the checksum files of Hadoop's local file system for them."""

_FOLDER = "millpond/rolled-back/"
_PENDING = f"{_FOLDER}pending-"


class QueryLogs:
    """The offset log and commit log of one query's checkpoint, and the query's id.

    Args:
        files: the checkpoint location.
    """

    def __init__(self, files: FileSystem) -> None:
        self._files = files

    def query_id(self) -> str | None:
        """Return the query's id; None before its first start.

        Raises:
            StateDamagedError: the file with the id is altered.
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
        """Refuse logs without the query's id: under a new id, sinks that know batches by id would take them twice.

        Raises:
            StateDamagedError: the file with the id is missing.
        """
        if self._files.exists(METADATA):
            return
        last = max(self.last_planned, self.last_committed)
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
        """Refuse committed batches without a plan: Spark would run batches again that the state contains.

        Raises:
            StateDamagedError: entries of `offsets/` are missing.
        """
        planned, committed = self.last_planned, self.last_committed
        if planned < committed:
            offsets = f"offsets/ has batches up to {planned} only" if planned >= 0 else "offsets/ is empty or gone"
            raise StateDamagedError(
                f"commits/ has batches up to {committed}, and {offsets}: the input of later batches is not known.",
                action="Put back what was in it, from a backup of the checkpoint, or start with a new "
                "checkpointLocation, which reads the source from its beginning.",
                file=self._files.locate("offsets/"),
            )

    def identify(self) -> str:
        """Return the query's id, and choose one at the first start: Spark uses an id that exists."""

        def choose() -> None:
            if self.query_id() is None:
                self._files.put(METADATA, [json.dumps({"id": str(uuid.uuid4())}).encode()], create=True)

        # Two starts may choose an id at once: one creates the file, and both then read it.
        with suppress(AlreadyExistsError):
            with_retries(choose)
        if isinstance(self._files, LocalFiles):
            self._files.remove_empty_staging()
        identity = self.query_id()
        assert identity is not None
        return identity

    @property
    def next_batch(self) -> int:
        """The batch that Spark runs next. A planned batch implies that the batch before it is committed."""
        return max(self.last_committed + 1, self.last_planned, 0)

    @property
    def last_planned(self) -> int:
        """The newest batch in the offset log; −1 if it is empty."""
        return newest_batch(self._files, "offsets/")

    @property
    def last_committed(self) -> int:
        """The newest batch in the commit log; −1 if it is empty."""
        return newest_batch(self._files, "commits/")

    def store_partitions(self) -> int | None:
        """Return the number of partitions of Spark's state stores in its offset log; None before the first batch.

        Raises:
            StateDamagedError: the newest entry cannot be read.
        """
        last = self.last_planned
        if last < 0:
            return None
        try:
            entry = LogEntry.parse(self._files.get(f"offsets/{last}"))
            return int(entry.metadata["conf"]["spark.sql.shuffle.partitions"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateDamagedError(
                "An entry of Spark's offset log cannot be read.",
                action="Restore it from a backup, or start with a new checkpointLocation.",
                file=self._files.locate(f"offsets/{last}"),
            ) from error

    def entry_times(self, log: Log) -> dict[int, float]:
        """Return the time of each entry of a log by batch: seconds since the epoch, by the store's clock."""
        # Files in subfolders are no entries: Spark ignores them.
        entries = ((info.name.removeprefix(f"{log}/"), info.modified) for info in self._files.list(f"{log}/"))
        return {int(name): modified for name, modified in entries if name.isdigit()}

    def retained(self) -> range:
        """Return the batches that Spark can go back to: the newest planned one and those before it without a gap."""
        planned = self.entry_times("offsets")
        last = max(planned, default=-1)
        first = last
        while first - 1 in planned:
            first -= 1
        return range(max(first, 0), last + 1)

    def delete_unfinished_entries(self) -> None:
        """Remove temporary files of Spark's first entry that a crash left, if the logs have no entry yet.

        Spark writes to a temporary file, then renames it. Before batch 0, it refuses a checkpoint with any file in its
        logs. So a query whose driver died while it wrote the first entry could never be started again.
        """
        if self.last_planned >= 0:
            return
        for log in LOGS:
            for info in self._files.list(f"{log}/"):
                if _UNFINISHED.fullmatch(info.name.removeprefix(f"{log}/")):
                    self._files.delete(info.name)

    def read(self, log: Log, batch: int) -> bytes | None:
        """Return the bytes of one entry; None if it does not exist."""
        try:
            return self._files.get(f"{log}/{batch}")
        except MissingFileError:
            return None

    def put(self, log: Log, batch: int, entry: bytes) -> None:
        """Write one entry."""
        self._delete_checksum(log, batch)
        self._files.put(f"{log}/{batch}", [entry])

    def remove(self, log: Log, batch: int) -> None:
        """Remove one entry, if it exists."""
        self._delete_checksum(log, batch)
        if self._files.exists(f"{log}/{batch}"):
            self._files.delete(f"{log}/{batch}")

    def _delete_checksum(self, log: Log, batch: int) -> None:
        # Hadoop's local file system keeps a checksum beside each file, and refuses a file with another checksum.
        if self._files.exists(f"{log}/.{batch}.crc"):
            self._files.delete(f"{log}/.{batch}.crc")


class _RollBack(msgspec.Struct):
    """Journal record of a roll-back: the removed entries of Spark's logs.

    Attributes:
        again: the batch that Spark runs again.
        commit: its entry in `commits/`; None: there was no entry, and the one that the extra run writes is removed.
        planned: the entry of the following batch in `offsets/`; None if there was no entry.
    """

    again: int
    commit: str | None
    planned: str | None
    format: int = FORMAT


class RollBack:
    """Makes Spark run one batch again, and restores Spark's logs afterwards.

    The logs belong to the newest generation. It restores entries that earlier generations have removed; those are
    fenced and do not write any more.
    """

    def __init__(self, files: FileSystem, query_logs: QueryLogs, state: FileSystem, generation: int) -> None:
        """Prepare for a run.

        Args:
            files: the checkpoint.
            query_logs: the logs of the checkpoint.
            state: the `millpond/` folder of the state.
            generation: the generation that the run has claimed.
        """
        self._files = files
        self._logs = query_logs
        self._state = state
        self._generation = generation
        self._journal = f"{_PENDING}{digits(generation)}.json"

    def undo_interrupted(self) -> None:
        """Restore the entries that interrupted starts have removed.

        If the user has gone back to an earlier batch, Spark's logs no longer plan the journal's batch. The journal is
        then archived without being restored, because its entries belong to later batches.

        Raises:
            StateDamagedError: a journal is damaged.
        """
        journals = [
            info.name
            for info in self._files.list(_FOLDER)
            # If a newer start has taken over, its journal is in use.
            if info.name.startswith(_PENDING) and info.name <= self._journal
        ]
        records = {journal: self._read(journal) for journal in journals}
        planned: set[int] = set()  # batches whose entry of offsets/ is in a journal that will be restored
        # In the order of batches: the plan of a journal's batch may be in the journal of the batch before.
        for journal, record in sorted(records.items(), key=lambda entry: entry[1].again):
            if record.again not in planned and self._logs.read("offsets", record.again) is None:
                log.warning(
                    "the removed log entries of batch %d are not restored: offsets/ has no entry of this batch, "
                    "so the query has gone back to an earlier one",
                    record.again,
                )
                self._archive(record, journal)
                del records[journal]
            elif record.planned is not None:
                planned.add(record.again + 1)
        for journal in sorted(records, reverse=True):  # newest first: each record is relative to the older ones
            self._restore(records[journal], journal)

    def _read(self, journal: str) -> _RollBack:
        try:
            return read_document(self._files, journal, _RollBack)
        except StateDamagedError as error:
            raise StateDamagedError(
                f"The journal of an interrupted recovery is damaged: {error.message}",
                file=error.file,
                action="Restore it from a backup: it holds what was taken out of offsets/ and commits/.",
            ) from error

    @contextmanager
    def replaying(self, batch: int) -> Iterator[None]:
        """Within this context, Spark's logs show `batch` as planned, not committed, and last.

        After an error, the logs stay so until the next start: Spark may go on with the batch for a while, and would
        write to restored logs.

        Raises:
            FencedError: another start of the query has taken over.
        """
        check_fence(self._state, self._generation)
        commit, planned = self._logs.read("commits", batch), self._logs.read("offsets", batch + 1)
        # Written before anything is removed, so that the next start can undo an interrupted replay.
        record = _RollBack(
            again=batch,
            commit=commit.decode() if commit is not None else None,
            planned=planned.decode() if planned is not None else None,
        )
        write_document(self._files, self._journal, record)
        # Remove the plan of the next batch first: with `offsets/C+1` and without `commits/C`, Spark skips to C+2.
        self._logs.remove("offsets", batch + 1)
        self._logs.remove("commits", batch)
        yield
        # A fenced start must not restore entries: the logs belong to the newer generation.
        check_fence(self._state, self._generation)
        self._restore(record, self._journal)

    def _restore(self, record: _RollBack, journal: str) -> None:
        if record.commit is None:
            # Spark plans a batch only after a commit: a plan here means that an older run is alive and has gone on.
            gone_on = record.planned is None and self._logs.read("offsets", record.again + 1) is not None
            if not gone_on:
                self._logs.remove("commits", record.again)
        else:
            # Overwrite the entry of the repeated batch. Spark ran it with the event times of that batch alone, so its
            # watermark may be lower than the original's.
            self._logs.put("commits", record.again, record.commit.encode())
        if record.planned is not None:
            self._logs.put("offsets", record.again + 1, record.planned.encode())
        self._archive(record, journal)

    def _archive(self, record: _RollBack, journal: str) -> None:
        self._files.put(f"{_FOLDER}batch-{record.again}.json", [self._files.get(journal)])
        self._files.delete(journal)


def is_rolled_back(files: FileSystem) -> bool:
    """Return whether an interrupted start has removed entries of Spark's logs and not restored them.

    Args:
        files: the checkpoint.
    """
    return any(info.name.startswith(_PENDING) for info in files.list(_FOLDER))

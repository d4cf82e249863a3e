"""Entries of Spark's offset log and commit log, and the running batch for tasks to which Spark does not give it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.backends.retry import LONG_RETRY
from millpond.files.locations.opening import open_filesystem
from millpond.tasks.operator_task import OperatorTask


class LogEntry(NamedTuple):
    """An entry of Spark's offset log or commit log.

    Attributes:
        version: the version of the log's format, such as `v1`.
        metadata: Spark's metadata of the batch, a JSON object.
        offsets: the end offset of each source, as the source writes it; empty in the commit log.
    """

    version: str
    metadata: dict[str, Any]
    offsets: list[str]

    @classmethod
    def parse(cls, entry: bytes) -> LogEntry:
        """Parse the lines of an entry.

        Raises:
            ValueError: the entry is truncated, or its metadata is no JSON.
        """
        version, metadata, *offsets = entry.decode().splitlines()
        return cls(version, json.loads(metadata), offsets)


class Planned(NamedTuple):
    """Watermark and timestamp that Spark planned for a batch, in milliseconds since the epoch."""

    watermark: int
    time: int


def newest_batch(files: FileSystem, log: str) -> int:
    """Return the newest batch in the log in a folder (`log`, empty or with a `/` at its end); −1 if it is empty."""
    # Files in subfolders are no entries: Spark ignores them.
    names = (info.name.removeprefix(log) for info in files.list(log))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def latest_batch(task: OperatorTask) -> int:
    """Return the newest batch in the query's offset log, which is the running one.

    Raises:
        TransientError: the log is empty.
    """
    batch = newest_batch(_log(task), "")
    if batch < 0:
        raise TransientError(
            "No batch is planned, so this input belongs to none.",
            action="Use the batch DataFrame only inside foreachBatch.",
            file=task.offsets,
        )
    return batch


def planned(task: OperatorTask, batch: int) -> Planned:
    """Return the offset log's times of a batch; zeros for batch −1, before which no time is known.

    Raises:
        StateDamagedError: the batch's entry is missing or cannot be read.
    """
    if batch < 0:
        return Planned(0, 0)
    try:
        metadata = LogEntry.parse(_log(task).get(str(batch))).metadata
        return Planned(int(metadata["batchWatermarkMs"]), int(metadata["batchTimestampMs"]))
    except (KeyError, TypeError, ValueError, MissingFileError) as error:
        raise StateDamagedError(
            "An entry of Spark's offset log cannot be read.", file=f"{task.offsets}/{batch}"
        ) from error


def check_time(task: OperatorTask, batch: int, time: int | None) -> None:
    """Check that a marker's time is that of the batch, for attempts that may not know their batch.

    Raises:
        TransientError: the input belongs to another batch.
    """
    if time != planned(task, batch).time:
        raise TransientError(
            f"The input is not that of batch {batch}, which its task takes it for.",
            action="Threads started in foreachBatch must end before the function returns: make the pool inside of it.",
        )


def _log(task: OperatorTask) -> FileSystem:
    return open_filesystem(task.offsets, retry_config=LONG_RETRY)

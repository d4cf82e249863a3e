"""Reads of Spark's offset log, for tasks to which Spark does not give their batch."""

from __future__ import annotations

import json
from typing import NamedTuple

from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.backends.retry import LONG_RETRY
from millpond.files.locations.opening import open_filesystem
from millpond.tasks.operator_task import OperatorTask


class Planned(NamedTuple):
    """Watermark and timestamp that Spark planned for a batch, in milliseconds since the epoch."""

    watermark: int
    time: int


def latest_batch(task: OperatorTask) -> int:
    """Return the newest batch in the query's offset log, which is the running one.

    Raises:
        TransientError: the log is empty.
    """
    names = [info.name.rpartition("/")[2] for info in _log(task).list("")]
    numbers = [int(name) for name in names if name.isdigit()]
    if not numbers:
        raise TransientError(
            "No batch is planned, so this input belongs to none.",
            action="Use the batch DataFrame only inside foreachBatch.",
            file=task.offsets,
        )
    return max(numbers)


def planned(task: OperatorTask, batch: int) -> Planned:
    """Return the offset log's times of a batch; zeros for batch −1, before which no time is known.

    Raises:
        StateDamagedError: the batch's entry is missing or cannot be read.
    """
    if batch < 0:
        return Planned(0, 0)
    try:
        # The second line of an entry is Spark's metadata of the batch; the first is the version of the format.
        entry = json.loads(bytes(memoryview(_log(task).get(str(batch)))).decode().splitlines()[1])
        return Planned(int(entry["batchWatermarkMs"]), int(entry["batchTimestampMs"]))
    except (IndexError, KeyError, ValueError, MissingFileError) as error:
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

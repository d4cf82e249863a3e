"""What Spark's offset log says of the batch that runs, for tasks that Spark does not tell."""

from __future__ import annotations

import json
from typing import NamedTuple

from millpond.errors import StateDamagedError, TransientError
from millpond.files.backends.filesystem import FileSystem, MissingFileError, open_filesystem
from millpond.files.backends.patience import LASTING
from millpond.slot.batch.task import PipeTask


class Planned(NamedTuple):
    """What Spark has planned for a batch, in milliseconds since the epoch: its watermark and its timestamp."""

    watermark: int
    time: int


def latest_batch(task: PipeTask) -> int:
    """The newest batch in the query's offset log: the one that runs now.

    Raises:
        TransientError: there is none.
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


def planned(task: PipeTask, batch: int) -> Planned:
    """What the offset log says of a batch; of the one before the first, that nothing is known of time yet.

    Raises:
        StateDamagedError: its entry is missing or cannot be read.
    """
    if batch < 0:
        return Planned(0, 0)
    try:
        entry = json.loads(bytes(memoryview(_log(task).get(str(batch)))).decode().splitlines()[1])
        return Planned(int(entry["batchWatermarkMs"]), int(entry["batchTimestampMs"]))
    except (IndexError, KeyError, ValueError, MissingFileError) as error:
        raise StateDamagedError(
            "An entry of Spark's offset log cannot be read.", file=f"{task.offsets}/{batch}"
        ) from error


def check_time(task: PipeTask, batch: int, time: int | None) -> None:
    """Check that a marker's time is that of a batch, for attempts that may not know their batch.

    Raises:
        TransientError: the input belongs to another batch.
    """
    if time != planned(task, batch).time:
        raise TransientError(
            f"The input is not that of batch {batch}, which its task takes it for.",
            action="Threads started in foreachBatch must end before the function returns: make the pool inside of it.",
        )


def _log(task: PipeTask) -> FileSystem:
    return open_filesystem(task.offsets, retry_config=LASTING)

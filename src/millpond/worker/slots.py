"""Start of a host's slots in Spark's Python worker, before the host's first partitions."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.slot.process.client import SlotFinder
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.environment import Environment


class StartSlots:
    """Function for `DataFrame.mapInArrow` that starts the slots of the host that it runs on; it yields nothing.

    Args:
        task: any operator of the query.
    """

    def __init__(self, task: OperatorTask) -> None:
        self.environment = Environment()  # first, so that it is the first to be unpickled
        self.task = task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Start all slots, and return when they answer.

        Raises:
            TransientError: a slot did not start.
        """
        for _ in batches:
            pass
        finder = SlotFinder(self.task)
        for number in range(min(self.task.slots, self.task.partitions)):
            finder.find(number)[0].close()
        yield from ()

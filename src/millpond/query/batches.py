"""`foreachBatch` under Millpond: after the user's function, every partition must have run.

A partition that the function never asked for (`first()`, `limit(1)`) has not applied the batch. Spark fails such a
batch for its own state stores (SPARK-52008); so does this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from millpond.checkpoint.generation import read_base
from millpond.errors import UsageError
from millpond.files.filesystem import join_url, open_filesystem
from millpond.slot.client import held_versions
from millpond.slot.pipe import PartitionDone
from millpond.slot.task import PipeTask

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

BatchFunction = Callable[[DataFrame, int], Any]

_GRACE = 2.0
"""Seconds given to partitions whose consumer stopped early: their slots may still be finishing the batch."""


class CompleteBatch:
    """A `foreachBatch` function that checks what the user's function left undone.

    Args:
        function: the user's.
        tasks: the query's Millpond operators.
        coverage: the accumulator in which pipes report.
    """

    def __init__(
        self, function: BatchFunction, tasks: list[PipeTask], coverage: Accumulator[list[PartitionDone]]
    ) -> None:
        self.function = function
        self.tasks = tasks
        self.coverage = coverage

    def __call__(self, df: DataFrame, batch: int) -> None:
        """Run the user's function, then check.

        Raises:
            UsageError: naming the operators and partitions that have not run.
        """
        self.function(df, batch)
        missing = self._missing(batch)
        self.coverage.value = []
        if missing:
            operator, partition = min(missing)
            raise UsageError(
                f"The foreachBatch function did not read the whole batch: {len(missing)} of "
                f"{len(self._expected())} state partitions never ran, so their state lacks batch {batch}.",
                action="Read all of the batch (as count(), write or collect() do); first() and limit() do not. "
                "To use it more than once, persist() it.",
                query=self.tasks[0].query,
                operator=str(operator),
                partition=partition,
                version=batch,
            )

    def _expected(self) -> set[tuple[int, int]]:
        return {(task.operator, partition) for task in self.tasks for partition in range(task.partitions)}

    def _missing(self, batch: int) -> set[tuple[int, int]]:
        reported = {(done.operator, done.partition) for done in self.coverage.value if done.batch == batch}
        missing = self._expected() - reported
        if missing and self._began_with(batch + 1):
            return set()
        deadline = time.monotonic() + _GRACE
        # A consumer that stops early, as isEmpty() does, gives a pipe no chance to report; the slots know.
        while missing:
            held = held_versions(self.tasks[0])
            missing = {place for place in missing if held.get(place, -1) <= batch}
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return missing

    def _began_with(self, version: int) -> bool:
        """Whether the run began with the state after this batch: then a sink that has it may skip it, and nothing runs.

        It does when an earlier run was killed between the sink's commit of the batch and Spark's.
        """
        task = self.tasks[0]
        return read_base(open_filesystem(join_url(task.location, "millpond")), task.generation).has(version)

"""`foreachBatch` under Millpond: the function sees the user's settings, and every partition runs.

A partition that the user's function did not read (`first()`, `limit(1)`) has not applied the batch. Spark fails such a
batch for its own state stores (SPARK-52008). Millpond runs the remaining partitions.

A stop of the query interrupts the function. Spark detects that by a regular expression over the text of the function's
error, which needs stack space for every character. An error of usual length overflows the stack, and the query neither
ends nor goes on. So the error is replaced by one with a short text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from millpond.errors import UsageError
from millpond.query.running.session_settings import changed_settings
from millpond.slot.process.client import query_status
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slot_stage import PartitionDone

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

BatchFunction = Callable[[DataFrame, int], Any]

_INTERRUPTED = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
    "SPARK_JOB_CANCELLED",
)
"""Texts in the error of a JVM call that a stop of the query interrupted."""


class BatchInterruptedError(Exception):
    """The user's function was interrupted by a stop of the query; Spark recognises the text."""


class CompleteBatch:
    """A `foreachBatch` function that runs the user's function, then the partitions that it did not read.

    Args:
        function: the user's function.
        tasks: the query's Millpond operators.
        coverage: the accumulator in which slot stages report finished partitions.
        running_values: the values with which the query runs, for the settings in `user_values`.
        user_values: the user's values of these settings; None: not set.
    """

    def __init__(
        self,
        function: BatchFunction,
        tasks: list[OperatorTask],
        coverage: Accumulator[list[PartitionDone]],
        running_values: Mapping[str, str],
        user_values: Mapping[str, str | None],
    ) -> None:
        self.function = function
        self.running_values = running_values
        self.user_values = user_values
        self.tasks = tasks
        self.coverage = coverage
        self.coverage.value = []  # drop reports of a replay in recovery

    def __call__(self, df: DataFrame, batch: int) -> None:
        """Run the user's function, then the partitions that it did not read.

        Raises:
            UsageError: partitions are missing even after a read of the whole batch; names operator and partition.
            BatchInterruptedError: the query is being stopped.
        """
        try:
            self._run(df, batch)
        except Py4JJavaError as error:
            text = str(error)
            if not any(sign in text for sign in _INTERRUPTED):
                raise
            summary = text.partition("\n\tat ")[0].replace("\n", " ")[:300]
            raise BatchInterruptedError(
                f"py4j.protocol.Py4JJavaError: An error occurred while calling the function ({summary}): "
                f"{_INTERRUPTED[0]}"
            ) from None

    def _run(self, df: DataFrame, batch: int) -> None:
        # The function may start queries of its own, which have to be planned with the user's settings.
        with changed_settings(df.sparkSession, self.user_values, self.running_values):
            self.function(df, batch)
        if self._missing(batch):
            # Read all partitions: slots on other hosts do not report theirs. Those that have run answer from memory.
            df.write.format("noop").mode("overwrite").save()
        missing = self._missing(batch)
        self.coverage.value = []
        if missing:
            operator, partition = min(missing)
            raise UsageError(
                f"The query's plan does not read all of its state: {len(missing)} of {len(self._expected())} "
                f"state partitions have not run, or were cut short on other hosts, in batch {batch}.",
                action="Move what cuts it short (a limit, a join with nothing) from the query into the foreachBatch "
                "function.",
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
        if not missing:
            return missing
        # A slot stage cannot report if its consumer stops early, as isEmpty() does; this host's slots know what ran.
        # A slot counts a batch as answered once the state that the batch waits for is durable. A reader that stopped
        # before may not have waited for that, and Spark's commit log must not run ahead of the state.
        task = self.tasks[0]
        status = query_status(SlotDirectory.of(task), task.key, task.settings.silence_timeout)
        answered = {(operator, partition): last for operator, partition, last in status.answered}
        return {place for place in missing if answered.get(place, -1) < batch}

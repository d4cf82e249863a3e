"""`foreachBatch` under Millpond: the function finds the user's settings, and behind it every partition has run.

A partition that the user's function never asked for (`first()`, `limit(1)`) has not applied the batch. Spark fails such
a batch for its own state stores (SPARK-52008); this runs what is left.

A query that is stopped while the function runs interrupts it. Spark looks for that in the text of the function's error,
by a regular expression that needs stack for every character: an error of usual length overflows it, and the query
neither ends nor goes on. It is given a short text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame

from millpond.errors import UsageError
from millpond.query.session import changed
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import answered_batches
from millpond.slot.pipe.pipe import PartitionDone

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

BatchFunction = Callable[[DataFrame, int], Any]

_INTERRUPTED = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
    "SPARK_JOB_CANCELLED",
)
"""What errors of a JVM call say that a stop of the query has ended."""


class BatchInterruptedError(Exception):
    """The user's function was ended by a stop of the query, in words that Spark recognises."""


class CompleteBatch:
    """A `foreachBatch` function that does what the user's function left undone.

    Args:
        function: the user's.
        tasks: the query's Millpond operators.
        coverage: the accumulator in which pipes report.
        inside: settings that the query runs with, of those that `outside` names.
        outside: what the user has set them to; None: not set.
    """

    def __init__(
        self,
        function: BatchFunction,
        tasks: list[PipeTask],
        coverage: Accumulator[list[PartitionDone]],
        inside: Mapping[str, str],
        outside: Mapping[str, str | None],
    ) -> None:
        self.function = function
        self.inside = inside
        self.outside = outside
        self.tasks = tasks
        self.coverage = coverage
        self.coverage.value = []  # a recovery that ran the batch into nothing has reported, too

    def __call__(self, df: DataFrame, batch: int) -> None:
        """Run the user's function, then the partitions that it has left out.

        Raises:
            UsageError: even reading the whole batch leaves partitions out; names the operator and partition.
            BatchInterruptedError: the query is being stopped.
        """
        try:
            self._run(df, batch)
        except Py4JJavaError as error:
            text = str(error)
            if not any(sign in text for sign in _INTERRUPTED):
                raise
            first = text.partition("\n\tat ")[0].replace("\n", " ")[:300]
            raise BatchInterruptedError(
                f"py4j.protocol.Py4JJavaError: An error occurred while calling the function ({first}): "
                f"{_INTERRUPTED[0]}"
            ) from None

    def _run(self, df: DataFrame, batch: int) -> None:
        with changed(df.sparkSession, self.outside, self.inside):
            self.function(df, batch)
        if self._missing(batch):
            # Partitions that have applied the batch answer from memory; which they are, other hosts do not tell.
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
        # A consumer that stops early, as isEmpty() does, gives a pipe no chance to report; this host's slots know.
        # A slot has answered once what the batch waits for is durable: a reader that was cut off before may not have
        # waited, and must not let Spark's ledger run ahead of the state.
        answered = answered_batches(self.tasks[0])
        return {place for place in missing if answered.get(place, -1) < batch}

"""The slot stage: streams a partition's rows to its slot and yields the slot's output, in Spark's Python worker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.accumulators import AccumulatorParam

from millpond.errors import MillpondError, TransientError
from millpond.slot.process.client import SlotFinder
from millpond.slot.process.connection import Connection, Kind, PeerGone, PeerSilent
from millpond.slot.process.lifecycle import POLL_SECONDS
from millpond.slot.process.messages import Call, Done, RunBatch
from millpond.spec.types import parse_type
from millpond.tasks.metric_rows import metric_rows, with_metric_column
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import MARK, first_hash, located_rows, misplaced_error
from millpond.worker.environment import Environment
from millpond.worker.spark_task import added_paths, batch_of, task_context, without_delayed_acks

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

    from millpond.tasks.user_functions import UserFunctions
    from millpond.tasks.user_processor import UserProcessor
    from millpond.worker.processors.processor import RunningProcessor
    from millpond.worker.user_functions import GroupCaller

log = logging.getLogger("millpond")

_WARNING_SECONDS = 30.0

_RETRY_ADVICE = "The task may be tried again (local[N] never does: use local[N,4])."


class PartitionDone(NamedTuple):
    """Report of a slot stage after the last row of a partition's batch."""

    operator: int
    batch: int
    partition: int
    metrics: dict[str, float]


class Coverage(AccumulatorParam):  # type: ignore[misc]
    """Behaviour of a Spark accumulator that collects which partitions have run, with their figures."""

    def zero(self, value: list[PartitionDone]) -> list[PartitionDone]:
        """Return the empty value."""
        return []

    def addInPlace(self, value1: list[PartitionDone], value2: list[PartitionDone]) -> list[PartitionDone]:
        """Concatenate two lists of reports."""
        value1.extend(value2)
        return value1


class _WaitWarning:
    """Logs the text of heartbeats while a task waits for its slot: at once, then at most every 30 s."""

    def __init__(self, run: RunBatch) -> None:
        self._run = run
        self._last_warning = -math.inf

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last_warning < _WARNING_SECONDS:
            return
        self._last_warning = time.monotonic()
        place = f"query {self._run.task.query}, operator {self._run.task.operator}, partition {self._run.partition}"
        log.warning("batch %s waits (%s): %s", self._run.batch, place, text)


_warned: set[tuple[str, int]] = set()
"""Operators, by query, for which this process has warned about failed lookups."""


def _warn_failed_lookups(run: RunBatch, metrics: Mapping[str, float]) -> None:
    """Warn once per operator about keys of a lookup join whose lookup failed without failing the batch."""
    failed, operator = metrics.get("failed_keys"), (run.task.query, run.task.operator)
    if not failed or operator in _warned:
        return
    _warned.add(operator)
    log.warning(
        "batch %s: %d keys could not be looked up, and their rows came out with nulls, as on_error of enrich says "
        "(query %s, operator %s, partition %s). The slots' log says why where it is 'null', and each row where it is "
        "'side'; for further batches see failed_keys in the progress",
        *(run.batch, failed, *operator, run.partition),
    )


class SlotStage:
    """Function for `DataFrame.mapInArrow` that has one operator's batch computed by its slot.

    Input columns: `__hash`, `__mark`, then the operator's, in the order of its spec; output columns: the operator's.
    The first row's hash determines the partition, the task's local properties the batch.

    Args:
        task: the operator.
        coverage: accumulator (of `Coverage`) that collects which partitions have run in which batch.
        metrics: whether the output has the extra column `millpond.metrics.METRIC_COLUMN` and rows that carry figures.
        functions: user functions that compute the output from the slot's rows; None if those are the output.
        processor: user processor that the slot calls; None if there is none.
    """

    def __init__(
        self,
        task: OperatorTask,
        coverage: Accumulator[list[PartitionDone]] | None = None,
        *,
        metrics: bool = False,
        functions: UserFunctions | None = None,
        processor: UserProcessor | None = None,
    ) -> None:
        self.environment = Environment()  # first, so that it is the first to be unpickled
        self.task = task
        self.coverage = coverage
        self.metrics = metrics
        self.functions = functions
        self.processor = processor

    def with_functions(self, functions: UserFunctions) -> SlotStage:
        """Return a stage that also calls user functions over the groups that the slot yields."""
        return SlotStage(self.task, self.coverage, metrics=self.metrics, functions=functions)

    def with_processor(self, processor: UserProcessor) -> SlotStage:
        """Return a stage that also calls a user processor when the slot asks for it."""
        return SlotStage(self.task, self.coverage, metrics=self.metrics, processor=processor)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send everything to the partition's slot, then yield what it answers.

        The slot sends its first row after all input is in and its state is sealed; a consumer may stop at any row.

        Raises:
            MillpondError: the slot's own error, or TransientError when the slot died or hangs.
        """
        batches = without_delayed_acks(batches)
        batch = next((b for b in batches if b.num_rows), None)
        if batch is None:
            return  # not one of the operator's partitions, which all have a marker row
        partition = self.task.partition_of(first_hash(batch))
        context = task_context()
        batches = chain([batch], batches)
        if self.task.located:
            if not batch.column(MARK)[0].as_py():
                raise misplaced_error().at(query=self.task.query, operator=str(self.task.operator))
            batches = located_rows(batches, *self.task.hash_range(partition))
        run = RunBatch(
            self.task,
            partition,
            batch_of(context),
            context.taskAttemptId() if context else 0,
            verify_batch=self.coverage
            is not None,  # foreachBatch: user code has the batch's DataFrame and may start threads
            paths=added_paths() if context else [],
        )
        finder = SlotFinder(self.task)
        # Always the same slot, which has the partition's state in memory.
        connection, process = finder.find(partition % self.task.slots)
        connection.on_heartbeat = _WaitWarning(run)
        try:
            yield from self._converse(connection, run, batches)
        except MillpondError as error:
            if isinstance(error, TransientError):
                error.action = f"{error.action} {finder.directory.log_tail()}".lstrip()
            raise self._at_place(error, run) from None
        except PeerSilent as error:
            # A hung slot must not resume and commit: the next attempt's slot starts from the sealed files.
            finder.replace(partition % self.task.slots, process)
            hung = TransientError(
                f"Slot process {process.pid} hung and was killed: {error}.",
                action=f"{_RETRY_ADVICE} {finder.directory.log_tail()}",
            )
            raise self._at_place(hung, run) from error
        except PeerGone as error:
            # The template logs why a slot has died before it collects the process.
            process.wait_reaped(2 * POLL_SECONDS)
            what = "cut this attempt off" if process.alive() else "died"
            died = TransientError(
                f"Slot process {process.pid} {what}: {error}.",
                action=f"{_RETRY_ADVICE} {finder.directory.log_tail()}",
            )
            raise self._at_place(died, run) from error
        finally:
            connection.close()

    def _at_place(self, error: MillpondError, run: RunBatch) -> MillpondError:
        return error.at(
            query=self.task.query, operator=str(self.task.operator), partition=run.partition, version=run.batch
        )

    def _converse(
        self, connection: Connection, run: RunBatch, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        connection.send(run)
        # All input goes out first: the slot calls the processor, and answers, only when it has everything.
        for number, batch in enumerate(batches):
            if number == 0:
                connection.send_schema(batch.schema)
            connection.send_batch(batch)
        connection.send_end()
        schema: pa.Schema | None = None
        running: RunningProcessor | None = None
        while True:
            kind, payload = connection.receive()
            if isinstance(payload, Call):
                running = self._call_processor(connection, payload, running, run)
                continue
            if kind is Kind.BATCH:
                for output in self._output_of(payload, run):
                    schema = output.schema
                    yield with_metric_column(output) if self.metrics else output
            elif isinstance(payload, Done):
                _warn_failed_lookups(run, payload.metrics)
                if self.metrics and payload.metrics:
                    yield metric_rows(schema or self._schema(), payload.metrics)
                if self.coverage is not None:
                    self.coverage.add([PartitionDone(run.task.operator, payload.batch, run.partition, payload.metrics)])
                return

    def _call_processor(
        self, connection: Connection, call: Call, running: RunningProcessor | None, run: RunBatch
    ) -> RunningProcessor:
        """Call the user's processor for one `Call`; the same instance serves a whole batch."""
        from millpond.worker.processors.conversation import StateFetcher, answer
        from millpond.worker.processors.start import start_processor

        assert self.processor is not None
        running = running or start_processor(self.processor, StateFetcher(connection))
        answer(connection, call, running, self._place(self.processor.title, run))
        return running

    def _place(self, title: str, run: RunBatch) -> str:
        return f"operator {self.task.operator} ({title}), partition {run.partition}, batch {run.batch}"

    def _output_of(self, batch: pa.RecordBatch, run: RunBatch) -> Iterator[pa.RecordBatch]:
        """Yield the output that a batch of the slot's rows becomes."""
        if self.functions is None:
            yield batch
            return
        try:
            yield from self._caller(batch)
        except Exception as error:
            error.add_note(
                f"This function was called by Millpond for {self._place(self.functions.title, run)}. "
                "The state is not harmed: mend the function and restart."
            )
            raise

    @cached_property
    def _caller(self) -> GroupCaller:
        # Imported late: only queries with user functions need the parts that differ between Spark versions.
        from millpond.worker.user_functions import GroupCaller

        assert self.functions is not None
        return GroupCaller(self.functions)

    def _schema(self) -> pa.Schema:
        """Return the schema of an output without rows."""
        if self.functions is not None:
            return self._caller.schema
        return pa.schema([(field.name, parse_type(field.type).arrow) for field in self.task.spec.output_fields])

"""What runs in Spark's Python worker: a thin proxy that streams a partition to its slot and the answer back."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.accumulators import AccumulatorParam

from millpond.errors import MillpondError, TransientError
from millpond.slot.batch.figures import figure_rows, with_figures
from millpond.slot.batch.rows import first_hash
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import SlotFinder
from millpond.slot.pipe.worker import added_paths, batch_of, promptly, task_context
from millpond.slot.process.connection import Connection, Kind, PeerGone, PeerSilent
from millpond.slot.process.messages import Call, Done, Run
from millpond.spec.types import parse_type

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

    from millpond.slot.pipe.processors.processor import Running, UserProcessor
    from millpond.slot.pipe.user_functions import UserFunctions

log = logging.getLogger("millpond")

_COMPLAINT_SECONDS = 30.0

_AGAIN = "The task may be tried again (local[N] never does: use local[N,4])."


class PartitionDone(NamedTuple):
    """What a pipe reports when a partition has given its last row of a batch."""

    operator: int
    batch: int
    partition: int
    metrics: dict[str, float]


class Coverage(AccumulatorParam):  # type: ignore[misc]
    """A Spark accumulator's behaviour: collects which partitions have run, and what they say of themselves."""

    def zero(self, value: list[PartitionDone]) -> list[PartitionDone]:
        """Nothing has run."""
        return []

    def addInPlace(self, value1: list[PartitionDone], value2: list[PartitionDone]) -> list[PartitionDone]:
        """Both have run."""
        value1.extend(value2)
        return value1


class _Complaint:
    """Passes on to the user what a slot that is waited for complains of: at once, then seldom."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._told = -math.inf

    def __call__(self, said: str) -> None:
        if time.monotonic() - self._told < _COMPLAINT_SECONDS:
            return
        self._told = time.monotonic()
        place = f"query {self._run.task.query}, operator {self._run.task.operator}, partition {self._run.partition}"
        log.warning("batch %s waits (%s): %s", self._run.batch, place, said)


_told: set[tuple[str, int]] = set()
"""Operators, by query, of whose nulls this process has told."""


def _tell_failed(run: Run, metrics: Mapping[str, float]) -> None:
    """Say once that keys of a lookup join could not be looked up, where the batch does not fail of it."""
    failed, operator = metrics.get("failed_keys"), (run.task.query, run.task.operator)
    if not failed or operator in _told:
        return
    _told.add(operator)
    log.warning(
        "batch %s: %d keys could not be looked up, and their rows came out with nulls, as on_error of enrich says "
        "(query %s, operator %s, partition %s). The slots' log says why where it is 'null', and each row where it is "
        "'side'; of further batches failed_keys in the progress tells",
        *(run.batch, failed, *operator, run.partition),
    )


class Pipe:
    """A function for `DataFrame.mapInArrow`: one operator's state and computation, elsewhere.

    Input columns: `__hash`, `__mark`, then the operator's, in the order of its spec; output columns: the operator's.
    The partition is told by the first row's hash, the batch by the task's local properties.

    Args:
        task: the operator.
        coverage: accumulator (of `Coverage`) that learns which partitions have run in which batch.
        figures: whether the output has one more column, `millpond.metrics.FIGURE_COLUMN`, and rows that carry it.
        functions: the user's, which make the output from what the slot gives; None where that is the output.
        processor: the user's, which the slot calls; None where it calls none.
    """

    def __init__(
        self,
        task: PipeTask,
        coverage: Accumulator[list[PartitionDone]] | None = None,
        *,
        figures: bool = False,
        functions: UserFunctions | None = None,
        processor: UserProcessor | None = None,
    ) -> None:
        self.task = task
        self.coverage = coverage
        self.figures = figures
        self.functions = functions
        self.processor = processor

    def calling(self, functions: UserFunctions) -> Pipe:
        """The same pipe with functions of the user at its end."""
        return Pipe(self.task, self.coverage, figures=self.figures, functions=functions)

    def processing(self, processor: UserProcessor) -> Pipe:
        """The same pipe with a processor of the user beside it."""
        return Pipe(self.task, self.coverage, figures=self.figures, processor=processor)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send everything to the partition's slot, then yield what it answers.

        The slot sends its first row after all input is in and its state is sealed; a consumer may stop at any row.

        Raises:
            MillpondError: the slot's own error, or TransientError when the slot died or hangs.
        """
        batches = promptly(batches)
        batch = next((b for b in batches if b.num_rows), None)
        if batch is None:
            return  # without even its marker row this is none of the operator's partitions
        partition = self.task.partition_of(first_hash(batch))
        context = task_context()
        run = Run(
            self.task,
            partition,
            batch_of(context),
            context.taskAttemptId() if context else 0,
            unsure=self.coverage is not None,  # a function of the user has the batch, and may have threads
            paths=added_paths() if context else [],
        )
        finder = SlotFinder(self.task)
        connection, process = finder.find(partition % self.task.slots)
        connection.heard = _Complaint(run)
        try:
            yield from self._converse(connection, run, batch, batches)
        except MillpondError as error:
            raise self._placed(error, run) from None
        except PeerSilent as error:
            # It must not come back to life and commit: the next attempt's slot starts from what it has sealed.
            finder.replace(partition % self.task.slots, process)
            hung = TransientError(
                f"Slot process {process.pid} hung and was killed: {error}.",
                action=_AGAIN,
            )
            raise self._placed(hung, run) from error
        except PeerGone as error:
            died = TransientError(
                f"Slot process {process.pid} died: {error}.",
                action=f"{_AGAIN} {finder.directory.last_words()}",
            )
            raise self._placed(died, run) from error
        finally:
            connection.close()

    def _placed(self, error: MillpondError, run: Run) -> MillpondError:
        return error.at(
            query=self.task.query, operator=str(self.task.operator), partition=run.partition, version=run.batch
        )

    def _converse(
        self, connection: Connection, run: Run, batch: pa.RecordBatch, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        connection.send(run)
        connection.send_schema(batch.schema)
        connection.send_batch(batch)
        for following in batches:
            connection.send_batch(following)
        connection.send_end()
        schema: pa.Schema | None = None
        running: Running | None = None
        while True:
            kind, payload = connection.receive()
            if isinstance(payload, Call):
                running = self._called(connection, payload, running, run)
                continue
            if kind is Kind.BATCH:
                for shown in self._shown(payload, run):
                    schema = shown.schema
                    yield with_figures(shown) if self.figures else shown
            elif isinstance(payload, Done):
                _tell_failed(run, payload.metrics)
                if self.figures and payload.metrics:
                    yield figure_rows(schema or self._schema(), payload.metrics)
                if self.coverage is not None:
                    self.coverage.add([PartitionDone(run.task.operator, payload.batch, run.partition, payload.metrics)])
                return

    def _called(self, connection: Connection, call: Call, running: Running | None, run: Run) -> Running:
        """Let the user's processor be called; the same one in all of a batch."""
        from millpond.slot.pipe.processors.conversation import Asking, answer

        assert self.processor is not None
        running = running or self.processor.start(Asking(connection))
        answer(connection, call, running, self._place(self.processor.title, run))
        return running

    def _place(self, title: str, run: Run) -> str:
        return f"operator {self.task.operator} ({title}), partition {run.partition}, batch {run.batch}"

    def _shown(self, batch: pa.RecordBatch, run: Run) -> Iterator[pa.RecordBatch]:
        """The output made of a batch of the slot's."""
        if self.functions is None:
            yield batch
            return
        try:
            yield from self.functions(batch)
        except Exception as error:
            error.add_note(
                f"This function was called by Millpond for {self._place(self.functions.title, run)}. "
                "The state is not harmed: mend the function and restart."
            )
            raise

    def _schema(self) -> pa.Schema:
        """Of output without rows."""
        if self.functions is not None:
            return self.functions.schema
        return pa.schema([(field.name, parse_type(field.type).arrow) for field in self.task.spec.output_fields])

"""A user's stateful processor, called beside the pipe, in Spark's Python worker.

A slot sends keys, their rows, and what their state variables have, some thousands of keys at a time; the processor's
functions are called for one key after the other, as Spark calls them, and what they changed goes back. They run where
Spark runs Python functions, not in the slot: one that fails, or takes its process down, takes no state with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice
from typing import Any

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState as State
from pyspark.sql.types import StructType
from pyspark.util import fail_on_stopiteration

from millpond.operators.processors.calls import COUNT, DUE, KEYS, ROWS, Ask, Changed
from millpond.slot.pipe.processors.clock import on_the_clock, zoneless
from millpond.slot.pipe.processors.frames import FrameResults, Frames
from millpond.slot.pipe.processors.handle import Handle
from millpond.slot.pipe.processors.rows import Pieces, RowResults, Rows, calls
from millpond.slot.pipe.processors.state.columns import stored
from millpond.slot.pipe.processors.state.values import Form
from millpond.slot.process.messages import Call
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.types import DataType, parse_type


@dataclass(frozen=True)
class InitialColumns:
    """The columns of an initial state.

    In Spark a pandas frame of it has all columns, grouping columns that are not data too; in the first batch of a query
    with an initial state, that is so of the frames of its rows as well, but not here. Spark counts the rows of a key's
    initial state as some of the rows of its first frame, and calls a processor that sees rows more than once for a key
    with more of both than frames may have (`spark.sql.execution.arrow.maxRecordsPerBatch`): not here either.

    Attributes:
        columns: all of them, as for the input.
        keys: positions of those that make up the key.
        values: positions of those that are in a pandas frame.
    """

    columns: StructType
    keys: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class UserProcessor:
    """What is called with the keys that a slot sends.

    Attributes:
        title: the operator's, for messages.
        command: the function that Spark would call, with its result type, as Spark pickles them; it has the processor.
        pandas: whether the processor sees pandas frames, not rows.
        columns: of the input, those of the key among them.
        values: positions of the columns that are in a pandas frame.
        shown: the output.
        spec: the operator.
        conf: the settings that Spark's Python worker obeys.
        initial: the initial state, if there is one.
        in_flight: of an asynchronous one, how many keys may wait for state at a time; None for others.
    """

    title: str
    command: bytes
    pandas: bool
    columns: StructType
    values: tuple[int, ...]
    shown: StructType
    spec: ProcessorSpec
    conf: dict[str, str] = field(default_factory=dict)
    initial: InitialColumns | None = None
    in_flight: int | None = None

    def start(self, ask: Ask) -> Running:
        """A processor for one partition and batch, made anew as Spark does it for every task; `ask`: as `Running`'s."""
        if self.in_flight is None:
            return Running(self, ask)
        from millpond.slot.pipe.processors.awaiting import AwaitingRunning

        return AwaitingRunning(self, ask, self.in_flight)


class Running:
    """A processor at work, for one partition and batch.

    Args:
        processor: what it is. ask: gives parts of variables while a call runs.

    Attributes:
        key: that which it is called for, if it is.
    """

    def __init__(self, processor: UserProcessor, ask: Ask) -> None:
        from pyspark.worker import RunnerConf

        freeze()
        self.ask = ask
        self.key: Any = None
        self._spec = processor.spec
        self._schema = pa.schema([(one.name, parse_type(one.type).arrow) for one in processor.spec.outputs])
        self._processor = _loaded(processor.command)
        self._handle: Handle | None = None
        conf = RunnerConf(processor.conf)
        self._zone = conf.timezone if processor.pandas else None
        key = DataType("struct", fields=tuple((f.name, parse_type(f.type)) for f in self._spec.key_fields))
        self._key = Form(key if self._zone is None else zoneless(key))

        def groups(columns: StructType, keys: Sequence[int], values: Sequence[int]) -> Rows | Frames:
            if processor.pandas:
                return Frames(columns, keys, values, conf)
            return Rows(columns, keys, conf.timezone)

        self._results: RowResults | FrameResults
        self._results = FrameResults(processor.shown, conf) if processor.pandas else RowResults(processor.shown)
        self._input = groups(processor.columns, self._spec.keys, processor.values)
        first = processor.initial
        self._initial = None if first is None else groups(first.columns, first.keys, first.values)

    def call(self, call: Call, tables: Mapping[str, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Call the processor for some keys; what it gives out.

        Raises whatever the user's functions raise.
        """
        handle = self._handle or self._initialized(call.processing)
        times = TimerValues(call.processing, call.watermark) if self._spec.timed else TimerValues(-1, -1)
        if call.phase == "initial":
            handle.begin(tables)
            yield from self._with_initial(handle, times, tables)
        elif call.phase == "rows":
            handle.begin(tables)
            yield from self._with_rows(handle, times, tables)
        elif call.phase == "timers":
            handle.state = State.DATA_PROCESSED
            handle.begin(tables)
            yield from self._with_timers(handle, times, tables)
        else:
            # with an initial state, Spark does not say that timers are over
            handle.state = State.TIMER_PROCESSED if self._initial is None else State.DATA_PROCESSED
            fail_on_stopiteration(self._processor.close)()
            handle.state = State.CLOSED
        yield from self._taken()
        self.key = handle.place.at = None

    def changes(self) -> Changed:
        """What the last call has changed (see `operators.processors.calls`)."""
        return self._handle.changes() if self._handle and self._handle.state is not State.CLOSED else []

    def _initialized(self, now: int) -> Handle:
        self._handle = Handle(self._spec, now, self.ask)
        fail_on_stopiteration(self._processor.init)(self._shown(self._handle))
        self._handle.state = State.INITIALIZED
        return self._handle

    def _with_initial(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor for rows of the initial state; nothing is given out."""
        assert self._initial is not None
        keys, counts = counted_keys(tables)
        call = fail_on_stopiteration(self._processor.handleInitialState)
        with self._pieces(tables) as pieces:
            for at, (key, rows) in enumerate(self._initial.groups(keys, counts, pieces)):
                handle.place.at = at
                self.key = key
                for one in rows:  # a row, or a frame
                    call(key, one, times)
        yield from ()

    def _shown(self, handle: Handle) -> Any:
        """The handle as the user sees it."""
        return handle

    def _with_rows(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        keys, counts = counted_keys(tables)
        place, results = handle.place, self._results
        call, take = fail_on_stopiteration(self._processor.handleInputRows), results.take
        odd = self._input.odd
        with self._pieces(tables) as pieces:
            for at, (key, rows) in enumerate(self._input.groups(keys, counts, pieces)):
                place.at = at
                self.key = key
                for some in calls(key, rows) if odd else (rows,):
                    given = iter(call(key, some, times))
                    while take(given, key):
                        yield from self._taken()
                if results.enough:
                    yield from self._taken()

    def _pieces(self, tables: Mapping[str, pa.RecordBatch]) -> closing[Pieces]:
        """The rows of a call (see `calls`), of which none are fetched any more when it is over."""

        def fetched() -> Pieces:
            piece = tables[ROWS]
            left = sum(tables[KEYS].column(COUNT).to_pylist())
            for number in count(1):
                yield piece
                left -= piece.num_rows
                if left <= 0:
                    return
                asked = pa.RecordBatch.from_pydict({"part": pa.array([number], pa.int64())})
                piece = pa.RecordBatch.from_struct_array(self.ask(ROWS, asked))

        return closing(fetched())

    def _with_timers(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        call = fail_on_stopiteration(self._processor.handleExpiredTimer)
        for at, (key, due) in enumerate(self._due(tables)):
            handle.place.at = at
            self.key = key
            for time in due:
                given = iter(call(key=key, timerValues=times, expiredTimerInfo=ExpiredTimerInfo(time)))
                while self._results.take(given, key):
                    yield from self._taken()
                handle.timers.remove(at, time)
            if self._results.enough:
                yield from self._taken()

    def _due(self, tables: Mapping[str, pa.RecordBatch]) -> Iterator[tuple[Any, list[int]]]:
        """Each key and the times of its timers that are due, in order."""
        keys, counts = counted_keys(tables)
        due = iter(tables[DUE].column("time").to_pylist())
        if self._zone is not None:
            keys = [on_the_clock(key, self._zone) for key in keys]
        told = zip(*map(stored, keys), strict=True) if keys else iter([()] * len(counts))
        for key, some in zip(map(self._key.row, told), counts, strict=True):
            yield key, list(islice(due, some))

    def _taken(self) -> Iterator[pa.RecordBatch]:
        """All output so far."""
        key = self.key
        for batch in self._results.taken(self._blame):
            columns = [
                column if column.type == wanted.type else column.cast(wanted.type)
                for column, wanted in zip(batch.columns, self._schema, strict=True)
            ]
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self.key = key

    def _blame(self, key: Any) -> None:
        self.key = key


def counted_keys(tables: Mapping[str, pa.RecordBatch]) -> tuple[list[pa.Array], list[int]]:
    """The columns of the keys, and how many rows each key has."""
    keys = tables[KEYS]
    at = keys.schema.get_field_index(COUNT)
    return keys.columns[:at], keys.column(at).to_pylist()


@cache
def freeze() -> None:
    """Spare all that the process has by now the garbage collections to which the state of many keys leads."""
    gc.collect()
    gc.freeze()


def _loaded(command: bytes) -> StatefulProcessor:
    """The processor that a function of Spark's is bound to."""
    from pyspark.worker_util import read_command

    function, _ = read_command(CPickleSerializer(), command)
    return function.__self__._stateful_processor

"""User-defined stateful processor, called in Spark's Python worker.

A slot sends keys, their rows, and the contents of their state variables, some thousands of keys at a time. The
processor's functions are called key by key, as in Spark, and their state changes are sent back. They run where Spark
runs Python functions, not in the slot: a function that fails or kills its process harms no state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from itertools import count, islice
from typing import Any

import pyarrow as pa
from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState as State
from pyspark.sql.types import StructType
from pyspark.util import fail_on_stopiteration

from millpond.operators.processors.calls import DUE, KEYS, ROWS, Changes, FetchState
from millpond.slot.process.messages import Call
from millpond.spec.types import DataType, parse_type
from millpond.tasks.user_processor import UserProcessor
from millpond.worker.processors.clock import to_local_times, zoneless
from millpond.worker.processors.frames import FrameResults, Frames
from millpond.worker.processors.handle import Handle
from millpond.worker.processors.rows import Pieces, RowResults, Rows, row_iterators
from millpond.worker.processors.state.columns import to_stored
from millpond.worker.processors.state.values import ValueCodec


class RunningProcessor:
    """A running processor, for one partition and batch.

    Args:
        processor: its description.
        ask: fetches parts of variables during a call.

    Attributes:
        key: the key that the processor is called for; None between keys.
    """

    def __init__(self, processor: UserProcessor, ask: FetchState) -> None:
        from pyspark.worker import RunnerConf

        freeze()
        self.ask = ask
        self.key: Any = None
        self._spec = processor.spec
        self._schema = pa.schema([(column.name, parse_type(column.type).arrow) for column in processor.spec.outputs])
        self._processor = _load_processor(processor.command)
        self._handle: Handle | None = None
        conf = RunnerConf(processor.conf)
        self._zone = conf.timezone if processor.pandas else None
        # The query's names: those of the state have no dots, and are unique whatever their case.
        names = (processor.columns[position].name for position in self._spec.keys)
        types = (parse_type(field.type) for field in self._spec.key_fields)
        key = DataType("struct", fields=tuple(zip(names, types, strict=True)))
        self._key_codec = ValueCodec(key if self._zone is None else zoneless(key))

        def groups(columns: StructType, keys: Sequence[int], values: Sequence[int]) -> Rows | Frames:
            if processor.pandas:
                return Frames(columns, keys, values, conf)
            return Rows(columns, keys, conf.timezone)

        self._results: RowResults | FrameResults
        self._results = (
            FrameResults(processor.output_schema, conf) if processor.pandas else RowResults(processor.output_schema)
        )
        self._input = groups(processor.columns, self._spec.keys, processor.values)
        first = processor.initial
        self._initial = None if first is None else groups(first.columns, first.keys, first.values)

    def call(self, call: Call, tables: Mapping[str, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Call the processor for some keys and yield its output.

        Errors of the user's functions are passed on.
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
            # with an initial state, Spark does not change the state after timers
            handle.state = State.TIMER_PROCESSED if self._initial is None else State.DATA_PROCESSED
            fail_on_stopiteration(self._processor.close)()
            handle.state = State.CLOSED
        yield from self._output()
        self.key = handle.current_key.position = None

    def changes(self) -> Changes:
        """Return the state changes of the last call (see `operators.processors.row_iterators`)."""
        return self._handle.changes() if self._handle and self._handle.state is not State.CLOSED else []

    def _initialized(self, now: int) -> Handle:
        self._handle = Handle(self._spec, now, self.ask)
        fail_on_stopiteration(self._processor.init)(self._user_handle(self._handle))
        self._handle.state = State.INITIALIZED
        return self._handle

    def _with_initial(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Call the processor for rows of the initial state; there is no output."""
        assert self._initial is not None
        keys, counts = counted_keys(tables)
        call = fail_on_stopiteration(self._processor.handleInitialState)
        with self._pieces(tables) as pieces:
            for position, (key, rows) in enumerate(self._initial.groups(keys, counts, pieces)):
                handle.current_key.position = position
                self.key = key
                for part in rows:  # a row, or a frame
                    call(key, part, times)
        yield from ()

    def _user_handle(self, handle: Handle) -> Any:
        """Return the handle that the user's code gets."""
        return handle

    def _with_rows(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        keys, counts = counted_keys(tables)
        current_key, results = handle.current_key, self._results
        call, collect = fail_on_stopiteration(self._processor.handleInputRows), results.collect
        may_have_nan = self._input.may_have_nan
        with self._pieces(tables) as pieces:
            for position, (key, rows) in enumerate(self._input.groups(keys, counts, pieces)):
                current_key.position = position
                self.key = key
                for parts in row_iterators(key, rows) if may_have_nan else (rows,):
                    results_of_key = iter(call(key, parts, times))
                    while collect(results_of_key, key):
                        yield from self._output()
                if results.enough:
                    yield from self._output()

    def _pieces(self, tables: Mapping[str, pa.RecordBatch]) -> closing[Pieces]:
        """Return the rows of a call in pieces (see `row_iterators`); on exit, no further pieces are fetched."""

        def fetched() -> Pieces:
            piece = tables[ROWS]
            remaining = sum(counted_keys(tables)[1])
            for number in count(1):
                yield piece
                remaining -= piece.num_rows
                if remaining <= 0:
                    return
                asked = pa.RecordBatch.from_pydict({"part": pa.array([number], pa.int64())})
                piece = pa.RecordBatch.from_struct_array(self.ask(ROWS, asked))

        return closing(fetched())

    def _with_timers(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        call = fail_on_stopiteration(self._processor.handleExpiredTimer)
        for position, (key, due) in enumerate(self._due(tables)):
            handle.current_key.position = position
            self.key = key
            for time in due:
                results_of_key = iter(call(key=key, timerValues=times, expiredTimerInfo=ExpiredTimerInfo(time)))
                while self._results.collect(results_of_key, key):
                    yield from self._output()
                # After the call: while it runs, the processor still sees the timer.
                handle.timers.remove(position, time)
            if self._results.enough:
                yield from self._output()

    def _due(self, tables: Mapping[str, pa.RecordBatch]) -> Iterator[tuple[Any, list[int]]]:
        """Yield each key and the times of its due timers, in order."""
        keys, counts = counted_keys(tables)
        due = iter(tables[DUE].column("time").to_pylist())
        if self._zone is not None:
            keys = [to_local_times(key, self._zone) for key in keys]
        key_values = zip(*map(to_stored, keys), strict=True) if keys else iter([()] * len(counts))
        for key, number in zip(map(self._key_codec.row, key_values), counts, strict=True):
            yield key, list(islice(due, number))

    def _output(self) -> Iterator[pa.RecordBatch]:
        """Yield all output so far."""
        key = self.key
        for batch in self._results.drain(self._set_key):
            columns = [
                column if column.type == field.type else column.cast(field.type)
                for column, field in zip(batch.columns, self._schema, strict=True)
            ]
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self.key = key

    def _set_key(self, key: Any) -> None:
        self.key = key


def counted_keys(tables: Mapping[str, pa.RecordBatch]) -> tuple[list[pa.Array], list[int]]:
    """Return the columns of the keys, and the number of rows of each key."""
    *keys, counts = tables[KEYS].columns  # by position: a key may have any name
    return keys, counts.to_pylist()


@cache
def freeze() -> None:
    """Exclude all existing objects from the garbage collections that the state of many keys triggers."""
    gc.collect()
    gc.freeze()


def _load_processor(command: bytes) -> StatefulProcessor:
    """Return the processor that Spark's pickled function is bound to."""
    from pyspark.worker_util import read_command

    function, _ = read_command(CPickleSerializer(), command)
    return function.__self__._stateful_processor

"""Driver of an asynchronous processor: runs many keys of a call at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

from millpond.operators.processors.calls import FetchState
from millpond.tasks.user_processor import UserProcessor
from millpond.worker.processors.asynchronous.base import row_by_row, yields
from millpond.worker.processors.asynchronous.controller import Controller, Task
from millpond.worker.processors.asynchronous.variables import AwaitedHandle
from millpond.worker.processors.handle import Handle
from millpond.worker.processors.processor import RunningProcessor, counted_keys
from millpond.worker.processors.rows import ROWS_PER_BATCH, row_iterators

_MAX_QUEUED_ROWS = 4 * ROWS_PER_BATCH  # output rows that may wait for those of earlier keys


class AsyncRunningProcessor(RunningProcessor):
    """A running asynchronous processor, for one partition and batch.

    Args:
        processor: its description.
        ask: fetches parts of state.
        in_flight: how many keys may wait for state at a time.
    """

    def __init__(self, processor: UserProcessor, ask: FetchState, in_flight: int) -> None:
        super().__init__(processor, ask)
        self._in_flight = in_flight
        self._single = row_by_row(self._processor)

    def _user_handle(self, handle: Handle) -> Any:
        self._controller = Controller(handle.current_key, self, self._in_flight, _MAX_QUEUED_ROWS)
        return AwaitedHandle(handle)

    def _with_initial(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        assert self._initial is not None
        call = self._processor.handleInitialState
        with self._pieces(tables) as pieces:
            groups = self._initial.retained_groups(*counted_keys(tables), pieces)
            tasks = (
                (position, key, map(call, repeat(key), rows, repeat(times)))
                for position, (key, rows) in enumerate(groups)
            )
            yield from self._run(call, tasks)

    def _with_rows(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        call = self._processor.handleInputRow if self._single else self._processor.handleInputRows

        def parts_of(key: Any, rows: Iterator[Any]) -> Iterable[Any]:
            if self._single:
                return rows
            return row_iterators(key, rows) if self._input.may_have_nan else (rows,)

        with self._pieces(tables) as pieces:
            groups = enumerate(self._input.retained_groups(*counted_keys(tables), pieces))
            tasks = (
                (position, key, map(call, repeat(key), parts_of(key, rows), repeat(times)))
                for position, (key, rows) in groups
            )
            yield from self._run(call, tasks)

    def _with_timers(
        self, handle: Handle, times: TimerValues, tables: Mapping[str, pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        call = self._processor.handleExpiredTimer

        def fired(at: int, key: Any, due: list[int]) -> Iterator[Any]:
            for time in due:
                yield call(key=key, timerValues=times, expiredTimerInfo=ExpiredTimerInfo(time))
                # After the call: while it runs, the processor still sees the timer.
                handle.timers.remove(at, time)

        tasks = ((position, key, fired(position, key, due)) for position, (key, due) in enumerate(self._due(tables)))
        yield from self._run(call, tasks)

    def _run(self, call: Any, tasks: Iterator[Task]) -> Iterator[pa.RecordBatch]:
        for _ in self._controller.run(tasks, self._results, yields=yields(call)):
            yield from self._output()

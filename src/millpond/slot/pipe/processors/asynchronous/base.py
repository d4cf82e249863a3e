"""What an asynchronous processor derives from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from millpond.errors import UsageError

_ROW, _ROWS, _TIMER = "handleInputRow", "handleInputRows", "handleExpiredTimer"
_INITIAL = "handleInitialState"


class AsyncStatefulProcessor(StatefulProcessor):  # type: ignore[misc]
    """A processor whose functions are coroutines, so that many keys can wait for their state at a time.

    Define `init` as usual, and as `async def` either `handleInputRows(self, key, rows, timerValues)` or
    `handleInputRow(self, key, row, timerValues)`, which is called for each row of a key, one after the other; and, if
    there are timers, `handleExpiredTimer`. They `yield` the rows that they give out. `handleInitialState`, where there
    is one, gives none out. Operations of state variables and of the handle are awaited: `await self.total.get()`,
    `await self.total.update((1,))`, `async for k, v in self.seen.iterator()`; `await millpond.gather(…)` waits for
    several reads at once. Writes take effect when they are called. Nothing but state can be awaited. `init` and
    `close` stay synchronous.

    Spark itself cannot run it: the query needs `millpond.writeStream`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.init = _refusing(cls.init)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        """To be defined as `async def`, unless `handleInputRow` is."""
        raise _on_spark(self)

    def handleInputRow(self, key: Any, row: Any, timerValues: TimerValues) -> Any:
        """To be defined as `async def`, unless `handleInputRows` is."""
        raise _on_spark(self)

    async def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo) -> None:
        """What to do when a timer is due: nothing."""

    async def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        """What to do with a row, or frame, of the initial state: nothing."""


def _refusing(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def checked(self: AsyncStatefulProcessor, handle: StatefulProcessorHandle) -> Any:
        if type(handle) is StatefulProcessorHandle:  # Spark's own
            raise _on_spark(self)
        return init(self, handle)

    return checked


def _on_spark(processor: StatefulProcessor) -> UsageError:
    return UsageError(
        f"{type(processor).__qualname__} is an asynchronous processor, which Spark cannot run.",
        action="Start the query with millpond.writeStream; millpond.explain tells what keeps it on Spark.",
    )


def row_by_row(processor: StatefulProcessor) -> bool:
    """Whether a processor is called with one row at a time."""
    return type(processor).handleInputRows is AsyncStatefulProcessor.handleInputRows


def yields(function: Callable[..., Any]) -> bool:
    """Whether a function that is `async def`, or a decorated one, can give rows out."""
    return inspect.isasyncgenfunction(_undecorated(function))


def check_asynchronous(processor: StatefulProcessor, *, pandas: bool) -> bool:
    """Whether a processor is asynchronous.

    Raises:
        UsageError: it is so in part only, or is called in a way in which it cannot be.
    """
    name = type(processor).__qualname__
    if not isinstance(processor, AsyncStatefulProcessor):
        for one in (_ROWS, _TIMER, _INITIAL):
            if _asynchronous(getattr(processor, one)):
                raise UsageError(
                    f"{one} of {name} is asynchronous, but the processor is not.",
                    action="Derive it from millpond.AsyncStatefulProcessor.",
                )
        return False
    single = row_by_row(processor)
    if (type(processor).handleInputRow is AsyncStatefulProcessor.handleInputRow) is single:
        raise UsageError(
            f"{name} has {'neither' if single else 'both'} {_ROWS} {'nor' if single else 'and'} {_ROW}.",
            action="Define one of them.",
        )
    if single and pandas:
        raise UsageError(
            f"{name} has {_ROW}, but transformWithStateInPandas calls processors with frames.",
            action=f"Define {_ROWS}, or use transformWithState.",
        )
    for one in (_ROW if single else _ROWS, _TIMER, _INITIAL):
        if not _asynchronous(getattr(processor, one)):
            raise UsageError(f"{one} of the asynchronous processor {name} is not.", action="Define it with async def.")
    if yields(processor.handleInitialState):
        raise UsageError(f"{_INITIAL} of {name} yields, and there is nobody to take it.", action="Let it give nothing.")
    for one in ("init", "close"):
        if _asynchronous(getattr(processor, one)):
            raise UsageError(f"{one} of {name} is asynchronous.", action="Define it with def: there is no key yet.")
    return True


def _asynchronous(function: Any) -> bool:
    function = _undecorated(function)
    return inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)


def _undecorated(function: Any) -> Any:
    """What a call runs: the function itself if it is asynchronous, else the one that it wraps."""
    return inspect.unwrap(
        function, stop=lambda one: inspect.isasyncgenfunction(one) or inspect.iscoroutinefunction(one)
    )

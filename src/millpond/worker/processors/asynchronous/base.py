"""Base class of asynchronous processors, and checks of a processor's functions."""

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
    """Base class of processors whose functions are coroutines, so that many keys can wait for their state at a time.

    Define `init` as usual. Define as `async def` either `handleInputRows(self, key, rows, timerValues)` or
    `handleInputRow(self, key, row, timerValues)`, which is called for one row of a key after the other. Define
    `handleExpiredTimer` if there are timers. These functions `yield` their output rows. `handleInitialState` is
    optional and yields nothing.

    Operations of state variables and of the handle are awaited, such as `await self.total.get()`,
    `await self.total.update((1,))` or `async for k, v in self.seen.iterator()`. `await millpond.gather(…)` waits for
    several reads at once. Writes take effect when they are called, even before they are awaited. Only state can be
    awaited. `init` and `close` are synchronous.

    Spark itself cannot run such a processor: the query needs `millpond.writeStream`.

    Examples:
        >>> from millpond.testing import ProcessorTester
        >>> from pyspark.sql import Row
        >>> class Count(millpond.AsyncStatefulProcessor):
        ...     def init(self, handle):
        ...         self.total = handle.getValueState("total", "n bigint")
        ...
        ...     async def handleInputRows(self, key, rows, timerValues):
        ...         total = await self.total.get() or (0,)
        ...         count = total[0] + sum(1 for _ in rows)
        ...         await self.total.update((count,))
        ...         yield Row(word=key[0], n=count)
        >>> tester = ProcessorTester(Count(), "word string", "word string", "word string, n bigint", "update")
        >>> tester.testBatch([Row(word="a"), Row(word="a")])
        [Row(word='a', n=2)]
        >>> tester.testBatch([Row(word="a")])
        [Row(word='a', n=3)]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.init = _refusing_spark(cls.init)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        """Process all rows of a key. Define it as `async def`, unless `handleInputRow` is defined.

        Args:
            key: values of the key's columns.
            rows: the key's rows of the batch; pandas frames with `transformWithStateInPandas`.
            timerValues: the batch's processing time and watermark.
        """
        raise _on_spark(self)

    def handleInputRow(self, key: Any, row: Any, timerValues: TimerValues) -> Any:
        """Process one row of a key. Define it as `async def`, unless `handleInputRows` is defined.

        Args:
            key: values of the key's columns.
            row: the row.
            timerValues: the batch's processing time and watermark.
        """
        raise _on_spark(self)

    async def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo) -> None:
        """Process a due timer; does nothing by default.

        Args:
            key: values of the key's columns.
            timerValues: the batch's processing time and watermark.
            expiredTimerInfo: the time of the timer.
        """

    async def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        """Process a row or frame of the initial state; does nothing by default.

        Args:
            key: values of the key's columns.
            initialState: the row, or pandas frame.
            timerValues: the batch's processing time and watermark.
        """


def _refusing_spark(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def checked(self: AsyncStatefulProcessor, handle: StatefulProcessorHandle) -> Any:
        if type(handle) is StatefulProcessorHandle:  # Spark's own
            raise _on_spark(self)
        return init(self, handle)

    return checked


def _on_spark(processor: StatefulProcessor) -> UsageError:
    return UsageError(
        f"{type(processor).__qualname__} is an asynchronous processor, which Spark cannot run.",
        action="Start the query with millpond.writeStream; millpond.explain shows what keeps it on Spark.",
    )


def row_by_row(processor: StatefulProcessor) -> bool:
    """Return whether a processor is called with one row at a time."""
    return type(processor).handleInputRows is AsyncStatefulProcessor.handleInputRows


def yields(function: Callable[..., Any]) -> bool:
    """Return whether an `async def` function, possibly decorated, can yield rows."""
    return inspect.isasyncgenfunction(_undecorated(function))


def check_asynchronous(processor: StatefulProcessor, *, pandas: bool) -> bool:
    """Return whether a processor is asynchronous.

    Raises:
        UsageError: only some of its functions are asynchronous, or it is called in an unsupported way.
    """
    name = type(processor).__qualname__
    if not isinstance(processor, AsyncStatefulProcessor):
        for method in (_ROWS, _TIMER, _INITIAL):
            if _asynchronous(getattr(processor, method)):
                raise UsageError(
                    f"{method} of {name} is asynchronous, but the processor is not.",
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
    for method in (_ROW if single else _ROWS, _TIMER, _INITIAL):
        if not _asynchronous(getattr(processor, method)):
            raise UsageError(
                f"{method} of the asynchronous processor {name} is not.", action="Define it with async def."
            )
    if yields(processor.handleInitialState):
        raise UsageError(f"{_INITIAL} of {name} yields, but it has no output.", action="Remove the yield.")
    for method in ("init", "close"):
        if _asynchronous(getattr(processor, method)):
            raise UsageError(f"{method} of {name} is asynchronous.", action="Define it with def: there is no key yet.")
    return True


def _asynchronous(function: Any) -> bool:
    function = _undecorated(function)
    return inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)


def _undecorated(function: Any) -> Any:
    """Return the function that a call runs: the function itself if it is asynchronous, else the one that it wraps."""
    return inspect.unwrap(
        function, stop=lambda function: inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)
    )

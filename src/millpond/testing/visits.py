"""Access of tests to a processor's state, from within a call for the key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type
from millpond.worker.processors.asynchronous.base import AsyncStatefulProcessor
from millpond.worker.processors.state.schemas import spark_type

_VISITS: ContextVar[Visit] = ContextVar("_VISITS")


class Visit(StatefulProcessor):  # type: ignore[misc]
    """A processor that performs one action on one key's state variable.

    Unpickling returns the same object, so that the result is not lost in the copy that is made of each processor.

    Args:
        variable: the state variable; None for the timers.
        act: the action, called with the variable or, for timers, the handle.

    Attributes:
        result: the action's result.
    """

    def __init__(self, variable: Variable | None, act: Callable[[Any], Any]) -> None:
        self._variable = variable
        self._act = act
        self.result: Any = None
        _VISITS.set(self)

    def __reduce__(self) -> tuple[Callable[[], Visit], tuple[()]]:
        return _visit, ()

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the variable."""
        self._state = handle if self._variable is None else declared(handle, self._variable)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Perform the action."""
        self.result = self._act(self._state)
        return iter(())


class _InitialState(StatefulProcessor):  # type: ignore[misc]
    """A processor that passes the rows of an initial state to another, as the first batch of a query does.

    Args:
        processor: the user's processor.
    """

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Initialise the user's processor."""
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> Iterator[Any]:
        """Call `handleInitialState` for each row."""
        for row in rows:
            self._processor.handleInitialState(key, row, timerValues)
        return iter(())

    def close(self) -> None:
        """Close the user's processor."""
        self._processor.close()


class _AsyncInitialState(AsyncStatefulProcessor):
    """`_InitialState` for an asynchronous processor."""

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._processor.init(handle)

    async def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> None:
        for row in rows:
            await self._processor.handleInitialState(key, row, timerValues)

    def close(self) -> None:
        self._processor.close()


def initial_state_processor(processor: StatefulProcessor) -> StatefulProcessor:
    """Wrap a processor so that its input rows are its initial state, as in the first batch of a query."""
    return (_AsyncInitialState if isinstance(processor, AsyncStatefulProcessor) else _InitialState)(processor)


def declared(handle: StatefulProcessorHandle, variable: Variable) -> Any:
    """Declare a state variable on a handle."""
    value, key = (_struct(dtype) for dtype in (variable.value, variable.key or variable.value))
    if variable.kind == "value":
        return handle.getValueState(variable.name, value, variable.ttl_ms)
    if variable.kind == "list":
        return handle.getListState(variable.name, value, variable.ttl_ms)
    return handle.getMapState(variable.name, key, value, variable.ttl_ms)


def _struct(ddl: str) -> StructType:
    parsed = spark_type(parse_type(ddl))
    assert isinstance(parsed, StructType)
    return parsed


def _visit() -> Visit:
    return _VISITS.get()

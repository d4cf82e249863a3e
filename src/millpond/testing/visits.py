"""What a test does with a processor's state, as a processor does it: in the call of a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from millpond.slot.pipe.processors.asynchronous.base import AsyncStatefulProcessor
from millpond.slot.pipe.processors.state.schemas import spark_type
from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type

_VISITS: ContextVar[Visit] = ContextVar("_VISITS")


class Visit(StatefulProcessor):  # type: ignore[misc]
    """Does one thing with a state variable of one key. It is not copied as other processors are: what it has, it keeps.

    Args:
        variable: which; none if it is about the timers.
        act: what, with the variable, or the handle.

    Attributes:
        result: what that gave.
    """

    def __init__(self, variable: Variable | None, act: Callable[[Any], Any]) -> None:
        self._variable = variable
        self._act = act
        self.result: Any = None
        _VISITS.set(self)

    def __reduce__(self) -> tuple[Callable[[], Visit], tuple[()]]:
        return _visit, ()

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the variable."""
        self._state = handle if self._variable is None else declared(handle, self._variable)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Do it."""
        self.result = self._act(self._state)
        return iter(())


class _Beginning(StatefulProcessor):  # type: ignore[misc]
    """Gives the rows of an initial state to a processor, as the first batch of a query does.

    Args:
        processor: the user's.
    """

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the state."""
        self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> Iterator[Any]:
        """Hand the rows on."""
        for row in rows:
            self._processor.handleInitialState(key, row, timerValues)
        return iter(())

    def close(self) -> None:
        """End."""
        self._processor.close()


class _AsyncBeginning(AsyncStatefulProcessor):
    """The same for an asynchronous processor."""

    def __init__(self, processor: StatefulProcessor) -> None:
        self._processor = processor

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._processor.init(handle)

    async def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> None:
        for row in rows:
            await self._processor.handleInitialState(key, row, timerValues)

    def close(self) -> None:
        self._processor.close()


def beginning(processor: StatefulProcessor) -> StatefulProcessor:
    """What gives the rows of an initial state to a processor, as the first batch of a query does."""
    return (_AsyncBeginning if isinstance(processor, AsyncStatefulProcessor) else _Beginning)(processor)


def declared(handle: StatefulProcessorHandle, variable: Variable) -> Any:
    """A handle's state variable."""
    value, key = (_struct(one) for one in (variable.value, variable.key or variable.value))
    if variable.kind == "value":
        return handle.getValueState(variable.name, value, variable.ttl_ms)
    if variable.kind == "list":
        return handle.getListState(variable.name, value, variable.ttl_ms)
    return handle.getMapState(variable.name, key, value, variable.ttl_ms)


def _struct(ddl: str) -> StructType:
    made = spark_type(parse_type(ddl))
    assert isinstance(made, StructType)
    return made


def _visit() -> Visit:
    return _VISITS.get()

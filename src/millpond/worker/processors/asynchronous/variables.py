"""State variables and timers of an asynchronous processor: awaitable wrappers of the synchronous ones.

Writes take effect when they are called.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any

from pyspark.sql.streaming.stateful_processor import ListState, MapState, StatefulProcessorHandle, ValueState
from pyspark.sql.types import StructType

from millpond.worker.processors.asynchronous.reads import DONE, Parts, Read
from millpond.worker.processors.state.lists import ListVariable
from millpond.worker.processors.state.maps import MapVariable
from millpond.worker.processors.state.variables import CurrentKey, StateVariable, ValueVariable


class _Awaited:
    """Base of awaitable variables of all kinds.

    Args:
        held: the synchronous variable.
        current_key: position of the processor's current key.

    Attributes:
        held: the variable; None if its data is always sent with the call.
        current_key: position of the processor's current key.
    """

    def __init__(self, held: StateVariable, current_key: CurrentKey) -> None:
        self.held = None if type(held).lacks is StateVariable.lacks else held
        self.current_key = current_key


class AwaitedValue(_Awaited, ValueState):  # type: ignore[misc]
    """A variable with one value per key."""

    def __init__(self, held: ValueVariable, current_key: CurrentKey) -> None:
        super().__init__(held, current_key)
        self._value = held
        self._get, self._update = held.get, held.update

    def exists(self) -> Read:
        """Read whether the key has a value."""
        return Read(self, self._value.exists)

    def get(self) -> Read:
        """Read the key's value; None if it has none."""
        return Read(self, self._get)

    def update(self, newValue: tuple[Any, ...]) -> Awaitable[None]:
        """Set the key's value."""
        self._update(newValue)
        return DONE

    def clear(self) -> Awaitable[None]:
        """Remove the key's value."""
        self._value.clear()
        return DONE


class AwaitedList(_Awaited, ListState):  # type: ignore[misc]
    """A variable with a list per key."""

    def __init__(self, held: ListVariable, current_key: CurrentKey) -> None:
        super().__init__(held, current_key)
        self._list = held
        self._exists = Sent(current_key)

    def exists(self) -> Read:
        """Read whether the key has a list."""
        return Read(self._exists, self._list.exists)

    def get(self) -> Parts:
        """Read the key's elements, as they are when the first one is requested."""
        return Parts(self, self._list.get)

    def put(self, newState: list[tuple[Any, ...]]) -> Awaitable[None]:
        """Replace the key's list."""
        self._list.put(newState)
        return DONE

    def appendValue(self, newState: tuple[Any, ...]) -> Awaitable[None]:
        """Append an element to the key's list."""
        self._list.appendValue(newState)
        return DONE

    def appendList(self, newState: list[tuple[Any, ...]]) -> Awaitable[None]:
        """Append elements to the key's list."""
        self._list.appendList(newState)
        return DONE

    def clear(self) -> Awaitable[None]:
        """Remove the key's list."""
        self._list.clear()
        return DONE


class AwaitedMap(_Awaited, MapState):  # type: ignore[misc]
    """A variable with a map per key."""

    def __init__(self, held: MapVariable, current_key: CurrentKey) -> None:
        super().__init__(held, current_key)
        self._map = held
        self._exists = Sent(current_key)

    def exists(self) -> Read:
        """Read whether the key has a map."""
        return Read(self._exists, self._map.exists)

    def getValue(self, key: tuple[Any, ...]) -> Read:
        """Read the value of a key of the map, None if there is none. Unlike other values of state it is a `Row`."""
        return Read(self, partial(self._map.getValue, key), key)

    def containsKey(self, key: tuple[Any, ...]) -> Read:
        """Read whether the map has a key."""
        return Read(self, partial(self._map.containsKey, key), key)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> Awaitable[None]:
        """Set the value of a key of the map."""
        self._map.updateValue(key, value)
        return DONE

    def iterator(self) -> Parts:
        """Read the map's entries in order, as they are when the first one is requested."""
        return Parts(self, self._map.iterator)

    def keys(self) -> Parts:
        """Read the map's keys in order, as they are when the first one is requested."""
        return Parts(self, self._map.keys)

    def values(self) -> Parts:
        """Read the map's values in key order, as they are when the first one is requested."""
        return Parts(self, self._map.values)

    def removeKey(self, key: tuple[Any, ...]) -> Awaitable[None]:
        """Remove a key from the map."""
        self._map.removeKey(key)
        return DONE

    def clear(self) -> Awaitable[None]:
        """Remove the key's map."""
        self._map.clear()
        return DONE


class Sent:
    """Source of data that is always sent with the call: timers, and whether a key has anything.

    Args:
        current_key: position of the processor's current key.
    """

    __slots__ = ("current_key", "held")

    def __init__(self, current_key: CurrentKey) -> None:
        self.held: StateVariable | None = None
        self.current_key = current_key


class AwaitedHandle(StatefulProcessorHandle):  # type: ignore[misc]
    """Handle of an asynchronous processor.

    Args:
        handle: the synchronous handle, which has the current key's position (`current_key`).
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> AwaitedValue:
        """Declare a variable with one value per key; a value expires `ttlDurationMs` after it is written."""
        return AwaitedValue(self._handle.getValueState(stateName, schema, ttlDurationMs), self._handle.current_key)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> AwaitedList:
        """Declare a variable with a list per key; an element expires `ttlDurationMs` after it is written."""
        return AwaitedList(self._handle.getListState(stateName, schema, ttlDurationMs), self._handle.current_key)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> AwaitedMap:
        """Declare a variable with a map per key; an entry expires `ttlDurationMs` after it is written."""
        held = self._handle.getMapState(stateName, userKeySchema, valueSchema, ttlDurationMs)
        return AwaitedMap(held, self._handle.current_key)

    def registerTimer(self, expiryTimestampMs: int) -> Awaitable[None]:
        """Register a timer for the key at a time in milliseconds."""
        self._handle.registerTimer(expiryTimestampMs)
        return DONE

    def deleteTimer(self, expiryTimestampMs: int) -> Awaitable[None]:
        """Delete the key's timer at a time in milliseconds."""
        self._handle.deleteTimer(expiryTimestampMs)
        return DONE

    def listTimers(self) -> Parts:
        """Read the times of the key's timers, as they are when the first one is requested."""
        return Parts(Sent(self._handle.current_key), self._handle.listTimers)

    def deleteIfExists(self, stateName: str) -> Awaitable[None]:
        """Delete a state variable of earlier runs."""
        self._handle.deleteIfExists(stateName)
        return DONE

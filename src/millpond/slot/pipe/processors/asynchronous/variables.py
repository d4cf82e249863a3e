"""State variables and timers of an asynchronous processor: as those of others, but awaited.

Each works on the variable that a synchronous processor has. Writes take effect when they are called.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any

from pyspark.sql.streaming.stateful_processor import ListState, MapState, StatefulProcessorHandle, ValueState
from pyspark.sql.types import StructType

from millpond.slot.pipe.processors.asynchronous.reads import DONE, Parts, Read
from millpond.slot.pipe.processors.state.lists import HeldList
from millpond.slot.pipe.processors.state.maps import HeldMap
from millpond.slot.pipe.processors.state.variables import Held, HeldValue, Place


class _Awaited:
    """What variables of all kinds have in common.

    Args:
        held: the variable. place: where the processor is.

    Attributes:
        held: the same; None if nothing of it is ever lacking. place: the same.
    """

    def __init__(self, held: Held, place: Place) -> None:
        self.held = None if type(held).lacks is Held.lacks else held
        self.place = place


class AwaitedValue(_Awaited, ValueState):  # type: ignore[misc]
    """A variable with one value for each key."""

    def __init__(self, held: HeldValue, place: Place) -> None:
        super().__init__(held, place)
        self._value = held
        self._get, self._update = held.get, held.update

    def exists(self) -> Read:
        """Whether the key has a value."""
        return Read(self, self._value.exists)

    def get(self) -> Read:
        """The value of the key, if it has one."""
        return Read(self, self._get)

    def update(self, newValue: tuple[Any, ...]) -> Awaitable[None]:
        """Give the key a value."""
        self._update(newValue)
        return DONE

    def clear(self) -> Awaitable[None]:
        """Take the key's value away."""
        self._value.clear()
        return DONE


class AwaitedList(_Awaited, ListState):  # type: ignore[misc]
    """A variable with a list for each key."""

    def __init__(self, held: HeldList, place: Place) -> None:
        super().__init__(held, place)
        self._list = held
        self._exists = Sent(place)

    def exists(self) -> Read:
        """Whether the key has a list."""
        return Read(self._exists, self._list.exists)

    def get(self) -> Parts:
        """The elements that the key has when the first is asked for."""
        return Parts(self, self._list.get)

    def put(self, newState: list[tuple[Any, ...]]) -> Awaitable[None]:
        """Give the key another list."""
        self._list.put(newState)
        return DONE

    def appendValue(self, newState: tuple[Any, ...]) -> Awaitable[None]:
        """Put an element at the end of the key's list."""
        self._list.appendValue(newState)
        return DONE

    def appendList(self, newState: list[tuple[Any, ...]]) -> Awaitable[None]:
        """Put elements at the end of the key's list."""
        self._list.appendList(newState)
        return DONE

    def clear(self) -> Awaitable[None]:
        """Take the key's list away."""
        self._list.clear()
        return DONE


class AwaitedMap(_Awaited, MapState):  # type: ignore[misc]
    """A variable with a map for each key."""

    def __init__(self, held: HeldMap, place: Place) -> None:
        super().__init__(held, place)
        self._map = held
        self._exists = Sent(place)

    def exists(self) -> Read:
        """Whether the key has a map."""
        return Read(self._exists, self._map.exists)

    def getValue(self, key: tuple[Any, ...]) -> Read:
        """The value of a key of the map, if there is one: a row, unlike all other values of state."""
        return Read(self, partial(self._map.getValue, key), key)

    def containsKey(self, key: tuple[Any, ...]) -> Read:
        """Whether the map has a key."""
        return Read(self, partial(self._map.containsKey, key), key)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> Awaitable[None]:
        """Give a key of the map a value."""
        self._map.updateValue(key, value)
        return DONE

    def iterator(self) -> Parts:
        """The entries that the map has when the first is asked for, in order."""
        return Parts(self, self._map.iterator)

    def keys(self) -> Parts:
        """The keys that the map has when the first is asked for, in order."""
        return Parts(self, self._map.keys)

    def values(self) -> Parts:
        """The values that the map has when the first is asked for, in the order of their keys."""
        return Parts(self, self._map.values)

    def removeKey(self, key: tuple[Any, ...]) -> Awaitable[None]:
        """Take a key out of the map."""
        self._map.removeKey(key)
        return DONE

    def clear(self) -> Awaitable[None]:
        """Take the key's map away."""
        self._map.clear()
        return DONE


class Sent:
    """What is always sent along: timers, and whether there is anything.

    Args:
        place: where the processor is.
    """

    __slots__ = ("held", "place")

    def __init__(self, place: Place) -> None:
        self.held: Held | None = None
        self.place = place


class AwaitedHandle(StatefulProcessorHandle):  # type: ignore[misc]
    """The handle of an asynchronous processor.

    Args:
        handle: that of a synchronous one, which also says where it is (`place`).
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> AwaitedValue:
        """A variable with one value for each key; `ttlDurationMs` after it is written, it is gone."""
        return AwaitedValue(self._handle.getValueState(stateName, schema, ttlDurationMs), self._handle.place)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> AwaitedList:
        """A variable with a list for each key; `ttlDurationMs` after it is written, an element is gone."""
        return AwaitedList(self._handle.getListState(stateName, schema, ttlDurationMs), self._handle.place)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> AwaitedMap:
        """A variable with a map for each key; `ttlDurationMs` after it is written, an entry is gone."""
        held = self._handle.getMapState(stateName, userKeySchema, valueSchema, ttlDurationMs)
        return AwaitedMap(held, self._handle.place)

    def registerTimer(self, expiryTimestampMs: int) -> Awaitable[None]:
        """Let the processor be called for the key at a time, in milliseconds."""
        self._handle.registerTimer(expiryTimestampMs)
        return DONE

    def deleteTimer(self, expiryTimestampMs: int) -> Awaitable[None]:
        """Let it not be called for the key at a time, in milliseconds."""
        self._handle.deleteTimer(expiryTimestampMs)
        return DONE

    def listTimers(self) -> Parts:
        """The times at which it is to be called for the key, when the first is asked for."""
        return Parts(Sent(self._handle.place), self._handle.listTimers)

    def deleteIfExists(self, stateName: str) -> Awaitable[None]:
        """Let a variable of earlier runs be deleted."""
        self._handle.deleteIfExists(stateName)
        return DONE

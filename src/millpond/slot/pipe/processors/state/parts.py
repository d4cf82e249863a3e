"""State variables with several parts for each key: lists and maps.

The parts of some keys are read together, when one of them is touched: a key that nobody touches costs next to nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, compress, pairwise, repeat
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ListState, MapState
from pyspark.sql.types import Row

from millpond.layout import NEVER
from millpond.slot.pipe.processors.state.columns import bounds, built, nulls, offsets, stored
from millpond.slot.pipe.processors.state.refusals import empty_list, refused
from millpond.slot.pipe.processors.state.values import Form, Refused
from millpond.slot.pipe.processors.state.variables import Changes, Held, Place
from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type

_TOGETHER = 512  # keys that are read together
_MANY = 4  # new keys are put in their places one by one if there are at most so many times more old ones


class _HeldParts(Held):
    """What lists and maps have in common.

    A cell is what a key has; the columns that it is made of are those of its parts, the last one their times of expiry.
    """

    def _hold(self, variable: Variable, place: Place, now: int) -> None:
        super()._hold(variable, place, now)
        self._cells: dict[int, Any] = {}  # of the keys that were touched, and of some beside them
        self._bounds: list[int] = []

    def begin(self, sent: pa.Array, heads: pa.StructArray | None = None) -> None:
        """A call begins: this is what its keys have, and what parts beside that, if any."""
        super().begin(sent, heads)
        self._cells = {}
        self._bounds = []

    def _cell(self, doing: str) -> Any:
        """What the key has."""
        try:
            return self._cells[self._place.at]
        except KeyError:
            at = self._at(doing)
        self._read(at - at % _TOGETHER)
        return self._cells[at]

    def _read(self, start: int) -> None:
        """What some keys have."""
        sent: Any = self._sent
        some = sent.slice(start, _TOGETHER)
        if some.null_count == len(some):
            self._cells.update((at, self._made(None)) for at in range(start, start + len(some)))
            return
        places = bounds(some)
        parts = some.values.slice(places[0], places[-1] - places[0])
        columns = self._columns(parts)
        live = [expiry > self._now for expiry in columns[-1]] if self._lives else []
        lost = set(nulls(some))
        for number, (begin, end) in enumerate(pairwise(places)):
            mine = None
            if number not in lost:
                kept = slice(begin - places[0], end - places[0])
                mine = [column[kept] for column in columns]
                if not all(live[kept]):
                    mine = [list(compress(column, live[kept])) for column in mine]
            self._cells[start + number] = self._made(mine)

    @abstractmethod
    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        """The columns of parts."""

    @abstractmethod
    def _made(self, columns: list[list[Any]] | None) -> Any:
        """The cell of a key with these parts, if it has any."""

    def _changes(self, at: list[int], counts: list[int], parts: dict[str, pa.Array], expiries: list[int]) -> Changes:
        """What keys have now, from how many parts each has, and the columns and expiries of all these."""
        firsts = [NEVER] * len(at)
        if self._lives:
            parts["expiry"] = pa.array(expiries, pa.int64())
            ends = accumulate(counts)
            firsts = [min(expiries[end - n : end], default=NEVER) for n, end in zip(counts, ends, strict=True)]
        fields = [pa.field(name, part.type) for name, part in parts.items()]
        whole = pa.StructArray.from_arrays(list(parts.values()), fields=fields) if len(parts) > 1 else parts["value"]
        kind = pa.list_(pa.field("element", whole.type))
        mask = pa.array([not count for count in counts], pa.bool_())
        return Changes(at, pa.ListArray.from_arrays(offsets(counts), whole, type=kind, mask=mask), firsts)


class _Elements:
    """The cell of a list: its elements, and when each expires if they do."""

    __slots__ = ("expiries", "values")

    def __init__(self, values: list[Any], expiries: list[int]) -> None:
        self.values = values
        self.expiries = expiries


class HeldList(_HeldParts, ListState):  # type: ignore[misc]
    """A variable with a list for each key."""

    def __init__(self, variable: Variable, place: Place, now: int) -> None:
        self._hold(variable, place, now)

    def exists(self) -> bool:
        """Whether the key has a list."""
        return bool(self._cell("checking value state exists").values)

    def get(self) -> Iterator[tuple[Any, ...]]:
        """The elements that the key has when the first is asked for."""
        values = tuple(self._cell("getting list state").values)
        yield from values if self._form.plain else map(self._form.shown, values)

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        """Give the key another list."""
        values = self._given(newState)
        cell = self._cell("updating value state")
        cell.values, cell.expiries = [], []
        self._append(cell, values)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        """Put an element at the end of the key's list."""
        value = self._taken(newState, "updating value state")
        self._append(self._cell("updating value state"), [value])

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        """Put elements at the end of the key's list."""
        values = self._given(newState)
        self._append(self._cell("updating value state"), values)

    def clear(self) -> None:
        """Take the key's list away."""
        cell = self._cell("clearing value state")
        if cell.values:
            cell.values, cell.expiries = [], []
            self._changed.add(self._place.at)

    def _given(self, values: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        taken = [self._taken(value, "updating value state") for value in values]
        if not taken:
            raise refused("updating value state", empty_list(self.variable.name))
        return taken

    def _append(self, cell: _Elements, values: list[tuple[Any, ...]]) -> None:
        cell.values += values
        if self._lives:
            cell.expiries += repeat(self._expiry, len(values))
        self._changed.add(self._place.at)

    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        return [stored(column) for column in parts.flatten()] if self._lives else [stored(parts)]

    def _made(self, columns: list[list[Any]] | None) -> _Elements:
        if columns is None:
            return _Elements([], [])
        return _Elements(columns[0], columns[-1] if self._lives else [])

    def changes(self) -> Changes:
        """What the call has changed; the call is over."""
        at = sorted(self._changed)
        cells = [self._cells[one] for one in at]
        values = [value for cell in cells for value in cell.values]
        expiries = [expiry for cell in cells for expiry in cell.expiries]
        parts = {"value": built(values, self._form.arrow)}
        return self._changes(at, [len(cell.values) for cell in cells], parts, expiries)


class _Entries(dict[Any, tuple[Any, Any, int]]):
    """The cell of a map: what tells keys apart → a key, its value, and when it expires.

    Attributes:
        fresh: what tells the keys apart that are not in their places yet, but at the end.
    """

    __slots__ = ("fresh",)

    def __init__(self, entries: Any = ()) -> None:
        super().__init__(entries)
        self.fresh: set[Any] = set()

    def arrange(self, ordering: Callable[[Any], bytes]) -> None:
        """Put all entries in their places."""
        if self.fresh and len(self) > 1:
            entries = [(told, entry) for told, entry in self.items() if told not in self.fresh]
            added = [(told, self[told]) for told in self.fresh]
            if len(added) * _MANY <= len(entries):
                for one in added:
                    insort(entries, one, key=lambda pair: ordering(pair[1][0]))
            else:
                entries = sorted(entries + added, key=lambda pair: ordering(pair[1][0]))
            self.clear()
            self.update(entries)
        self.fresh.clear()


class HeldMap(_HeldParts, MapState):  # type: ignore[misc]
    """A variable with a map for each key."""

    def __init__(self, variable: Variable, place: Place, now: int) -> None:
        self._hold(variable, place, now)
        self._key = Form(parse_type(variable.key))
        self._identity = self._key.identity

    def exists(self) -> bool:
        """Whether the key has a map."""
        return bool(self._cell("checking map state exists"))

    def getValue(self, key: tuple[Any, ...]) -> Row | None:
        """The value of a key of the map, if there is one: a row, unlike all other values of state."""
        doing = "getting value"
        entry = self._cell(doing).get(self._told(key, doing)[0])
        return None if entry is None else self._form.row(entry[1])

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Whether the map has a key."""
        doing = "checking if map state contains key"
        return self._told(key, doing)[0] in self._cell(doing)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Give a key of the map a value."""
        doing = "updating map state value"
        told, kept = self._told(key, doing)
        entry = kept, self._taken(value, doing), self._expiry
        cell = self._cell(doing)
        if told not in cell:
            cell.fresh.add(told)
        cell[told] = entry
        self._changed.add(self._place.at)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """The entries that the map has when the first is asked for, in order."""
        show, show_key = self._form.shown, self._key.shown
        for key, value, _ in self._arranged():
            yield show_key(key), show(value)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """The keys that the map has when the first is asked for, in order."""
        show = self._key.shown
        for key, _, _ in self._arranged():
            yield show(key)

    def values(self) -> Iterator[tuple[Any, ...]]:
        """The values that the map has when the first is asked for, in the order of their keys."""
        show = self._form.shown
        for _, value, _ in self._arranged():
            yield show(value)

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Take a key out of the map."""
        doing = "removing key from map state"
        told, _ = self._told(key, doing)
        cell = self._cell(doing)
        if cell.pop(told, None) is not None:
            cell.fresh.discard(told)
            self._changed.add(self._place.at)

    def clear(self) -> None:
        """Take the key's map away."""
        cell = self._cell("clearing map state")
        if cell:
            self._cells[self._place.at] = self._made(None)
            self._changed.add(self._place.at)

    def require(self, value: Any, key: Any) -> None:
        """Take note of what may not be null, by the types as the user gives them."""
        super().require(value, key)
        self._key.require(key)

    def _told(self, key: tuple[Any, ...], doing: str) -> tuple[Any, tuple[Any, ...]]:
        """What tells a key of the map apart, and what is kept of it."""
        if not self._key.kept(key):
            try:
                key = self._key.taken(key)
            except Refused as error:
                raise refused(doing, str(error)) from None
        return (key if self._identity is None else self._identity(key)), key

    def _arranged(self) -> list[tuple[Any, Any, int]]:
        cell = self._cell("getting map state")
        cell.arrange(self._key.ordering)
        return list(cell.values())

    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        return [stored(column) for column in parts.flatten()]

    def _made(self, columns: list[list[Any]] | None) -> _Entries:
        if columns is None:
            return _Entries()
        keys, values = columns[:2]
        expiries = columns[2] if self._lives else repeat(NEVER)
        told = keys if self._identity is None else map(self._identity, keys)
        return _Entries(zip(told, zip(keys, values, expiries, strict=False), strict=True))

    def changes(self) -> Changes:
        """What the call has changed; the call is over."""
        at = sorted(self._changed)
        cells = [self._cells[one] for one in at]
        for cell in cells:
            cell.arrange(self._key.ordering)
        flat = list(chain.from_iterable(entry for cell in cells for entry in cell.values()))
        keys, values, expiries = flat[0::3], flat[1::3], flat[2::3]
        parts = {"key": built(keys, self._key.arrow), "value": built(values, self._form.arrow)}
        return self._changes(at, list(map(len, cells)), parts, expiries)

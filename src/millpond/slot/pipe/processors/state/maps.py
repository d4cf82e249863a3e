"""State variables with a map for each key.

The entries of a small map are all in its key's row. Those of a large one are shared out among buckets, by a hash of
their keys, and only the buckets that are used are asked for and written.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, repeat
from operator import itemgetter
from typing import Any
from zlib import crc32

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import MapState
from pyspark.sql.types import Row

from millpond.layout import NEVER
from millpond.slot.pipe.processors.state.buckets import MOST, Buckets, bucket, enough, moved
from millpond.slot.pipe.processors.state.columns import built, stored
from millpond.slot.pipe.processors.state.parts import AT_ONCE, Head, HeldParts, Pieces
from millpond.slot.pipe.processors.state.refusals import refused
from millpond.slot.pipe.processors.state.values import Form, Refused
from millpond.slot.pipe.processors.state.variables import Changes, Place
from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type

_MANY = 4  # new keys are put in their places one by one if there are at most so many times more old ones
_TOGETHER = 512  # entries of a large map that become Python's objects together


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


class HeldMap(HeldParts, MapState):  # type: ignore[misc]
    """A variable with a map for each key."""

    def __init__(self, variable: Variable, place: Place, now: int) -> None:
        self._hold(variable, place, now)
        self._key = Form(parse_type(variable.key))
        self._identity = self._key.identity

    def exists(self) -> bool:
        """Whether the key has a map."""
        cell = self._cell("checking map state exists")
        if type(cell) is not Buckets:
            return bool(cell)
        if any(entry[1] is not None for entry in cell.written.values()):
            return True
        if not self._lives and cell.head.entries > len(cell.written):
            return True
        return next(self._merged(cell), None) is not None

    def getValue(self, key: tuple[Any, ...]) -> Row | None:
        """The value of a key of the map, if there is one: a row, unlike all other values of state."""
        entry = self._entry(key, "getting value")
        return None if entry is None else self._form.row(entry[1])

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Whether the map has a key."""
        return self._entry(key, "checking if map state contains key") is not None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Give a key of the map a value."""
        doing = "updating map state value"
        told, kept = self._told(key, doing)
        entry = kept, self._taken(value, doing), self._expiry
        cell = self._cell(doing)
        if type(cell) is Buckets:
            cell.written[told] = entry
        else:
            if told not in cell:
                cell.fresh.add(told)
            cell[told] = entry
        self.changed.add(self._place.at)

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
        told, kept = self._told(key, doing)
        cell = self._cell(doing)
        if type(cell) is Buckets:
            cell.written[told] = kept, None, 0
            self.changed.add(self._place.at)
        elif cell.pop(told, None) is not None:
            cell.fresh.discard(told)
            self.changed.add(self._place.at)

    def clear(self) -> None:
        """Take the key's map away."""
        cell = self._cell("clearing map state")
        if cell or type(cell) is Buckets:
            self._cells[self._place.at] = self._made(None, None)
            self.changed.add(self._place.at)

    def lacks(self, at: int, key: Any | None) -> bool:
        """See `Held`."""
        if self.deleted:
            return False
        cell = self._of(at)
        if type(cell) is not Buckets:
            return False
        if key is None:
            return self._little(cell.head) and len(cell.loaded) < cell.head.stop
        told, kept = self._told(key, "getting value")
        return told not in cell.written and self._number(kept, cell) not in cell.loaded

    def fetch(self, wanted: Sequence[tuple[int, Any | None]]) -> None:
        """See `Held`."""
        numbers: dict[tuple[int, int], None] = {}
        for at, key in wanted:
            cell = self._of(at)
            if self.lacks(at, key):
                some: Iterable[int] = range(cell.head.stop)
                if key is not None:
                    some = [self._number(self._told(key, "getting value")[1], cell)]
                numbers.update(dict.fromkeys((at, one) for one in some if one not in cell.loaded))
        self._load(list(numbers))

    def _load(self, numbers: list[tuple[int, int]]) -> None:
        """Have buckets fetched, by the positions of their keys and their numbers."""
        size = max((self._cells[at].head.part_bytes for at, _ in numbers), default=0)
        for some, lists in self._parts(numbers, size):
            for (at, number), columns in zip(some, self._listed(lists), strict=True):
                self._cells[at].loaded[number] = self._made(columns, None)

    def _entry(self, key: tuple[Any, ...], doing: str) -> Any:
        """The entry of a key of the map, if there is one."""
        told, kept = self._told(key, doing)
        cell = self._cell(doing)
        if type(cell) is not Buckets:
            return cell.get(told)
        entry = cell.written.get(told)
        if entry is not None:
            return None if entry[1] is None else entry
        number = self._number(kept, cell)
        if number not in cell.loaded:
            if (run := min(len(cell.loaded) // 2, AT_ONCE // max(1, cell.head.part_bytes))) > 1:  # more may be wanted
                some = ((number + one) % cell.head.stop for one in range(min(run, cell.head.stop)))
                self._load([(self._place.at, one) for one in some if one not in cell.loaded])
            else:
                self._need(key, told, cell.head.part_bytes)
        return cell.loaded[number].get(told)

    def _number(self, key: tuple[Any, ...], cell: Buckets) -> int:
        return bucket(crc32(self._key.ordering(key)), cell.head.stop)

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

    def _arranged(self) -> Iterable[tuple[Any, Any, int]]:
        if self.deleted:
            return ()
        cell = self._cell("getting map state")
        if type(cell) is Buckets:
            return self._merged(cell)
        cell.arrange(self._key.ordering)
        return list(cell.values())

    def _merged(self, cell: Buckets) -> Iterator[tuple[Any, Any, int]]:
        """The entries of many buckets, as they are now, in order."""
        self._need_all(cell.head)
        at, hidden, ordering = self._place.at, set(cell.written), self._key.ordering
        known = [entry for entry in cell.written.values() if entry[1] is not None]
        for one in cell.loaded.values():
            known += [entry for told, entry in one.items() if told not in hidden]
        streams: list[Iterable[Any]] = [sorted(((ordering(entry[0]), entry) for entry in known), key=itemgetter(0))]
        numbers = [(at, number) for number in range(cell.head.stop) if number not in cell.loaded]
        streams += [self._stream(lists, hidden) for _, lists in self._parts(numbers, cell.head.part_bytes)]
        return (entry for _, entry in merge(*streams, key=itemgetter(0)))

    def _stream(self, lists: pa.ListArray, hidden: set[Any]) -> Iterator[Any]:
        """The entries of some buckets in order, each after what orders it: they become Python's objects late."""
        parts = lists.flatten()
        columns = [stored(column) for column in (parts.field(0), parts.field(parts.type.num_fields - 1))]
        orders = list(map(self._key.ordering, columns[0]))
        told = columns[0] if self._identity is None else orders
        live = [expiry > self._now for expiry in columns[1]] if self._lives else repeat(True)
        kept = [at for at, (one, lives) in enumerate(zip(told, live, strict=False)) if lives and one not in hidden]
        kept.sort(key=orders.__getitem__)
        ordered = [orders[at] for at in kept]

        def entries() -> Iterator[Any]:
            for start in range(0, len(kept), _TOGETHER):
                some = self._columns(parts.take(pa.array(kept[start : start + _TOGETHER])))
                yield from zip(ordered[start : start + _TOGETHER], zip(*some[:2], repeat(NEVER)), strict=False)

        return entries()

    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        return [stored(column) for column in parts.flatten()]

    def _made(self, columns: list[list[Any]] | None, head: Head | None) -> _Entries | Buckets:
        if head is not None and head.expiry > self._now:
            return Buckets(head)
        if columns is None:
            return _Entries()
        keys, values = columns[:2]
        expiries = columns[2] if self._lives else repeat(NEVER)
        told = keys if self._identity is None else map(self._identity, keys)
        return _Entries(zip(told, zip(keys, values, expiries, strict=False), strict=True))

    # changes ------------------------------------------------------------------------------------------------

    def changes(self, at: list[int]) -> Changes:
        """See `Held`."""
        cells = self._cells
        self._settle([one for one in at if type(cells[one]) is Buckets])
        small = [one for one in at if type(cells[one]) is _Entries]
        for one in small:
            if len(cells[one]) > MOST:
                self._share_out(one, 0)
        small = [one for one in small if type(cells[one]) is _Entries]
        for one in small:
            cells[one].arrange(self._key.ordering)
        counts = [len(cells[one]) for one in small]
        lists, firsts = self._built(counts, [cells[one] for one in small])
        if wide := self._wide(lists, counts, MOST):
            for number in wide:
                self._share_out(small[number], lists.slice(number, 1).nbytes)
            kept = [number for number in range(len(small)) if number not in wide]
            lists, firsts = lists.take(pa.array(kept, pa.int64())), [firsts[number] for number in kept]
            small = [small[number] for number in kept]
        large = [one for one in at if type(cells[one]) is Buckets]
        pieces = self._pieces(large)
        heads = [None] * len(small) + [cells[one].head for one in large]
        if large:
            lists = pa.concat_arrays([lists, pa.nulls(len(large), lists.type)])
        return self._together(small + large, lists, firsts + [NEVER] * len(large), heads, pieces)

    def _built(self, counts: list[int], maps: Iterable[_Entries]) -> tuple[pa.ListArray, list[int]]:
        flat = list(chain.from_iterable(entry for one in maps for entry in one.values()))
        keys, values, expiries = flat[0::3], flat[1::3], flat[2::3]
        columns = {"key": built(keys, self._key.arrow), "value": built(values, self._form.arrow)}
        return self._lists(counts, columns, expiries)

    def _share_out(self, at: int, size: int) -> None:
        """Give a map of so many bytes, if that is known, buckets; there are none yet."""
        entries = self._cells[at]
        stop = enough(1, len(entries), size)
        latest = max(expiry for _, _, expiry in entries.values()) if self._lives else NEVER  # may be an earlier run's
        cell = self._cells[at] = Buckets(Head(0, stop, len(entries), 0, latest))
        cell.loaded = {number: _Entries() for number in range(stop)}
        for told, entry in entries.items():
            cell.loaded[self._number(entry[0], cell)][told] = entry
        cell.touched = set(cell.loaded)

    def _settle(self, large: list[int]) -> None:
        """Put what was written into buckets, and let there be as many as should be."""
        cells = [self._cells[at] for at in large]
        places = [{told: self._number(entry[0], cell) for told, entry in cell.written.items()} for cell in cells]
        self._load(
            [
                (at, number)
                for at, cell, mine in zip(large, cells, places, strict=True)
                for number in sorted({*mine.values()} - cell.loaded.keys())
            ]
        )
        for cell, mine in zip(cells, places, strict=True):
            cell.settle(mine, estimated=self._lives)
        self._load(
            [
                (at, number)
                for at, cell in zip(large, cells, strict=True)
                for number in sorted(moved(cell.head.stop, cell.wanted) - cell.loaded.keys())
            ]
        )
        for at, cell in zip(large, cells, strict=True):
            cell.resize(lambda key: crc32(self._key.ordering(key)))
            if cell.head.stop == 1:
                entries = self._cells[at] = _Entries(cell.loaded[0])
                entries.fresh.update(entries)

    def _pieces(self, large: list[int]) -> list[Pieces]:
        """The buckets that have changed, and what heads say of them."""
        cells = [self._cells[at] for at in large]
        numbers = [sorted(cell.touched) for cell in cells]
        some = [cell.loaded[number] for cell, mine in zip(cells, numbers, strict=True) for number in mine]
        if not some:
            return []
        lists, firsts = self._built(list(map(len, some)), some)
        start = 0
        for cell, mine in zip(cells, numbers, strict=True):
            latest = self._expiry if self._lives else NEVER
            size = lists.slice(start, len(mine)).nbytes
            cell.head = cell.head._replace(bytes=max(0, cell.head.bytes + size), expiry=max(cell.head.expiry, latest))
            start += len(mine)
        owners = [at for at, mine in zip(large, numbers, strict=True) for _ in mine]
        return [Pieces(owners, [number for mine in numbers for number in mine], lists, firsts)]

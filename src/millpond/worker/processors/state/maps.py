"""State variables with a map per key.

A small map is stored completely in its key's row. The entries of a large one are divided into buckets by the hash of
their keys, and only the buckets in use are fetched and written.
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
from millpond.spec.kinds.processor import Variable
from millpond.spec.types import parse_type
from millpond.worker.processors.state.buckets import MAX_ENTRIES, Buckets, bucket_count, bucket_of, moved_buckets
from millpond.worker.processors.state.columns import from_stored, to_stored
from millpond.worker.processors.state.parts import MAX_FETCH_BYTES, Head, PartedVariable, Pieces
from millpond.worker.processors.state.refusals import refused
from millpond.worker.processors.state.values import Refused, ValueCodec
from millpond.worker.processors.state.variables import Changes, CurrentKey

_INSORT_RATIO = 4  # sorted insertion of new keys is used if there are at least this many times more old keys
_ENTRIES_PER_READ = 512  # entries of a large map that are converted to Python objects together


class _Entries(dict[Any, tuple[Any, Any, int]]):
    """The cell of a map: maps a key's identity to the key, its value, and its time of expiry.

    Attributes:
        fresh: identities of new keys, which are still at the end instead of in order.
    """

    __slots__ = ("fresh",)

    def __init__(self, entries: Any = ()) -> None:
        super().__init__(entries)
        self.fresh: set[Any] = set()

    def arrange(self, ordering: Callable[[Any], bytes]) -> None:
        """Sort all entries by key."""
        if self.fresh and len(self) > 1:
            entries = [(identity, entry) for identity, entry in self.items() if identity not in self.fresh]
            added = [(identity, self[identity]) for identity in self.fresh]
            if len(added) * _INSORT_RATIO <= len(entries):
                for addition in added:
                    insort(entries, addition, key=lambda pair: ordering(pair[1][0]))
            else:
                entries = sorted(entries + added, key=lambda pair: ordering(pair[1][0]))
            self.clear()
            self.update(entries)
        self.fresh.clear()


class MapVariable(PartedVariable, MapState):  # type: ignore[misc]
    """A variable with a map per key."""

    def __init__(self, variable: Variable, current_key: CurrentKey, now: int) -> None:
        self._declare(variable, current_key, now)
        self._key_codec = ValueCodec(parse_type(variable.key))
        self._identity = self._key_codec.identity

    def exists(self) -> bool:
        """Return whether the key has a map."""
        cell = self._cell("checking map state exists")
        if type(cell) is not Buckets:
            return bool(cell)
        if any(entry[1] is not None for entry in cell.written.values()):
            return True
        if not self._has_ttl and cell.head.entries > len(cell.written):
            return True
        return next(self._merged(cell), None) is not None

    def getValue(self, key: tuple[Any, ...]) -> Row | None:
        """Return the value of a key of the map, None if there is none. Unlike other values of state it is a `Row`."""
        entry = self._entry(key, "getting value")
        return None if entry is None else self._codec.row(entry[1])

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        """Return whether the map has a key."""
        return self._entry(key, "checking if map state contains key") is not None

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        """Set the value of a key of the map."""
        doing = "updating map state value"
        identity, kept = self._identify(key, doing)
        entry = kept, self._from_user(value, doing), self._expiry
        cell = self._cell(doing)
        if type(cell) is Buckets:
            cell.written[identity] = entry
        else:
            if identity not in cell:
                cell.fresh.add(identity)
            cell[identity] = entry
        self.changed.add(self._current_key.position)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Yield the map's entries in order, as they are when the first one is requested."""
        show, show_key = self._codec.to_user, self._key_codec.to_user
        for key, value, _ in self._arranged():
            yield show_key(key), show(value)

    def keys(self) -> Iterator[tuple[Any, ...]]:
        """Yield the map's keys in order, as they are when the first one is requested."""
        show = self._key_codec.to_user
        for key, _, _ in self._arranged():
            yield show(key)

    def values(self) -> Iterator[tuple[Any, ...]]:
        """Yield the map's values in key order, as they are when the first one is requested."""
        show = self._codec.to_user
        for _, value, _ in self._arranged():
            yield show(value)

    def removeKey(self, key: tuple[Any, ...]) -> None:
        """Remove a key from the map."""
        doing = "removing key from map state"
        identity, kept = self._identify(key, doing)
        cell = self._cell(doing)
        if type(cell) is Buckets:
            # The removal is recorded, as the bucket with the entry may not have been fetched.
            cell.written[identity] = kept, None, 0
            self.changed.add(self._current_key.position)
        elif cell.pop(identity, None) is not None:
            cell.fresh.discard(identity)
            self.changed.add(self._current_key.position)

    def clear(self) -> None:
        """Remove the key's map."""
        cell = self._cell("clearing map state")
        if cell or type(cell) is Buckets:
            self._cells[self._current_key.position] = self._made(None, None)
            self.changed.add(self._current_key.position)

    def lacks(self, at: int, key: Any | None) -> bool:
        """See `StateVariable`."""
        if self.deleted:
            return False
        cell = self._of(at)
        if type(cell) is not Buckets:
            return False
        if key is None:
            return self._is_small(cell.head) and len(cell.loaded) < cell.head.stop
        identity, kept = self._identify(key, "getting value")
        return identity not in cell.written and self._number(kept, cell) not in cell.loaded

    def _part(self, at: int, key: Any | None) -> int | None:
        return None if key is None else self._number(self._identify(key, "getting value")[1], self._cells[at])

    def fetch(self, wanted: Sequence[tuple[int, Any | None]]) -> None:
        """See `StateVariable`."""
        numbers: dict[tuple[int, int], None] = {}
        for at, key in wanted:
            cell = self._of(at)
            if self.lacks(at, key):
                buckets: Iterable[int] = range(cell.head.stop)
                if key is not None:
                    buckets = [self._number(self._identify(key, "getting value")[1], cell)]
                numbers.update(dict.fromkeys((at, number) for number in buckets if number not in cell.loaded))
        self._load(list(numbers))

    def _load(self, numbers: list[tuple[int, int]]) -> None:
        """Fetch buckets, given as pairs of a key's position and a bucket number."""
        size = max((self._cells[position].head.part_bytes for position, _ in numbers), default=0)
        for requested, lists in self._parts(numbers, size):
            for (position, number), columns in zip(requested, self._listed(lists), strict=True):
                self._cells[position].loaded[number] = self._made(columns, None)

    def _entry(self, key: tuple[Any, ...], doing: str) -> Any:
        """Return the entry of a key of the map, if there is one."""
        identity, kept = self._identify(key, doing)
        cell = self._cell(doing)
        if type(cell) is not Buckets:
            return cell.get(identity)
        entry = cell.written.get(identity)
        if entry is not None:
            return None if entry[1] is None else entry
        number = self._number(kept, cell)
        if number not in cell.loaded:
            # Prefetch the next buckets too if many have been used.
            if (run := min(len(cell.loaded) // 2, MAX_FETCH_BYTES // max(1, cell.head.part_bytes))) > 1:
                following = ((number + step) % cell.head.stop for step in range(min(run, cell.head.stop)))
                self._load(
                    [(self._current_key.position, candidate) for candidate in following if candidate not in cell.loaded]
                )
            else:
                self._fetch_if_missing(key, identity, cell.head.part_bytes)
        elif self._prefetched:
            self._count_use(number)
        return cell.loaded[number].get(identity)

    def _number(self, key: tuple[Any, ...], cell: Buckets) -> int:
        return bucket_of(crc32(self._key_codec.ordering(key)), cell.head.stop)

    def require(self, value: Any, key: Any) -> None:
        """Refuse nulls in non-nullable fields of the user's schemas."""
        super().require(value, key)
        self._key_codec.require(key)

    def _identify(self, key: tuple[Any, ...], doing: str) -> tuple[Any, tuple[Any, ...]]:
        """Return the identity of a key of the map, and the stored form of the key."""
        if not self._key_codec.is_stored_form(key):
            try:
                key = self._key_codec.from_user(key)
            except Refused as error:
                raise refused(doing, str(error)) from None
        return (key if self._identity is None else self._identity(key)), key

    def _arranged(self) -> Iterable[tuple[Any, Any, int]]:
        if self.deleted:
            return ()
        cell = self._cell("getting map state")
        if type(cell) is Buckets:
            return self._merged(cell)
        cell.arrange(self._key_codec.ordering)
        return list(cell.values())

    def _merged(self, cell: Buckets) -> Iterator[tuple[Any, Any, int]]:
        """Yield the current entries of all buckets in order."""
        self._fetch_all_if_small(cell.head)
        at, hidden, ordering = self._current_key.position, set(cell.written), self._key_codec.ordering
        known = [entry for entry in cell.written.values() if entry[1] is not None]
        for bucket_entries in cell.loaded.values():
            known += [entry for identity, entry in bucket_entries.items() if identity not in hidden]
        streams: list[Iterable[Any]] = [sorted(((ordering(entry[0]), entry) for entry in known), key=itemgetter(0))]
        numbers = [(at, number) for number in range(cell.head.stop) if number not in cell.loaded]
        streams += [self._stream(lists, hidden) for _, lists in self._parts(numbers, cell.head.part_bytes)]
        return (entry for _, entry in merge(*streams, key=itemgetter(0)))

    def _stream(self, lists: pa.ListArray, hidden: set[Any]) -> Iterator[Any]:
        """Yield the entries of some buckets in order, each with its sort key; entries become Python objects late."""
        parts = lists.flatten()
        keys = to_stored(parts.field(0))
        orders = list(map(self._key_codec.ordering, keys))
        identities = keys if self._identity is None else orders
        live = [expiry > self._now for expiry in to_stored(parts.field(2))] if self._has_ttl else repeat(True)
        kept = [i for i, (key, lives) in enumerate(zip(identities, live, strict=False)) if lives and key not in hidden]
        kept.sort(key=orders.__getitem__)
        ordered = [orders[position] for position in kept]

        def entries() -> Iterator[Any]:
            for start in range(0, len(kept), _ENTRIES_PER_READ):
                columns_of_block = self._columns(parts.take(pa.array(kept[start : start + _ENTRIES_PER_READ])))
                yield from zip(
                    ordered[start : start + _ENTRIES_PER_READ], zip(*columns_of_block[:2], repeat(NEVER)), strict=False
                )

        return entries()

    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        return [to_stored(column) for column in parts.flatten()]

    def _made(self, columns: list[list[Any]] | None, head: Head | None) -> _Entries | Buckets:
        if head is not None and head.expiry > self._now:
            return Buckets(head)
        if columns is None:
            return _Entries()
        keys, values = columns[:2]
        expiries = columns[2] if self._has_ttl else repeat(NEVER)
        identities = keys if self._identity is None else map(self._identity, keys)
        return _Entries(zip(identities, zip(keys, values, expiries, strict=False), strict=True))

    # changes ------------------------------------------------------------------------------------------------

    def changes(self, at: list[int]) -> Changes:
        """See `StateVariable`."""
        cells = self._cells
        self._place_written([position for position in at if type(cells[position]) is Buckets])
        small = [position for position in at if type(cells[position]) is _Entries]
        for position in small:
            if len(cells[position]) > MAX_ENTRIES:
                self._divide(position, 0)
        small = [position for position in small if type(cells[position]) is _Entries]
        for position in small:
            cells[position].arrange(self._key_codec.ordering)
        counts = [len(cells[position]) for position in small]
        lists, firsts = self._built(counts, [cells[position] for position in small])
        if wide := self._oversized(lists, counts, MAX_ENTRIES):
            for number in wide:
                self._divide(small[number], lists.slice(number, 1).nbytes)
            small_numbers = [number for number in range(len(small)) if number not in wide]
            lists, firsts = (
                lists.take(pa.array(small_numbers, pa.int64())),
                [firsts[number] for number in small_numbers],
            )
            small = [small[number] for number in small_numbers]
        large = [position for position in at if type(cells[position]) is Buckets]
        pieces = self._pieces(large)
        heads = [None] * len(small) + [cells[position].head for position in large]
        if large:
            lists = pa.concat_arrays([lists, pa.nulls(len(large), lists.type)])
        return self._combine(small + large, lists, firsts + [NEVER] * len(large), heads, pieces)

    def _built(self, counts: list[int], maps: Iterable[_Entries]) -> tuple[pa.ListArray, list[int]]:
        flat = list(chain.from_iterable(entry for entries in maps for entry in entries.values()))
        keys, values, expiries = flat[0::3], flat[1::3], flat[2::3]
        columns = {"key": from_stored(keys, self._key_codec.arrow), "value": from_stored(values, self._codec.arrow)}
        return self._lists(counts, columns, expiries)

    def _divide(self, at: int, size: int) -> None:
        """Divide a map into buckets; `size` is its size in bytes, 0 if unknown."""
        entries = self._cells[at]
        stop = bucket_count(1, len(entries), size)
        # Not `self._expiry`: entries of an earlier run may expire later.
        latest = max(expiry for _, _, expiry in entries.values()) if self._has_ttl else NEVER
        cell = self._cells[at] = Buckets(Head(0, stop, len(entries), 0, latest))
        cell.loaded = {number: _Entries() for number in range(stop)}
        for identity, entry in entries.items():
            cell.loaded[self._number(entry[0], cell)][identity] = entry
        cell.touched = set(cell.loaded)

    def _place_written(self, large: list[int]) -> None:
        """Move written entries to their buckets, and adjust the number of buckets."""
        cells = [self._cells[position] for position in large]
        places = [
            {identity: self._number(entry[0], cell) for identity, entry in cell.written.items()} for cell in cells
        ]
        self._load(
            [
                (position, number)
                for position, cell, places_of_cell in zip(large, cells, places, strict=True)
                for number in sorted({*places_of_cell.values()} - cell.loaded.keys())
            ]
        )
        for cell, places_of_cell in zip(cells, places, strict=True):
            cell.place_written(places_of_cell, estimated=self._has_ttl)
        self._load(
            [
                (position, number)
                for position, cell in zip(large, cells, strict=True)
                for number in sorted(moved_buckets(cell.head.stop, cell.wanted) - cell.loaded.keys())
            ]
        )
        for position, cell in zip(large, cells, strict=True):
            cell.resize(lambda key: crc32(self._key_codec.ordering(key)))
            if cell.head.stop == 1:
                entries = self._cells[position] = _Entries(cell.loaded[0])
                entries.fresh.update(entries)

    def _pieces(self, large: list[int]) -> list[Pieces]:
        """Return the changed buckets, and update their heads."""
        cells = [self._cells[position] for position in large]
        numbers = [sorted(cell.touched) for cell in cells]
        changed = [
            cell.loaded[number]
            for cell, numbers_of_cell in zip(cells, numbers, strict=True)
            for number in numbers_of_cell
        ]
        if not changed:
            return []
        lists, firsts = self._built(list(map(len, changed)), changed)
        start = 0
        for cell, numbers_of_cell in zip(cells, numbers, strict=True):
            latest = self._expiry if self._has_ttl else NEVER
            size = lists.slice(start, len(numbers_of_cell)).nbytes
            cell.head = cell.head._replace(bytes=max(0, cell.head.bytes + size), expiry=max(cell.head.expiry, latest))
            start += len(numbers_of_cell)
        owners = [position for position, numbers_of_cell in zip(large, numbers, strict=True) for _ in numbers_of_cell]
        return [Pieces(owners, [number for numbers_of_cell in numbers for number in numbers_of_cell], lists, firsts)]

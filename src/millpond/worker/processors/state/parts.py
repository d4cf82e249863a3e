"""Common base of state variables with several parts per key: lists and maps.

The state of several keys is converted to Python objects together when one of them is used. So a key whose state is
never used costs next to nothing. A large state of a key is stored beside its row, in numbered parts of the table. A
call then brings a head that describes them, and parts are fetched when they are used.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millpond.layout import NEVER
from millpond.spec.kinds.processor import HEAD, Variable
from millpond.spec.types import parse_type
from millpond.worker.processors.state.columns import bounds, from_stored, nulls, offsets, to_stored
from millpond.worker.processors.state.variables import Changes, CurrentKey, StateVariable

MAX_SENT_BYTES = 8 << 10
"""Approximate bytes of a key's state in one variable that travel with every call; a larger state is divided into
parts."""

MAX_FETCH_BYTES = 256 << 10
"""Maximum bytes that are fetched at once because they may be needed."""

_HEAD = parse_type(HEAD).arrow
_KEYS_PER_READ = 512  # keys that are converted together
_REQUEST_BYTES = 4 << 20  # bytes per request
_MAX_PARTS_PER_REQUEST = 4096  # maximum number of parts per request
_PREFETCH_AFTER = 3  # requests for the same thing, from which it is also prefetched for later keys
# Credit for a prefetched part that is used; fetching a part costs one. A request takes as long as 20 parts.
_CREDIT_OF_USE = 16
_CREDIT_OF_REQUEST = 0.125  # so that prefetching is tried again
_MIN_CREDIT = 16  # at the start of a call
_MAX_CREDIT = 1024


class Head(NamedTuple):
    """Description of the parts that a key has beside its row (see `spec.kinds.processor.HEAD`)."""

    first: int
    stop: int
    entries: int
    bytes: int
    expiry: int

    @property
    def part_bytes(self) -> int:
        """Approximate bytes per part."""
        return self.bytes // max(1, self.stop - self.first)


class Pieces(NamedTuple):
    """Changed parts.

    Attributes:
        at: positions of their keys in the call.
        numbers: their numbers.
        values: their contents.
        expiries: for each, when its first item expires, in milliseconds.
    """

    at: list[int]
    numbers: list[int]
    values: pa.ListArray
    expiries: list[int]


class PartedVariable(StateVariable):
    """Base of lists and maps.

    A cell holds the state of a key. It is made of columns: those of its items, and with a time to live their times of
    expiry last.
    """

    def _declare(self, variable: Variable, current_key: CurrentKey, now: int) -> None:
        super()._declare(variable, current_key, now)
        self._cells: dict[int, Any] = {}  # by position, of keys that were used and of some beside them
        self._heads: dict[int, Head] = {}  # by position, of keys with parts
        self._large: list[int] = []  # positions of keys with parts
        self._request_counts: dict[Any, int] = {}  # number of requests for the same thing
        self._prefetched: set[tuple[int, Any]] = set()  # positions and parts (see `_part`) that are not used yet
        self._credit: float = _MIN_CREDIT  # maximum number of prefetches

    def begin(self, sent: pa.Array | None, heads: pa.StructArray | None = None) -> None:
        """Start a call with the state of its keys, and the heads of those with parts."""
        super().begin(sent, heads)
        self._cells = {}
        self._heads = (
            {} if heads is None else {position: Head(*head) for position, head in enumerate(to_stored(heads)) if head}
        )
        self._large = list(self._heads)
        self._prefetched = set()
        self._credit = max(self._credit, _MIN_CREDIT)

    def _cell(self, doing: str) -> Any:
        """Return the current key's cell."""
        try:
            return self._cells[self._current_key.position]
        except KeyError:
            return self._of(self._at(doing))

    def _of(self, at: int) -> Any:
        """Return the cell of the key at a position."""
        if at not in self._cells:
            self._read(at - at % _KEYS_PER_READ)
        return self._cells[at]

    def _read(self, start: int) -> None:
        """Convert the state of `_KEYS_PER_READ` keys to cells."""
        sent: Any = self._sent
        lists = sent.slice(start, _KEYS_PER_READ)
        if lists.null_count == len(lists):
            self._cells.update((position, self._made(None, None)) for position in range(start, start + len(lists)))
            return
        head = self._heads.get
        for position, columns in enumerate(self._listed(lists), start):
            self._cells[position] = self._made(columns, head(position))

    def _listed(self, lists: pa.ListArray) -> Iterator[list[list[Any]] | None]:
        """Yield the columns of each list without expired items; None for null."""
        places = bounds(lists)
        columns = self._columns(lists.values.slice(places[0], places[-1] - places[0]))
        live = [expiry > self._now for expiry in columns[-1]] if self._has_ttl else []
        null_lists = set(nulls(lists))
        for number, (begin, end) in enumerate(pairwise(places)):
            columns_of_list = None
            if number not in null_lists:
                items = slice(begin - places[0], end - places[0])
                columns_of_list = [column[items] for column in columns]
                if not all(live[items]):
                    columns_of_list = [list(compress(column, live[items])) for column in columns_of_list]
            yield columns_of_list

    @abstractmethod
    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        """Convert items to Python columns."""

    @abstractmethod
    def _made(self, columns: list[list[Any]] | None, head: Head | None) -> Any:
        """Create the cell of a key.

        Args:
            columns: columns of the items in its row; None if it has none.
            head: description of its parts, if it has any.
        """

    # parts --------------------------------------------------------------------------------------------------

    def _parts(self, wanted: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[Sequence[Any], pa.ListArray]]:
        """Fetch parts, in several requests if they are large; yield the requested parts with their contents.

        Args:
            wanted: positions of keys and numbers of parts.
            size: approximate bytes per part.
        """
        most = max(1, min(_MAX_PARTS_PER_REQUEST, _REQUEST_BYTES // max(1, size)))
        for start in range(0, len(wanted), most):
            requested = wanted[start : start + most]
            columns = [pa.array(column, pa.int64()) for column in zip(*requested, strict=True)]
            yield (
                requested,
                self._current_key.ask(self.variable.parts, pa.RecordBatch.from_arrays(columns, ["at", "part"])),
            )

    @abstractmethod
    def _part(self, at: int, key: Any) -> Any:
        """Return the part that `key` is in, None for all parts. The arguments are those of `lacks`."""

    def _fetch_if_missing(self, key: Any, identity: Any, size: int) -> None:
        """Fetch missing data of the current key, and after repeated requests that of later keys too.

        `key` is as for `lacks`, the second argument is the identity of that key, and `size` the approximate bytes of
        the data.
        """
        position = self._current_key.position
        if not self.lacks(position, key):
            return
        if len(self._request_counts) >= _MAX_PARTS_PER_REQUEST:
            self._request_counts.clear()
        times = self._request_counts[identity] = self._request_counts.get(identity, 0) + 1
        wanted = [(position, key)]
        # Repeated requests suggest that later keys need the same: prefetch it for twice as many keys each time.
        if times >= _PREFETCH_AFTER:
            begin = bisect_right(self._large, position)
            self._credit += _CREDIT_OF_REQUEST
            most = min(1 << min(times, 8), MAX_FETCH_BYTES // max(1, size), int(self._credit))
            later = [(following, key) for following in self._large[begin : begin + most] if self.lacks(following, key)]
            self._prefetched.update((following, self._part(following, key)) for following, _ in later)
            self._credit -= len(later)
            wanted += later
        self.fetch(wanted)

    def _count_use(self, part: Any) -> None:
        """Record that the current key uses a part, which may have been prefetched, so that prefetching goes on."""
        for used in {(self._current_key.position, part), (self._current_key.position, None)} & self._prefetched:
            self._prefetched.remove(used)
            self._credit = min(self._credit + _CREDIT_OF_USE, _MAX_CREDIT)

    @staticmethod
    def _is_small(head: Head) -> bool:
        """Return whether all parts of a key are small enough to be fetched at once."""
        return head.bytes <= MAX_FETCH_BYTES

    def _fetch_all_if_small(self, head: Head) -> None:
        """Fetch all parts of the current key if they are small enough."""
        if self._is_small(head):
            self._count_use(None)
            self._fetch_if_missing(None, None, head.bytes)

    # changes ------------------------------------------------------------------------------------------------

    def _lists(
        self, counts: list[int], columns: dict[str, pa.Array], expiries: list[int]
    ) -> tuple[pa.ListArray, list[int]]:
        """Build the lists of changed keys.

        Args:
            counts: number of items per key.
            columns: columns of all items.
            expiries: their times of expiry, if the variable has a time to live.

        Returns:
            A list per key, null if it has no items, and the time at which the first of each expires.
        """
        firsts = [NEVER] * len(counts)
        if self._has_ttl:
            columns["expiry"] = pa.array(expiries, pa.int64())
            ends = accumulate(counts)
            firsts = [min(expiries[end - n : end], default=NEVER) for n, end in zip(counts, ends, strict=True)]
        fields = [pa.field(name, part.type) for name, part in columns.items()]
        whole = (
            pa.StructArray.from_arrays(list(columns.values()), fields=fields) if len(columns) > 1 else columns["value"]
        )
        kind = pa.list_(pa.field("element", whole.type))
        mask = pa.array([not count for count in counts], pa.bool_())
        return pa.ListArray.from_arrays(offsets(counts), whole, type=kind, mask=mask), firsts

    def _oversized(self, lists: pa.ListArray, counts: list[int], most: int) -> list[int]:
        """Return the positions of lists that are too large to travel with every call, by number of items and by bytes.

        Args:
            lists: the lists.
            counts: number of items per list.
            most: maximum number of items.
        """
        oversized = [number for number, count in enumerate(counts) if count > most]
        if lists.nbytes > max(MAX_SENT_BYTES, sum(counts) * MAX_SENT_BYTES // most):
            sizes = ((number, lists.slice(number, 1).nbytes) for number, count in enumerate(counts) if count > 1)
            oversized = sorted({*oversized, *(number for number, size in sizes if size > MAX_SENT_BYTES)})
        return oversized

    def _combine(
        self, at: list[int], values: pa.ListArray, firsts: list[int], heads: list[Head | None], pieces: list[Pieces]
    ) -> Changes:
        """Combine the changes of rows, heads and parts."""
        if any(heads):
            parted = pa.array([head is not None for head in heads])
            values = pc.if_else(pc.and_(parted, values.is_null()), pa.scalar([], values.type), values)
            firsts = [min(first, head.expiry) if head else first for first, head in zip(firsts, heads, strict=True)]
        parts = None
        if pieces:
            columns = [
                pa.array([position for piece in pieces for position in piece.at], pa.int64()),
                pa.array([number for piece in pieces for number in piece.numbers], pa.int64()),
                pa.concat_arrays([piece.values for piece in pieces]),
                pa.array([expiry for piece in pieces for expiry in piece.expiries], pa.int64()),
            ]
            parts = pa.RecordBatch.from_arrays(columns, ["at", "part", "value", "expiry"])
        return Changes(at, values, firsts, from_stored(heads, _HEAD) if any(heads) else None, parts)

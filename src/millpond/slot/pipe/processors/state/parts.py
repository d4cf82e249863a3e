"""What state variables with several parts for each key have in common: lists and maps.

The parts of some keys are read together, when one of them is touched: a key that nobody touches costs next to nothing.
What a key has much of lies beside its row, in numbered parts of the table; a call brings a head that says so, and parts
are asked for when they are used.
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
from millpond.slot.pipe.processors.state.columns import bounds, built, nulls, offsets, stored
from millpond.slot.pipe.processors.state.variables import Changes, Held, Place
from millpond.spec.kinds.processor import HEAD, Variable
from millpond.spec.types import parse_type

LARGEST = 8 << 10
"""Bytes that travel with a key of one variable, about, before they become parts."""

AT_ONCE = 256 << 10
"""Bytes that are fetched at once for what may be wanted, at most."""

_HEAD = parse_type(HEAD).arrow
_TOGETHER = 512  # keys that are read together
_PORTION = 4 << 20  # bytes that are asked for at a time
_PARTS = 4096  # parts that are asked for at a time, at most
_OFTEN = 3  # what was asked for so often is fetched along for keys that follow


class Head(NamedTuple):
    """What is known of the parts that a key has beside its row (see `spec.kinds.processor.HEAD`)."""

    first: int
    stop: int
    entries: int
    bytes: int
    expiry: int

    @property
    def part_bytes(self) -> int:
        """Bytes of a part, about."""
        return self.bytes // max(1, self.stop - self.first)


class Pieces(NamedTuple):
    """Parts that have changed: positions of their keys, their numbers, what they have, when the first of it expires."""

    at: list[int]
    numbers: list[int]
    values: pa.ListArray
    expiries: list[int]


class HeldParts(Held):
    """What lists and maps have in common.

    A cell is what a key has; the columns that it is made of are those of its parts, the last one their times of expiry.
    """

    def _hold(self, variable: Variable, place: Place, now: int) -> None:
        super()._hold(variable, place, now)
        self._cells: dict[int, Any] = {}  # of the keys that were touched, and of some beside them
        self._heads: dict[int, Head] = {}  # of the keys that have parts beside
        self._large: list[int] = []  # these keys
        self._asked: dict[Any, int] = {}  # how often something was asked for

    def begin(self, sent: pa.Array | None, heads: pa.StructArray | None = None) -> None:
        """A call begins: this is what its keys have, and what parts beside that, if any."""
        super().begin(sent, heads)
        self._cells = {}
        self._heads = {} if heads is None else {at: Head(*one) for at, one in enumerate(stored(heads)) if one}
        self._large = list(self._heads)

    def _cell(self, doing: str) -> Any:
        """What the key has."""
        try:
            return self._cells[self._place.at]
        except KeyError:
            return self._of(self._at(doing))

    def _of(self, at: int) -> Any:
        """What a key has."""
        if at not in self._cells:
            self._read(at - at % _TOGETHER)
        return self._cells[at]

    def _read(self, start: int) -> None:
        """What some keys have."""
        sent: Any = self._sent
        some = sent.slice(start, _TOGETHER)
        if some.null_count == len(some):
            self._cells.update((at, self._made(None, None)) for at in range(start, start + len(some)))
            return
        head = self._heads.get
        for at, columns in enumerate(self._listed(some), start):
            self._cells[at] = self._made(columns, head(at))

    def _listed(self, lists: pa.ListArray) -> Iterator[list[list[Any]] | None]:
        """The columns of each list, without what has expired; None for none."""
        places = bounds(lists)
        columns = self._columns(lists.values.slice(places[0], places[-1] - places[0]))
        live = [expiry > self._now for expiry in columns[-1]] if self._lives else []
        lost = set(nulls(lists))
        for number, (begin, end) in enumerate(pairwise(places)):
            mine = None
            if number not in lost:
                kept = slice(begin - places[0], end - places[0])
                mine = [column[kept] for column in columns]
                if not all(live[kept]):
                    mine = [list(compress(column, live[kept])) for column in mine]
            yield mine

    @abstractmethod
    def _columns(self, parts: pa.StructArray) -> list[list[Any]]:
        """The columns of parts."""

    @abstractmethod
    def _made(self, columns: list[list[Any]] | None, head: Head | None) -> Any:
        """The cell of a key with these parts, if it has any, and these beside."""

    # parts beside -------------------------------------------------------------------------------------------

    def _parts(self, wanted: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[Sequence[Any], pa.ListArray]]:
        """Ask for parts, portion by portion.

        Args:
            wanted: positions of keys and numbers of parts. size: bytes of a part, about.
        """
        most = max(1, min(_PARTS, _PORTION // max(1, size)))
        for start in range(0, len(wanted), most):
            some = wanted[start : start + most]
            columns = [pa.array(column, pa.int64()) for column in zip(*some, strict=True)]
            yield some, self._place.ask(self.variable.parts, pa.RecordBatch.from_arrays(columns, ["at", "part"]))

    def _need(self, key: Any, told: Any, size: int) -> None:
        """Have what is wanted of the key fetched, unless it is there: see `lacks`.

        Args:
            key: as for `lacks`. told: what tells the key apart. size: bytes that it takes, about.
        """
        at = self._place.at
        if not self.lacks(at, key):
            return
        if len(self._asked) >= _PARTS:
            self._asked.clear()
        times = self._asked[told] = self._asked.get(told, 0) + 1
        wanted = [(at, key)]
        if times >= _OFTEN:
            begin = bisect_right(self._large, at)
            most = min(1 << min(times, 8), AT_ONCE // max(1, size))
            wanted += [(one, key) for one in self._large[begin : begin + most] if self.lacks(one, key)]
        self.fetch(wanted)

    @staticmethod
    def _little(head: Head) -> bool:
        """Whether all that a key has in parts may be fetched at once."""
        return head.bytes <= AT_ONCE

    def _need_all(self, head: Head) -> None:
        """Have all that the key has fetched, unless that is much."""
        if self._little(head):
            self._need(None, None, head.bytes)

    # changes ------------------------------------------------------------------------------------------------

    def _lists(
        self, counts: list[int], columns: dict[str, pa.Array], expiries: list[int]
    ) -> tuple[pa.ListArray, list[int]]:
        """Lists of so many parts each, null where there are none, and when the first of each expires."""
        firsts = [NEVER] * len(counts)
        if self._lives:
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

    def _wide(self, lists: pa.ListArray, counts: list[int], most: int) -> list[int]:
        """Which lists are too large to travel with every call, going by parts and by bytes."""
        found = [number for number, count in enumerate(counts) if count > most]
        if lists.nbytes > max(LARGEST, sum(counts) * LARGEST // most):
            sizes = ((number, lists.slice(number, 1).nbytes) for number, count in enumerate(counts) if count > 1)
            found = sorted({*found, *(number for number, size in sizes if size > LARGEST)})
        return found

    def _together(
        self, at: list[int], values: pa.ListArray, firsts: list[int], heads: list[Head | None], pieces: list[Pieces]
    ) -> Changes:
        """What has changed: of rows, with the heads of some, and of parts."""
        if any(heads):
            there = pa.array([head is not None for head in heads])
            values = pc.if_else(pc.and_(there, values.is_null()), pa.scalar([], values.type), values)
            firsts = [min(first, head.expiry) if head else first for first, head in zip(firsts, heads, strict=True)]
        parts = None
        if pieces:
            columns = [
                pa.array([one for piece in pieces for one in piece.at], pa.int64()),
                pa.array([one for piece in pieces for one in piece.numbers], pa.int64()),
                pa.concat_arrays([piece.values for piece in pieces]),
                pa.array([one for piece in pieces for one in piece.expiries], pa.int64()),
            ]
            parts = pa.RecordBatch.from_arrays(columns, ["at", "part", "value", "expiry"])
        return Changes(at, values, firsts, built(heads, _HEAD) if any(heads) else None, parts)

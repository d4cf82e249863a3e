"""A run as its readers see it: blocks of rows in hash order, wherever they lie.

Kernels follow addresses, so a run in memory, in a mapped file and in a cache of fetched blocks is searched and merged
by the same code. What differs is how blocks get their addresses: that is a `BlockSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.pointers import address
from millpond.kernels.runs.bloom import LINE, build_filters, lines_for
from millpond.kernels.runs.gather import addresses, cut, gather_rows
from millpond.kernels.runs.search import KEY_PLACES
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, RowLayout, Rows, Words

BLOCK_BYTES = 65536
"""Bytes of row words in a block of what is read from one end to the other, at most."""

BLOCK_HEAP = 1 << 20
"""Bytes of long values in such a block, unless a single row has more."""

RUN_BLOCK = 32768
"""Bytes of row words and long values together in a block of a run, at most, unless a single row has more.

A key that is looked for in a file brings a whole block of it.
"""

Numbers = NDArray[np.int64] | NDArray[np.int32]
"""Block numbers in ascending order."""


class Shape(NamedTuple):
    """A layout as kernels take it: where the key stands, and which words refer to the heap.

    `references` has a byte for each word: 1 for heap offsets; `references_at` is its address. `places` says what a
    search has to know of it.
    """

    width: int
    null_mask: int
    key_start: int
    key_stop: int
    references_at: int
    references: NDArray[np.uint8]
    blobs: NDArray[np.int64]
    places: NDArray[Any]


@lru_cache(maxsize=256)
def shape_of(layout: RowLayout) -> Shape:
    """The kernels' view of a layout."""
    references = np.zeros(layout.width, np.uint8)
    references[[offset + 1 for offset in layout.bytes_columns]] = 1
    null_mask = (1 << len(layout.schema.keys)) - 1
    place = (null_mask, layout.key_start, layout.key_stop, layout.width, address(references))
    return Shape(
        layout.width,
        null_mask,
        layout.key_start,
        layout.key_stop,
        address(references),
        references,
        np.array(layout.bytes_columns, np.int64),
        np.array([place], KEY_PLACES),
    )


def rows_per_block(layout: RowLayout) -> int:
    """How many rows of a layout a block of a run holds at most."""
    return max(1, RUN_BLOCK // (8 * layout.width))


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """What is known of a run's blocks without reading them.

    Attributes:
        fence: first hash of each block.
        starts: rows before each block, and the number of rows at the end.
        lines: lines of the bloom filter of each block.
        highest: the run's highest hash (0 if it has no rows).
    """

    fence: NDArray[np.uint64]
    starts: NDArray[np.int64]
    lines: NDArray[np.int32]
    highest: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.fence)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.starts[-1])

    def span(self, lowest: int, highest: int) -> tuple[int, int]:
        """The blocks (first, one past the last) that may hold hashes from `lowest` to `highest`, both included."""
        if highest < lowest or not self.count or lowest > self.highest:
            return 0, 0
        first = max(0, int(np.searchsorted(self.fence, np.uint64(lowest), "left")) - 1)
        return first, max(first, int(np.searchsorted(self.fence, np.uint64(highest), "right")))


class BlockTable(NamedTuple):
    """Addresses of blocks, by block number.

    Those that were not asked for may be 0, unless the table is `complete`. `pins` keeps the memory alive.
    """

    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]
    pins: Sequence[Any]
    complete: bool = False


class Part(NamedTuple):
    """Some of the blocks that were asked for: those from `begin` to `end` (excluded) of what was asked.

    `table` tells where they are, and of no others.
    """

    begin: int
    end: int
    table: BlockTable


class FilterTable(NamedTuple):
    """Addresses of the filters of blocks (0: not asked for, or without one). `pins` keeps the memory alive."""

    at: NDArray[np.uint64]
    pins: Sequence[Any]


class BlockSource(Protocol):
    """Where the blocks of one run come from. Safe to use from several threads."""

    layout: RowLayout
    index: BlockIndex

    @property
    def resident(self) -> bool:
        """Whether any number of blocks may be asked for at once without taking memory."""

    @property
    def distant(self) -> bool:
        """Whether reading a row of a block table may have to wait for a disk."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the source itself holds (caches shared with others not counted)."""

    def blocks(self, wanted: Numbers) -> BlockTable:
        """The addresses of some blocks (ascending numbers), brought in and checked as needed."""

    def scanned(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """Begin to bring blocks `begin` to `end` (excluded) for a scan, which passes each once; what is returned waits
        for their addresses.

        Caches keep the blocks only where they have room.
        """

    def parts(self, wanted: NDArray[np.int64], tied: NDArray[np.bool_]) -> Iterator[Part]:
        """Some blocks, as many at a time as memory is meant for; use a part before the next is asked for.

        What takes long is begun before the first part is asked for, and goes on while a part is used.

        Args:
            wanted: numbers, ascending, some perhaps twice. tied: which of them have to be in one part with the one
                before.
        """

    def filters(self, wanted: Numbers) -> Callable[[], FilterTable]:
        """Begin to bring the filters of some blocks (ascending numbers); what is returned waits for their addresses."""

    def expect_rows(self, places: NDArray[np.uint64]) -> None:
        """Rows near some addresses (ascending) of a block table will be read soon: fetch what takes long."""

    def expect_blocks(self, begin: int, end: int) -> None:
        """All rows of blocks `begin` to `end` (excluded) will be read soon."""

    def close(self) -> None:
        """Let go of files and memory; addresses given out stay valid as long as their pins."""


class MemorySource:
    """A hash-ordered run in memory.

    Args:
        rows: rows in hash order, each key once; not changed afterwards.
        layout: their layout.
        filtered: build a bloom filter (about 5 ns a row), for runs that will be searched.
    """

    resident = True
    distant = False

    def __init__(self, rows: Rows, layout: RowLayout, *, filtered: bool = True) -> None:
        words = np.ascontiguousarray(rows.words)
        self.layout = layout
        self.rows = Rows(words, np.ascontiguousarray(rows.heap))
        starts = np.append(np.arange(0, len(words), rows_per_block(layout), dtype=np.int64), len(words))
        lines = lines_for(np.diff(starts))
        self.index = BlockIndex(words[starts[:-1], HASH], starts, lines, int(words[-1, HASH]) if len(words) else 0)
        stride = 8 * layout.width
        words_at = np.uint64(address(words)) + starts[:-1].astype(np.uint64) * np.uint64(stride)
        heap_at = np.full(len(words_at), address(self.rows.heap), np.uint64)
        self._table = BlockTable(words_at, heap_at, (self.rows,), complete=True)
        filter_at = np.zeros(len(words_at), np.uint64)
        self._filter = np.zeros(0, np.uint64)
        if filtered:
            begins = np.append(0, np.cumsum(lines, dtype=np.int64)) * (LINE // 8)
            self._filter = np.zeros(int(begins[-1]), np.uint64)
            build_filters(address(words), layout.width, np.diff(starts), lines, self._filter)
            filter_at = np.uint64(address(self._filter)) + begins[:-1].astype(np.uint64) * np.uint64(8)
        self._filters = FilterTable(filter_at, (self._filter,))

    @property
    def memory(self) -> int:
        """Bytes of rows, heap and filter."""
        return self.rows.words.nbytes + self.rows.heap.nbytes + self._filter.nbytes

    def blocks(self, wanted: Numbers) -> BlockTable:
        """The addresses of all blocks."""
        return self._table

    def scanned(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """The addresses of all blocks."""
        return lambda: self._table

    def parts(self, wanted: NDArray[np.int64], tied: NDArray[np.bool_]) -> Iterator[Part]:
        """All in one part."""
        return iter([Part(0, len(wanted), self._table)])

    def filters(self, wanted: Numbers) -> Callable[[], FilterTable]:
        """The addresses of all filters."""
        return lambda: self._filters

    def expect_rows(self, places: NDArray[np.uint64]) -> None:
        """They are here."""

    def expect_blocks(self, begin: int, end: int) -> None:
        """They are here."""

    def close(self) -> None:
        """Nothing to let go of: the memory goes with the last reference."""


def sort_rows(rows: Rows, layout: RowLayout) -> Rows:
    """Rows in hash order with a compact heap (rows of one hash keep their order)."""
    words = np.ascontiguousarray(rows.words)
    _, order = order_by_hash(words[:, HASH])
    rows_at, heaps_at = addresses(words, rows.heap)
    return Rows(*gather_rows(rows_at[order], heaps_at, layout.width, shape_of(layout).blobs))


def in_parts(
    bring: Callable[[NDArray[np.int64]], BlockTable], wanted: NDArray[np.int64], tied: NDArray[np.bool_], most: int
) -> Iterator[Part]:
    """Some blocks, about `most` at a time, brought when their turn comes (see `BlockSource.parts`)."""
    for begin, end in pairwise(stops_of(tied, np.arange(len(wanted)) // most)):
        yield Part(begin, end, bring(wanted[begin:end]))


def stops_of(tied: NDArray[np.bool_], group: NDArray[np.int64]) -> list[int]:
    """Where things in order are cut by the groups that they belong to, or behind that, so that ties hold; both ends."""
    if not len(tied):
        return [0]
    free = np.flatnonzero(~tied[1:]) + 1
    cuts = np.flatnonzero(np.diff(group)) + 1
    at = np.searchsorted(free, cuts)
    return [0, *np.unique(free[at[at < len(free)]]).tolist(), len(tied)]


class Cut(NamedTuple):
    """Where rows are cut into blocks: the row behind each, and the bytes of its long values."""

    stops: NDArray[np.int64]
    heaps: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each."""
        return np.append(0, self.stops[:-1]) if len(self.stops) else self.stops


def cut_blocks(words: Words, layout: RowLayout, most: int | None = None) -> Cut:
    """Cut rows (contiguous words), in the order given, into blocks as files hold them.

    Args:
        most: bytes of words and long values together in a block (see `RUN_BLOCK`); without, `BLOCK_BYTES` and
            `BLOCK_HEAP`.
    """
    if words.shape[1] != layout.width:
        raise ValueError(f"rows of {words.shape[1]} words do not fit a layout of {layout.width}")
    bytes_of_words, heap = (BLOCK_BYTES, BLOCK_HEAP) if most is None else (most, most)
    most_rows = max(1, bytes_of_words // (8 * layout.width))
    if not layout.bytes_columns:
        starts = np.arange(0, len(words), most_rows, dtype=np.int64)
        return Cut(np.minimum(starts + most_rows, len(words)), np.zeros(len(starts), np.int64))
    stops, heaps = np.empty(len(words), np.int64), np.empty(len(words), np.int64)
    together = bytes_of_words + heap if most is None else most
    shape = shape_of(layout)
    found = cut(address(words), len(words), shape.width, shape.blobs, most_rows, heap, together, stops, heaps)
    return Cut(stops[:found].copy(), heaps[:found].copy())


def cut_run(words: Words, layout: RowLayout) -> Cut:
    """Where rows are cut into the blocks of a run (see `cut_blocks`)."""
    return cut_blocks(words, layout, RUN_BLOCK)

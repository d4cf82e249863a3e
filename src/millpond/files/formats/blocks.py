"""Blocks: the readers' view of a run, as blocks of rows in hash order.

Kernels follow addresses. So the same code searches and merges runs in memory, in mapped files and in a cache of fetched
blocks. Only the `BlockSource`, which provides the addresses of blocks, differs.
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
"""Largest size of row words in a block of files that are read sequentially, in bytes."""

BLOCK_HEAP = 1 << 20
"""Largest size of long values in such a block, in bytes, unless a single row has more."""

RUN_BLOCK = 32768
"""Largest size of a run's block in bytes, row words and long values together, unless a single row has more.

A lookup of one key reads a whole block, so blocks of runs are small.
"""

Numbers = NDArray[np.int64] | NDArray[np.int32]
"""Block numbers in ascending order."""


class KernelLayout(NamedTuple):
    """A row layout in the form that kernels take.

    Attributes:
        width: words per row.
        null_mask: mask of the keys' null bits.
        key_start, key_stop: words [start, stop) of the key.
        references_at: address of `references`.
        references: uint8[width], 1 for words that are heap offsets.
        blobs: int64, first words of the `bytes` columns.
        places: the fields that a search needs, as one record.
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
def kernel_layout(layout: RowLayout) -> KernelLayout:
    """Return the kernels' form of a layout."""
    references = np.zeros(layout.width, np.uint8)
    references[[offset + 1 for offset in layout.bytes_columns]] = 1
    null_mask = (1 << len(layout.schema.keys)) - 1
    place = (null_mask, layout.key_start, layout.key_stop, layout.width, address(references))
    return KernelLayout(
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
    """Return the largest number of rows of a layout in a block of a run."""
    return max(1, RUN_BLOCK // (8 * layout.width))


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """The index of a run's blocks, which is in memory.

    Attributes:
        fence: u64[blocks], first hash of each block.
        starts: int64[blocks + 1], number of rows before each block, and the total at the end.
        lines: int32[blocks], lines of each block's bloom filter.
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
        """Return the blocks [first, stop) that may hold hashes from `lowest` to `highest`, both included."""
        if highest < lowest or not self.count or lowest > self.highest:
            return 0, 0
        first = max(0, int(np.searchsorted(self.fence, np.uint64(lowest), "left")) - 1)
        return first, max(first, int(np.searchsorted(self.fence, np.uint64(highest), "right")))


class BlockTable(NamedTuple):
    """Addresses of blocks, by block number.

    Attributes:
        words_at, heap_at: u64[blocks], addresses of row words and heaps; may be 0 for blocks that were not requested.
        pins: objects that keep the memory alive.
        complete: whether the table has all blocks of the run.
    """

    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]
    pins: Sequence[Any]
    complete: bool = False


class Part(NamedTuple):
    """A part of the requested blocks: positions [begin, end) of the request.

    `table` has the addresses of these blocks only.
    """

    begin: int
    end: int
    table: BlockTable


class FilterPart(NamedTuple):
    """The filters of a part of the requested blocks: positions [begin, end) of the request.

    Attributes:
        addresses: u64[blocks], by block number; 0 for blocks outside the part and for those without a filter.
        pins: objects that keep the memory alive.
    """

    begin: int
    end: int
    addresses: NDArray[np.uint64]
    pins: Sequence[Any]


class BlockSource(Protocol):
    """The source of one run's blocks. Thread-safe."""

    layout: RowLayout
    index: BlockIndex

    @property
    def resident(self) -> bool:
        """Whether requests for blocks take no additional memory, however many blocks they name."""

    @property
    def may_read_disk(self) -> bool:
        """Whether reading a row at a block table's address may wait for a local disk."""

    @property
    def memory(self) -> int:
        """Bytes of memory that the source itself holds, without shared caches."""

    def blocks(self, requested: Numbers) -> BlockTable:
        """Return the addresses of some blocks (ascending numbers); fetch and check them as needed."""

    def begin_scan(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """Begin to fetch blocks [begin, end) for a scan, which reads each block once.

        Caches keep the blocks only if they have free room.

        Returns:
            A function that waits for the blocks and returns their addresses.
        """

    def parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part]:
        """Yield some blocks in parts that fit the memory budget. Finish using a part before requesting the next.

        Fetches start before the first part is requested, and continue while a part is used.

        Args:
            requested: ascending block numbers, possibly with repetitions.
            keep_with_previous: bool per element of `requested`: whether it must be in the same part as its predecessor.
        """

    def filters(self, requested: Numbers) -> Iterator[FilterPart]:
        """Begin to fetch the filters of some blocks (ascending numbers), and return them in parts.

        The call sends the first requests. A damaged local copy raises in the call, not during iteration. Parts fit the
        memory budget: finish using a part before requesting the next.
        """

    def prefetch_rows(self, places: NDArray[np.uint64]) -> None:
        """Prefetch hint: rows near some addresses (ascending) of a block table will be read soon."""

    def prefetch_blocks(self, begin: int, end: int) -> None:
        """Prefetch hint: all rows of blocks [begin, end) will be read soon."""

    def close(self) -> None:
        """Release files and memory; addresses in tables stay valid as long as their pins."""


class MemorySource:
    """A hash-ordered run in memory.

    Args:
        rows: rows in hash order, each key once; they must not change afterwards.
        layout: layout of the rows.
        filtered: build a bloom filter (about 5 ns a row), for runs that will be searched.
    """

    resident = True
    may_read_disk = False

    def __init__(self, rows: Rows, layout: RowLayout, *, filtered: bool = True) -> None:
        self.layout = layout
        self.rows = rows.packed()
        words = self.rows.words
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
        self._filter_at = filter_at

    @property
    def memory(self) -> int:
        """Bytes of rows, heap and filter."""
        return self.rows.words.nbytes + self.rows.heap.nbytes + self._filter.nbytes

    def blocks(self, requested: Numbers) -> BlockTable:
        """Return the addresses of all blocks."""
        return self._table

    def begin_scan(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.begin_scan`: all blocks are in memory."""
        return lambda: self._table

    def parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part]:
        """Yield all blocks in one part."""
        return iter([Part(0, len(requested), self._table)])

    def filters(self, requested: Numbers) -> Iterator[FilterPart]:
        """Yield all filters in one part."""
        return iter([FilterPart(0, len(requested), self._filter_at, (self._filter,))])

    def prefetch_rows(self, places: NDArray[np.uint64]) -> None:
        """Do nothing: all rows are in memory."""

    def prefetch_blocks(self, begin: int, end: int) -> None:
        """Do nothing: all blocks are in memory."""

    def close(self) -> None:
        """Do nothing: the memory is freed with the last reference."""


def sort_rows(rows: Rows, layout: RowLayout) -> Rows:
    """Sort rows by hash and compact their heap. The sort is stable."""
    rows = rows.packed()
    _, order = order_by_hash(rows.words[:, HASH])
    rows_at, heaps_at = addresses(*rows)
    return Rows(*gather_rows(rows_at[order], heaps_at, layout.width, kernel_layout(layout).blobs))


def split_into_parts(
    fetch: Callable[[NDArray[np.int64]], BlockTable],
    requested: NDArray[np.int64],
    keep_with_previous: NDArray[np.bool_],
    most: int,
) -> Iterator[Part]:
    """Yield some blocks in parts of about `most`, each fetched by `fetch` on demand (see `BlockSource.parts`)."""
    for begin, end in pairwise(cut_positions(keep_with_previous, np.arange(len(requested)) // most)):
        yield Part(begin, end, fetch(requested[begin:end]))


def cut_positions(keep_with_previous: NDArray[np.bool_], group: NDArray[np.int64]) -> list[int]:
    """Cut a sequence where its group changes, or at the next position that separates no elements that stay together.

    Args:
        keep_with_previous: bool[n], whether an element must stay together with its predecessor.
        group: int64[n], group of each element; ascending.

    Returns:
        The cut positions, with 0 and n.
    """
    if not len(keep_with_previous):
        return [0]
    allowed = np.flatnonzero(~keep_with_previous[1:]) + 1
    cuts = np.flatnonzero(np.diff(group)) + 1
    positions = np.searchsorted(allowed, cuts)
    return [0, *np.unique(allowed[positions[positions < len(allowed)]]).tolist(), len(keep_with_previous)]


class Cut(NamedTuple):
    """The division of rows into blocks.

    Attributes:
        stops: int64[blocks], row after the last one of each block.
        heaps: int64[blocks], bytes of each block's long values.
    """

    stops: NDArray[np.int64]
    heaps: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """First row of each block."""
        return np.append(0, self.stops[:-1]) if len(self.stops) else self.stops


def cut_blocks(words: Words, layout: RowLayout, most: int | None = None) -> Cut:
    """Divide rows, in their order, into blocks of a file.

    Args:
        words: the rows' words, contiguous.
        layout: layout of the rows.
        most: largest size of words and long values together in bytes (see `RUN_BLOCK`); None takes `BLOCK_BYTES` and
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
    shape = kernel_layout(layout)
    count = cut(address(words), len(words), shape.width, shape.blobs, most_rows, heap, together, stops, heaps)
    return Cut(stops[:count].copy(), heaps[:count].copy())


def cut_run(words: Words, layout: RowLayout) -> Cut:
    """Divide rows into blocks of a run (see `cut_blocks`)."""
    return cut_blocks(words, layout, RUN_BLOCK)

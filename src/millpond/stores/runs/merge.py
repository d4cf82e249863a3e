"""Merging of runs, one hash interval at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import BlockSource, BlockTable, MemorySource, kernel_layout
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.runs.merge import merge_order
from millpond.layout import HASH, LAST_HASH, HashRange, RowLayout, Rows
from millpond.stores.hash_filter import inside
from millpond.stores.runs.cuts import cut_evenly

PIECE_ROWS = 65536
"""Rows in a piece of a merge, roughly."""
_MIN_PIECE_ROWS = 1024  # the same, at least, unless they take more than twice the bytes of a piece


def piece_rows(size: int, row_bytes: int) -> int:
    """Return the number of rows in a piece of about `size` bytes, within bounds that keep merges and scans fast."""
    least = min(_MIN_PIECE_ROWS, 2 * size // row_bytes)
    return max(1, min(max(size // row_bytes, least), PIECE_ROWS))


class View(NamedTuple):
    """A run as input of a merge: the source of its blocks, and the rows that count (see `RunRef.visible`).

    Attributes:
        axis: index of the word that `visible` refers to.
    """

    source: BlockSource
    visible: HashRange = HashRange()
    axis: int = HASH

    def start_reading(self, lowest: int, highest: int) -> Callable[[], tuple[NDArray[np.int64], BlockTable]]:
        """Start to read the blocks of a hash interval, both ends included.

        Returns:
            A function that waits for the blocks, and returns the number of rows in each and their addresses.
        """
        index = self.source.index
        if self.axis == HASH and not self.visible.meets(HashRange(lowest, highest + 1)):
            return lambda: (np.empty(0, np.int64), BlockTable(_NO_ADDRESSES, _NO_ADDRESSES, ()))
        begin, end = index.span(lowest, highest)
        wait = self.source.begin_scan(begin, end)
        return lambda: self._select_blocks(begin, end, wait())

    def _select_blocks(self, begin: int, end: int, table: BlockTable) -> tuple[NDArray[np.int64], BlockTable]:
        counts = np.diff(self.source.index.starts[begin : end + 1])
        words_at, heap_at = table.words_at[begin:end], table.heap_at[begin:end]
        if self.axis == HASH or self.visible.whole or begin == end:
            return counts, BlockTable(words_at, heap_at, table.pins)
        width = self.source.layout.width
        row_in_block = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        rows_at = np.repeat(words_at, counts) + row_in_block.astype(np.uint64) * np.uint64(8 * width)
        rows = Rows(*gather_rows(rows_at, np.repeat(heap_at, counts), width, kernel_layout(self.source.layout).blobs))
        # Rows belong to partitions by another word than the hash, so they are filtered one by one into a new block.
        left = MemorySource(inside(rows, self.visible, self.axis), self.source.layout, filtered=False)
        table = left.blocks(np.arange(left.index.count))
        return np.diff(left.index.starts), BlockTable(table.words_at, table.heap_at, (left,))

    @property
    def bounds(self) -> list[int]:
        """Hashes at which rows begin and cease to count."""
        return [] if self.visible.whole or self.axis != HASH else [self.visible.lo, self.visible.hi]


_NO_ADDRESSES = np.empty(0, np.uint64)


def merge(
    runs: Sequence[View],
    layout: RowLayout,
    *,
    drop_tombstones: bool,
    lowest: int = 0,
    highest: int = LAST_HASH,
    size: int = PIECE_ROWS,
) -> Iterator[Rows]:
    """Merge runs to the newest version of each key, in hash order.

    Args:
        runs: newest first; within one run each key occurs once.
        layout: of their rows.
        drop_tombstones: leave out deleted keys; correct only if no older run lies below.
        lowest, highest: the hash interval, both ends included.
        size: rows in a piece, roughly; a piece never splits the rows of one hash.

    Yields:
        Non-empty pieces, each with its own compact heap.
    """
    shape = kernel_layout(layout)
    ends = list(_boundaries(runs, lowest, highest, size)) if runs else []
    pending_reads = [run.start_reading(lowest, ends[0] - 1) for run in runs]
    current = lowest
    for number, boundary in enumerate(ends):
        pieces = [wait() for wait in pending_reads]
        # Remote blocks of all runs are requested concurrently, while this piece is in use.
        pending_reads = (
            [run.start_reading(boundary, ends[number + 1] - 1) for run in runs] if boundary <= highest else []
        )
        first = np.zeros(len(runs) + 1, np.int64)
        np.cumsum([len(counts) for counts, _ in pieces], out=first[1:])
        if first[-1]:
            rows_in = np.concatenate([counts for counts, _ in pieces])
            words_at = np.concatenate([table.words_at for _, table in pieces])
            heap_at = np.concatenate([table.heap_at for _, table in pieces])
            room = int(rows_in.sum())
            rows_at, heaps_at = np.empty(room, np.uint64), np.empty(room, np.uint64)
            count = merge_order(
                first, rows_in, words_at, heap_at, current, boundary - 1, *shape[:5], drop_tombstones, rows_at, heaps_at
            )
            if count:
                yield Rows(*gather_rows(rows_at[:count], heaps_at[:count], shape.width, shape.blobs))
        current = boundary


def _boundaries(runs: Sequence[View], lowest: int, highest: int, size: int) -> Iterator[int]:
    """Yield the exclusive ends of hash intervals with about `size` rows each.

    Within one interval, either all rows of a run count, or no row of it does.
    """
    spans = [(run.source.index, *run.source.index.span(lowest, highest)) for run in runs]
    fences = [index.fence[begin:end] for index, begin, end in spans]
    rows = [np.diff(index.starts[begin : end + 1]) for index, begin, end in spans]
    ends = cut_evenly(fences, rows, size)
    for end in sorted({*ends, *(bound for run in runs for bound in run.bounds)}):
        if lowest < end <= highest:
            yield end
    yield highest + 1

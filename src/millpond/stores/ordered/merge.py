"""Merging of the parts of an ordered table, in memory or piece by piece into files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.ordered import scan as ordered_scan
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import gather_rows
from millpond.layout import HASH, NEVER, HashRange, Rows
from millpond.stores.ordered.layout import OrderedLayout
from millpond.stores.ordered.parts import BEGINNING, Part
from millpond.stores.runs.cuts import cut_evenly

_FENCE_ROWS = 1024  # rows between two possible cuts of a part in memory
_UNLIMITED_ROWS = 1 << 62  # everything in one piece, for merges in memory
_NO_ADDRESSES: NDArray[np.uint64] = np.empty(0, np.uint64)


class TimeInterval(NamedTuple):
    """An interval of times: later than `after`, not later than `until`."""

    after: int = BEGINNING
    until: int = NEVER


class Input:
    """A part as input of a merge, with a copy of its marks from when the merge began, or the marks given."""

    def __init__(self, part: Part, marks: NDArray[np.uint64] | None = None) -> None:
        self.part = part
        # A copy: rows marked during the merge are marked again in its result.
        self.marks = part.marks.copy() if marks is None and part.marks is not None else marks
        self._hashes = _NO_ADDRESSES
        if part.rows is not None:
            self._hashes = part.rows.word(HASH)

    def fences(self, lowest: int, highest: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the hashes at which the part can be cut, and the number of rows between them."""
        if self.part.rows is not None:
            cuts = np.arange(0, len(self._hashes), _FENCE_ROWS)
            return self._hashes[cuts], np.diff(cuts, append=len(self._hashes))
        index = self.part.source.index
        begin, end = index.span(lowest, highest)
        return index.fence[begin:end], np.diff(index.starts[begin : end + 1])

    def blocks(
        self, lowest: int, highest: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64], object]:
        """Return the blocks of a hash interval, both ends included.

        Returns:
            Addresses of the blocks, addresses of their heaps, rows in each, rows before each, and an object that keeps
            them alive.
        """
        part = self.part
        if not part.range.meets(HashRange(lowest, highest + 1)):
            return _NO_ADDRESSES, _NO_ADDRESSES, np.empty(0, np.int64), np.empty(0, np.int64), None
        if part.rows is not None:
            begin = int(np.searchsorted(self._hashes, np.uint64(lowest), "left"))
            end = int(np.searchsorted(self._hashes, np.uint64(highest), "right"))
            if begin == end:
                return _NO_ADDRESSES, _NO_ADDRESSES, np.empty(0, np.int64), np.empty(0, np.int64), None
            rows_at = np.array([address(part.rows.words) + begin * part.layout.stride], np.uint64)
            heap = np.array([address(part.rows.heap)], np.uint64)
            return rows_at, heap, np.array([end - begin]), np.array([begin]), part.rows
        first, last = part.source.index.span(lowest, highest)
        # Read as many blocks ahead as this interval has: the next one needs about as many.
        part.source.prefetch_blocks(first, min(first + 2 * (last - first), part.source.index.count))
        blocks = part.blocks(np.arange(first, last))
        return blocks.words_at, blocks.heap_at, np.diff(blocks.starts), blocks.bases, blocks.pins


def merge_parts(
    inputs: Sequence[Input],
    layout: OrderedLayout,
    range_: HashRange,
    interval: TimeInterval,
    *,
    drop_matched: bool = False,
    size: int = _UNLIMITED_ROWS,
) -> Iterator[Rows]:
    """Merge parts in the order of (hash, time); matched rows carry the flag themselves in the result.

    Args:
        inputs: the parts. layout: of their rows.
        range_, interval: the hash range and the time interval to merge.
        drop_matched: leave out matched rows.
        size: rows in a piece, roughly, and less than twice as many; the rows of one hash may be in several pieces.

    Yields:
        Non-empty pieces, each with its own compact heap.
    """
    current = range_.lo
    for boundary in _boundaries(inputs, range_.lo, range_.hi - 1, size):
        pieces = [source.blocks(current, boundary - 1) for source in inputs]
        first = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece[0]) for piece in pieces], out=first[1:])
        words_at, heap_at, rows_in, bases = (np.concatenate([piece[k] for piece in pieces]) for k in range(4))
        room = int(rows_in.sum())
        rows_at, heaps_at, matched = np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(room, np.int64)
        marks_at = np.array([0 if source.marks is None else address(source.marks) for source in inputs], np.uint64)
        count = ordered_scan.merge_parts(
            first, rows_in, bases, words_at, heap_at, marks_at, current, boundary - 1, layout.stride, layout.time,
            layout.number, interval.after, interval.until, drop_matched, rows_at, heaps_at, matched,
        )  # fmt: skip
        # A hash may have any number of rows, so an interval is copied in even pieces of less than twice `size` rows.
        copies = max(1, count // size) if count else 0
        for number in range(copies):
            copied = slice(count * number // copies, count * (number + 1) // copies)
            rows = Rows(*gather_rows(rows_at[copied], heaps_at[copied], layout.rows.width, layout.shape.blobs))
            flagged = np.flatnonzero(matched[copied])
            if len(flagged):
                ordered_scan.flag(address(rows.words), len(flagged), layout.stride, flagged)
            yield rows
        current = boundary


def _boundaries(inputs: Sequence[Input], lowest: int, highest: int, size: int) -> Iterator[int]:
    """Yield the exclusive ends of hash intervals with about `size` rows each.

    Within one interval, either all rows of an input count, or no row of it does.
    """
    fences, rows = zip(*(source.fences(lowest, highest) for source in inputs), strict=True)
    ends = cut_evenly(fences, rows, size)
    for end in sorted({*ends, *(edge for source in inputs for edge in source.part.range)}):
        if lowest < end <= highest:
            yield end
    yield highest + 1

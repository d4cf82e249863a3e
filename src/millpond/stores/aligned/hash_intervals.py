"""Gradual merge of hash-ordered files: reading them in hash intervals that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from millpond.files.formats.append_file import AppendFile, Section
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, HashRange, RowLayout, Rows
from millpond.stores.runs.cuts import cut_evenly

_MIN_INTERVAL_BYTES = 1 << 16  # bytes read at a time, at least
_MAX_CONCURRENT_READS = 16
"""Remote files that are read concurrently."""


def read_gradually(
    groups: Sequence[Sequence[AppendFile]],
    layout: RowLayout,
    size: int,
    range_: HashRange = HashRange(),  # noqa: B008
) -> Iterator[Rows]:
    """Yield the rows of hash-ordered files, one hash interval at a time (FlowKV §4.1, gradual state loading).

    Args:
        groups: the files of each window, oldest first.
        layout: of the rows. size: bytes of an interval's rows, roughly. range_: the hash range to read.
    """
    cursors = [_Cursor(file, section, range_) for group in groups for file in group for section in file.sections]
    cursors = [cursor for cursor in cursors if cursor.pending]
    if not cursors:
        return
    ends = list(_boundaries(cursors, size, range_))
    remote = any(cursor.file.data.remote for cursor in cursors)
    pool = ThreadPoolExecutor(min(_MAX_CONCURRENT_READS, len(cursors)), "millpond-window") if remote else None
    try:
        for end in ends:
            taken = (pool.map if pool else map)(partial(_Cursor.take_until, end=end), cursors)
            parts = [part for piece in taken for part in piece]
            if parts:
                merged = [in_hash_order(parts, layout)]
                # The caller may work on a piece for long: references here would keep its rows in memory twice.
                parts.clear()
                yield merged.pop()
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


class _Cursor:
    """Read position in one file, in hash order."""

    def __init__(self, file: AppendFile, section: Section, range_: HashRange) -> None:
        self.file = file
        self.section = section
        range_ = range_.meet(file.visible)
        first = section.first
        # `first` has the lowest hash of each block, so the block before may hold hashes of the range, too.
        self.block = max(0, int(np.searchsorted(first, np.uint64(range_.lo), "left")) - 1)
        self.stop = int(np.searchsorted(first, np.uint64(range_.hi - 1), "right")) if range_.lo < range_.hi else 0
        self._lo = np.uint64(range_.lo)
        self._hi = range_.hi
        self._rest: Rows | None = None  # rows of the last block read, beyond the last interval

    @property
    def pending(self) -> int:
        """Number of blocks not read yet."""
        return max(0, self.stop - self.block)

    def take_until(self, end: int) -> list[Rows]:
        """Take all remaining rows with hashes below `end`."""
        out: list[Rows] = []
        if self._rest is not None:
            self._split(self._rest, end, out)
        last = int(np.searchsorted(self.section.first, np.uint64(end - 1), "right"))
        last = min(self.stop, last)
        if self._rest is None and self.block < last:
            blocks = np.arange(self.block, last)
            self.block = last
            # Prefetch as many blocks as were just read: the next interval needs about as many.
            self.file.data.prefetch(
                self.file.ranges(self.section, np.arange(last, min(self.stop, 2 * last - blocks[0])))
            )
            for rows in self.file.read(self.section, blocks):
                self._split(rows, end, out)
        return out

    def _split(self, rows: Rows, end: int, out: list[Rows]) -> None:
        hashes = rows.words[:, HASH]
        begin = int(np.searchsorted(hashes, self._lo, "left"))
        cut = int(np.searchsorted(hashes, np.uint64(min(end, self._hi) - 1), "right"))
        if cut > begin:
            out.append(rows.take(slice(begin, cut)))
        self._rest = rows.take(slice(cut, None)) if cut < len(hashes) else None


def _boundaries(cursors: Sequence[_Cursor], size: int, range_: HashRange) -> Iterator[int]:
    """Yield the exclusive ends of hash intervals with about `size` bytes of rows each."""
    fences = [cursor.section.first[cursor.block : cursor.stop] for cursor in cursors]
    sizes = []
    for cursor in cursors:
        rows = np.diff(cursor.section.starts)[cursor.block : cursor.stop]
        # Compressed blocks are shorter than their rows; words alone would ignore long values.
        words = rows * (8 * cursor.section.layout.width)
        sizes.append(np.maximum(words, 2 * cursor.section.sizes[cursor.block : cursor.stop] * _has_heap(cursor)))
    for fence in cut_evenly(fences, sizes, max(size, _MIN_INTERVAL_BYTES)):
        if fence > range_.lo:
            yield fence
    yield range_.hi


def _has_heap(cursor: _Cursor) -> int:
    return 1 if cursor.section.layout.bytes_columns else 0


def in_hash_order(chunks: Sequence[Rows], layout: RowLayout) -> Rows:
    """Merge chunks in hash order, equal hashes in chunk order, with one compact heap."""
    hashes = np.concatenate([chunk.words[:, HASH] for chunk in chunks])
    # Rows may be in order already, as when all of them have one key.
    if not layout.bytes_columns and (hashes[:-1] <= hashes[1:]).all():
        return Rows(np.concatenate([chunk.words for chunk in chunks]), np.empty(0, np.uint8))
    row_addresses, heap_addresses = [], []
    for chunk in chunks:
        rows_at, heaps_at = addresses(chunk.words, chunk.heap)
        row_addresses.append(rows_at)
        heap_addresses.append(heaps_at)
    _, order = order_by_hash(hashes)
    rows_at, heaps_at = np.concatenate(row_addresses)[order], np.concatenate(heap_addresses)[order]
    return Rows(*gather_rows(rows_at, heaps_at, layout.width, kernel_layout(layout).blobs))


def largest_hash_bytes(files: Sequence[AppendFile]) -> int:
    """Estimate the bytes of the largest single hash, from whole blocks: these rows have to be read together."""
    fences, sizes = [], []
    for file in files:
        for section in file.sections:
            same = np.flatnonzero(section.first[:-1] == section.first[1:])
            fences.append(section.first[same])
            sizes.append(np.diff(section.starts)[same] * (8 * section.layout.width) + section.sizes[same])
    if not fences or not any(map(len, fences)):
        return 0
    _, group = np.unique(np.concatenate(fences), return_inverse=True)
    return int(np.bincount(group, np.concatenate(sizes)).max())

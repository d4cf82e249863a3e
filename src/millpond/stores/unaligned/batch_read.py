"""Batch reads from the log of the unaligned append store: one index scan finds the lists of many windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.errors import StateDamagedError
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import addresses, gather_to, heap_bytes
from millpond.kernels.unaligned import stat_table as kernels
from millpond.layout import RowLayout, Rows
from millpond.stores.append_files import SectionBlocks
from millpond.stores.unaligned.compaction import blocks_of, rows_between
from millpond.stores.unaligned.log import WindowLog
from millpond.stores.unaligned.segment import TIME_BITS, Segment, read_entries
from millpond.stores.unaligned.stat_table import WindowStat

_BLOCKS_PER_PART = 32  # blocks of data copied at a time


class _RowRanges(NamedTuple):
    """Ranges of a segment's rows: their starts, their numbers of rows, and the positions to copy them to."""

    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    targets: NDArray[np.int64]


class BatchRead:
    """One read of the rows of windows.

    The same scan finds outdated rows. If there are too many of them, the whole indexes are read, and a compaction
    begins.

    Args:
        log: the segments. stat: the open windows. layout: of the rows.

    Attributes:
        bytes: bytes read.
    """

    def __init__(self, log: WindowLog, stat: WindowStat, layout: RowLayout) -> None:
        self._log = log
        self._stat = stat
        self._layout = layout
        self._compacting = log.compaction_due
        self._alive: dict[int, list[tuple[NDArray[np.uint8], int]]] = {segment.seq: [] for segment in log.segments}
        self.bytes = 0

    def rows(self, ids: NDArray[np.uint64]) -> tuple[Rows, NDArray[np.int64]]:
        """Read the rows of windows, each once.

        Returns:
            The rows, list after list; and the position at which each list begins.

        Raises:
            StateDamagedError: the indexes do not name all rows of a window.
        """
        table = self._stat.table
        sizes = np.empty(len(ids), np.int64)
        latest = kernels.mark_loading(table, ids, sizes)
        offsets = np.cumsum(sizes) - sizes
        words = np.empty((int(sizes.sum()), self._layout.width), np.uint64)
        heap = _GrowingHeap()
        fill = offsets.copy()
        try:
            for segment, found in self._scan(int(latest), fill):
                self._fetch(segment, found, words, heap)
        except BaseException:
            # `mark_loading` has marked the windows as being loaded, which is undone so that they can be read again.
            kernels.set_chunk(table, ids, offsets, kernels.NOWHERE)
            raise
        if (fill != offsets + sizes).any():
            kernels.set_chunk(table, ids, offsets, kernels.NOWHERE)
            raise StateDamagedError(
                "The index of the log does not name all rows of a window.",
                action="Restart from an older checkpoint.",
                file=self._log.place,
            )
        return Rows(words, heap.data[: heap.used]), offsets

    def compact(self) -> None:
        """Begin a compaction, if one is due."""
        if self._compacting:
            self._log.compact(self._alive)

    def _scan(self, latest: int, fill: NDArray[np.int64]) -> Iterator[tuple[Segment, _RowRanges]]:
        """Scan the indexes for the rows of wanted windows, and for outdated rows in all blocks read."""
        by_file = {id(segment.file): segment for segment in self._log.segments}
        until = None if self._compacting else (latest << TIME_BITS) | ((1 << TIME_BITS) - 1)
        if self._compacting:
            for segment in self._log.segments:
                segment.outdated[:] = False
        for part, (blocks, entries, bounds) in read_entries(self._log.files, self._log.segments, until):
            segment = by_file[id(part.file)]
            self.bytes += sum(size for _, size in part.file.ranges(part.section, part.blocks))
            bits = np.empty(len(entries), np.uint8)
            alive = np.empty(len(blocks), np.int64)
            out = [np.empty(len(entries), np.int64) for _ in range(3)]
            count = kernels.scan(self._stat.table, entries, bounds, segment.seq, fill, alive, bits, *out)
            segment.outdated[blocks] = alive == 0
            if self._compacting:
                self._alive[segment.seq].append((bits, int(alive.sum())))
            if count:
                yield segment, _RowRanges(*(column[:count] for column in out))

    def _fetch(self, segment: Segment, found: _RowRanges, words: NDArray[np.uint64], heap: _GrowingHeap) -> None:
        """Copy ranges of a segment's rows to their positions in the result."""
        blobs = kernel_layout(self._layout).blobs
        blocks = blocks_of(segment.data, found.starts, found.counts)
        self.bytes += int(segment.data.sizes[blocks].sum())
        parts = [
            SectionBlocks(segment.file, segment.data, blocks[i : i + _BLOCKS_PER_PART])
            for i in range(0, len(blocks), _BLOCKS_PER_PART)
        ]
        for part, pieces in zip(parts, self._log.files.read_ahead(parts), strict=True):
            for block, rows in zip(part.blocks.tolist(), pieces, strict=True):
                low, high = int(segment.data.starts[block]), int(segment.data.starts[block + 1])
                picked, targets = rows_between(*found, low, high)
                rows_at, heaps_at = addresses(rows.words, rows.heap)
                rows_at = rows_at[picked]
                if len(blobs):
                    heap.reserve(int(heap_bytes(rows_at, len(rows_at), blobs)))
                target = (address(words), address(heap.data), heap.used)
                heap.used = gather_to(rows_at, heaps_at, targets, len(picked), words.shape[1], blobs, *target)


class _GrowingHeap:
    """A growing buffer of long values."""

    def __init__(self) -> None:
        self.data = np.empty(0, np.uint8)
        self.used = 0

    def reserve(self, more: int) -> None:
        """Make room for `more` additional bytes."""
        if self.used + more > len(self.data):
            grown = np.empty(max(self.used + more, 2 * len(self.data)), np.uint8)
            grown[: self.used] = self.data[: self.used]
            self.data = grown

"""Compaction of the unaligned append store's log: rewriting segments without outdated rows (FlowKV §4.2).

An index scan for a predictive batch read has already found the entries of open windows. Compaction copies their rows in
the order of the old entries, which is one sequential pass over each segment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.append_file import AppendFile, AppendFileWriter, Section
from millpond.files.formats.blocks import kernel_layout
from millpond.files.refs import RunRef
from millpond.kernels.memory import HALF, LOW_HALF
from millpond.kernels.runs.gather import addresses, gather_rows, spread_ranges
from millpond.layout import META, NULLS, RowLayout, Rows, Words
from millpond.stores.append_files import AppendFiles
from millpond.stores.runs.cuts import cut_evenly
from millpond.stores.runs.pace import Pace
from millpond.stores.unaligned.segment import ENTRY, fill_index

MAX_SEGMENT_ROWS = int(LOW_HALF)
"""Maximum number of rows of a segment: an index entry holds the first row of its window in 32 bits."""


class CompactionInput(NamedTuple):
    """A segment to compact: a flag for each index entry whether it stays, and the number of rows that stay."""

    file: AppendFile
    alive: NDArray[np.uint8]
    rows: int


def compact(
    store: AppendFiles, inputs: Sequence[CompactionInput], layout: RowLayout, directory: str, piece: int, pace: Pace
) -> tuple[RunRef, AppendFile]:
    """Merge segments, oldest first, into one, whose list of taken windows is empty.

    Args:
        store: reads and writes segments. layout: of the rows.
        directory: directory for a temporary file. piece: bytes copied at once, roughly.
        pace: throttles the work.
    """
    total = sum(source.rows for source in inputs)
    assert total <= MAX_SEGMENT_ROWS, f"a compaction of {total} rows, more than a segment can have"
    # The index follows the rows in the file and may exceed memory, so its entries wait in a temporary file.
    with tempfile.TemporaryFile(dir=directory) as index:

        def fill(writer: AppendFileWriter) -> None:
            writer.begin(layout)
            written = 0
            for rows, entries in pace.throttle(_pieces(inputs, layout, piece)):
                counts = (entries[:, NULLS] & LOW_HALF).astype(np.int64)
                begins = written + np.cumsum(counts) - counts
                entries[:, NULLS] = begins.astype(np.uint64) << HALF | counts.astype(np.uint64)
                index.write(entries.data)
                writer.add(rows, np.repeat(entries[:, META], counts))
                written += rows.count
            index.flush()
            size = index.tell()
            words = np.empty((0, ENTRY.width), np.uint64)
            if size:
                words = np.memmap(index, np.uint64, "r", shape=(size // 24, 3))
            fill_index(writer, words, np.empty(0, np.uint64))

        return store.write(fill, [layout, ENTRY], total)


def _pieces(inputs: Sequence[CompactionInput], layout: RowLayout, piece: int) -> Iterator[tuple[Rows, Words]]:
    """Yield rows and their entries, one interval of the time axis at a time."""
    cursors = [_Cursor(source, layout) for source in inputs]
    for end in _boundaries([source.file.sections[0] for source in inputs], piece):
        entries, row_addresses, heap_addresses, pins = [], [], [], []
        for cursor in cursors:
            chosen = cursor.take_until(end)
            if len(chosen):
                rows_at, heaps_at, pin = cursor.rows(chosen)
                entries.append(chosen)
                row_addresses.append(rows_at)
                heap_addresses.append(heaps_at)
                pins.append(pin)
        if not entries:
            continue
        words = np.concatenate(entries)
        counts = (words[:, NULLS] & LOW_HALF).astype(np.int64)
        order = np.argsort(words[:, META], kind="stable")
        begins = np.cumsum(counts) - counts
        row_order = np.repeat(begins[order] - (np.cumsum(counts[order]) - counts[order]), counts[order])
        row_order += np.arange(len(row_order))
        rows = gather_rows(
            np.concatenate(row_addresses)[row_order],
            np.concatenate(heap_addresses)[row_order],
            layout.width,
            kernel_layout(layout).blobs,
        )
        yield Rows(*rows), words[order]


class _Cursor:
    """Read position in one input, in the order of its time axis."""

    def __init__(self, source: CompactionInput, layout: RowLayout) -> None:
        self._file = source.file
        self._data, self._index = source.file.sections[:2]
        self._alive = source.alive
        self._layout = layout
        self._at = 0  # block of the index
        self._seen = 0  # entries before it
        self._rest: Words = np.empty((0, ENTRY.width), np.uint64)

    def take_until(self, end: int) -> Words:
        """Take the entries that stay, below a place on the axis."""
        last = int(np.searchsorted(self._index.first, np.uint64(end - 1), "right"))
        parts = [self._rest]
        if self._at < last:
            for block in self._file.read(self._index, np.arange(self._at, last)):
                kept = self._alive[self._seen : self._seen + block.count].astype(np.bool_)
                self._seen += block.count
                parts.append(block.words[kept])
            self._at = last
        words = np.concatenate(parts)
        cut = int(np.searchsorted(words[:, META], np.uint64(end - 1), "right"))
        self._rest = words[cut:]
        return words[:cut]

    def rows(self, entries: Words) -> tuple[NDArray[np.uint64], NDArray[np.uint64], list[Rows]]:
        """Return the addresses of the entries' rows and of their heaps, and the rows that keep them alive."""
        starts = (entries[:, NULLS] >> HALF).astype(np.int64)
        counts = (entries[:, NULLS] & LOW_HALF).astype(np.int64)
        blocks = blocks_of(self._data, starts, counts)
        total = int(counts.sum())
        rows_at, heaps_at = np.empty(total, np.uint64), np.empty(total, np.uint64)
        dests = np.cumsum(counts) - counts
        pins = self._file.read(self._data, blocks)
        for block, rows in zip(blocks.tolist(), pins, strict=True):
            low, high = int(self._data.starts[block]), int(self._data.starts[block + 1])
            picked, targets = rows_between(starts, counts, dests, low, high)
            words_at, heap_at = addresses(rows.words, rows.heap)
            rows_at[targets] = words_at[picked]
            heaps_at[targets] = heap_at[: len(picked)]
        return rows_at, heaps_at, pins


def blocks_of(section: Section, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the blocks that hold ranges of rows, ascending."""
    if not len(starts):
        return np.empty(0, np.int64)
    first = np.searchsorted(section.starts, starts, "right") - 1
    last = np.searchsorted(section.starts, starts + counts - 1, "right") - 1
    marks = np.zeros(section.count + 1, np.int64)
    np.add.at(marks, first, 1)
    np.add.at(marks, last + 1, -1)
    return np.flatnonzero(np.cumsum(marks)[:-1] > 0)


def rows_between(
    starts: NDArray[np.int64], counts: NDArray[np.int64], dests: NDArray[np.int64], low: int, high: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Select the rows from `low` to `high` of ascending, disjoint ranges.

    Returns:
        Positions of the rows counted from `low`; and the position that each is copied to.
    """
    begin = max(0, int(np.searchsorted(starts, low, "right")) - 1)
    picked, targets = np.empty(high - low, np.int64), np.empty(high - low, np.int64)
    count = spread_ranges(starts, counts, dests, begin, low, high, picked, targets)
    return picked[:count], targets[:count]


def _boundaries(data: Sequence[Section], piece: int) -> Iterator[int]:
    sizes = [np.maximum(np.diff(s.starts) * 8 * s.layout.width, s.sizes) for s in data]
    for fence in cut_evenly([section.first for section in data], sizes, piece):
        if fence > 0:
            yield fence
    yield 1 << 64

"""Parts of an ordered table: immutable rows ordered by (hash, time, number), in memory or in a run file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import BlockSource, KernelLayout, rows_per_block
from millpond.files.refs import RunRef
from millpond.kernels.ordered import order as ordered
from millpond.kernels.ordered import scan as ordered_scan
from millpond.kernels.ordered.order import MATCHED, Pairs, PartBlocks
from millpond.kernels.pointers import address, data_of
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, META, NEVER, HashRange, Rows
from millpond.stores.ordered.expiry_index import ExpiryIndex, ExpiryIndexBuilder
from millpond.stores.ordered.layout import OrderedLayout
from millpond.stores.runs.run import Run

BEGINNING = -(1 << 63)
"""Earlier than every time."""

_SAMPLE_ROWS = 256  # rows whose times estimate how many rows have expired
_BLOCKS_PER_STEP = 256
"""Blocks of a file that are read at a time."""
_MAX_STAMP = (1 << 48) - 1  # in references: also of rows without time
_PIECE_ROWS = 65536  # rows in a piece of a scan
_NO_MARKS: NDArray[np.uint64] = np.empty(0, np.uint64)


class Blocks(NamedTuple):
    """Blocks of a part, in order (see `PartBlocks`); `pins` keeps them alive."""

    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]
    starts: NDArray[np.int64]
    bases: NDArray[np.int64]
    fence: NDArray[np.uint64]
    pins: Any


class Part:
    """Immutable rows ordered by (hash, time, number), each of which can be marked as matched.

    Args:
        layout: of the rows.
        rows: the rows, in memory.
        upto: the version whose state includes all these rows.

    Attributes:
        range: the hash range of rows that count. count: number of rows.
        oldest, newest: bounds of the rows' times, ignoring rows without time; timeless: whether there are such rows.
            In files, rows after the year 10889 count as rows without time, too, and `newest` is no bound for them.
        run: the file, once written; file: the future of a file being written.
        marks: a bit for each matched row that does not carry the flag itself; None while no bit is set.
        marked: number of set bits in `marks`.
        lookups: number of keys looked up in the file during this batch.
    """

    def __init__(self, layout: OrderedLayout, rows: Rows, upto: int) -> None:
        self.layout = layout
        self.upto = upto
        self.lookups = 0
        self.range = HashRange()
        self.count = rows.count
        self.rows: Rows | None = rows
        self.run: Run | None = None
        self.file: Future[Run] | None = None
        self.marks: NDArray[np.uint64] | None = None
        self.marked = 0
        self._expiry_index: ExpiryIndex | None = None
        times = layout.times(rows)
        timed = times[times != NEVER] if self.count else times
        self.timeless = len(timed) < self.count
        self.oldest = int(timed.min()) if len(timed) else NEVER
        self.newest = int(timed.max()) if len(timed) else BEGINNING
        sample = times[:: max(1, self.count // _SAMPLE_ROWS)]
        self._sample: NDArray[np.int64] | None = np.sort(sample)

    @classmethod
    def of_run(cls, layout: OrderedLayout, run: Run, upto: int) -> Part:
        """Open a part on a file, of which only the footer was read."""
        # `__init__` derives bounds from the rows; those of a file are in its reference, so no block is read.
        part = cls.__new__(cls)
        assert run.ref is not None
        part.layout, part.upto, part.range = layout, upto, run.range
        part.count, part.rows, part.run, part.file, part.marks = run.rows, None, run, None, None
        part.lookups = part.marked = 0
        part._expiry_index = None
        # References have times in milliseconds, clipped to the range from 0 to `_MAX_STAMP` (the year 10889).
        part.timeless = run.ref.newest == _MAX_STAMP
        # 0 also stands for all earlier times. Milliseconds are rounded down, so `newest` is rounded up again.
        part.oldest = run.ref.oldest * 1000 if run.ref.oldest else BEGINNING
        part.newest = run.ref.newest * 1000 + 999
        part._sample = None
        return part

    @property
    def ref(self) -> RunRef | None:
        """Reference of the part's file, once it is written."""
        return None if self.run is None else self.run.ref

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        held = 0 if self.marks is None else self.marks.nbytes
        held += 0 if self._expiry_index is None else self._expiry_index.memory
        if self.rows is not None:
            return held + self.rows.words.nbytes + self.rows.heap.nbytes
        return held + (0 if self.run is None else self.run.memory)

    @property
    def bytes(self) -> int:
        """Bytes of the rows, in memory or in the file (see `Run.bytes`)."""
        if self.rows is not None:
            return self.rows.words.nbytes + self.rows.heap.nbytes
        assert self.run is not None
        return self.run.bytes

    def adopt_file(self, run: Run) -> None:
        """Release the rows in memory: the file holds them now."""
        self.run, self.file, self.rows = run, None, None

    def is_expired(self, expired: int) -> bool:
        """Return whether all rows are expired."""
        return self.newest <= expired and not self.timeless

    def expired_share(self, expired: int) -> float:
        """Estimate the share of rows with a time up to `expired`."""
        if self.oldest > expired:
            return 0.0
        if self._sample is not None:
            return float(np.searchsorted(self._sample, expired, "right")) / max(1, len(self._sample))
        if self.timeless or self.oldest == BEGINNING:
            return 0.0
        return min(1.0, (expired - self.oldest) / max(1, self.newest - self.oldest))

    def bits(self) -> NDArray[np.uint64]:
        """Return the marks, creating them if needed."""
        if self.marks is None:
            # Positions count all rows of the file, also those of other partitions.
            rows = self.count if self.rows is not None else self.source.index.rows
            self.marks = np.zeros(-(-rows // 64), np.uint64)
        return self.marks

    def flag_matched_rows(self) -> None:
        """Move the marks into the flags of the rows in memory; no other thread may be writing these rows to a file."""
        if self.marks is not None and self.rows is not None:
            ordered_scan.set_deleted(address(self.rows.words), self.count, self.layout.stride, self.marks)
            self.marks, self.marked = None, 0

    # Reading

    def blocks(self, wanted: NDArray[np.int64] | None = None) -> Blocks:
        """Return the addresses of the wanted blocks, or of all."""
        if self.rows is not None:
            words = self.rows.words
            words_at = np.array([address(words)], np.uint64)
            return Blocks(
                words_at[: min(1, self.count)],
                np.array([address(self.rows.heap)], np.uint64),
                np.array([0, self.count] if self.count else [0], np.int64),
                np.zeros(1, np.int64),
                words[:1, HASH].copy(),
                self.rows,
            )
        index = self.source.index
        if wanted is None:
            wanted = np.arange(index.count)
        table = self.source.blocks(wanted)
        bases = index.starts[wanted]
        starts = np.zeros(len(wanted) + 1, np.int64)
        np.cumsum(index.starts[wanted + 1] - bases, out=starts[1:])
        return Blocks(
            table.words_at[wanted], table.heap_at[wanted], starts, bases, index.fence[wanted], (table.pins, self)
        )

    @property
    def source(self) -> BlockSource:
        """Source of the file's blocks."""
        assert self.run is not None
        return self.run.source

    def density(self) -> float:
        """Return the number of rows per unit of hash, 0 for a file."""
        if self.rows is None or self.count < 2:
            return 0.0
        return ordered.density_of(self.count, self.rows.words[0, HASH], self.rows.words[-1, HASH])

    def chunks(self) -> Iterator[tuple[Rows, int]]:
        """Yield all rows in order, in pieces, each with the position of its first row; pieces are views if possible."""
        if self.rows is not None:
            for start in range(0, self.count, _PIECE_ROWS):
                yield self.rows.take(slice(start, start + _PIECE_ROWS)), start
            return
        layout = self.layout
        step = max(1, _PIECE_ROWS // rows_per_block(layout.rows))
        for begin in range(0, self.source.index.count, step):
            wanted = np.arange(begin, min(begin + step, self.source.index.count))
            blocks = self.blocks(wanted)
            yield (
                Rows(*gather_rows(*row_addresses(blocks, layout.stride), layout.rows.width, layout.shape.blobs)),
                int(blocks.bases[0]),
            )

    def match(
        self,
        probes: Rows,
        shape: KernelLayout,
        lo: NDArray[np.int64],
        hi: NDArray[np.int64],
        room: int,
    ) -> Iterator[Pairs]:
        """Pair probes with the rows that have the same key and a time in the probe's interval.

        Args:
            probes: rows in hash order with the part's key columns.
            shape: of the probes.
            lo, hi: the interval of each probe, both ends included; empty if `lo` > `hi`.
            room: pairs in a piece, at most.
        """
        if not probes.count or not self.count:
            return
        words = probes.packed().words
        layout = self.layout
        out = Pairs(
            np.empty(room, np.int64), np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(room, np.int64)
        )
        for begin, end, blocks in self._candidate_ranges(probes.word(HASH)):
            state = np.array([0, 0, 0, -1, 0], np.int64)
            where = (data_of(words[begin:]), data_of(probes.heap), words.strides[0], shape.key_start, end - begin)
            part = PartBlocks(*blocks[:5])
            while True:
                count = ordered.match(
                    *where, lo[begin:end], hi[begin:end], part, layout.places, self.density(), state, out
                )
                if count:
                    selected = slice(count)
                    probes_found = out.probes[selected] + begin
                    yield Pairs(probes_found, out.rows_at[selected], out.heaps_at[selected], out.positions[selected])
                if count < room:
                    break

    def _candidate_ranges(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, Blocks]]:
        """Yield ranges (from, to) of the hashes with the blocks that may hold them."""
        if self.rows is not None:
            yield 0, len(hashes), self.blocks()
            return
        for begin, end, wanted in self._block_numbers(hashes):
            self.lookups += end - begin
            yield begin, end, self.blocks(wanted)

    def candidate_blocks(self, hashes: NDArray[np.uint64], max_blocks: int) -> NDArray[np.int64]:
        """Return the numbers of up to `max_blocks` blocks of the file that may hold rows of the hashes (ascending)."""
        run = self.run
        if run is None or not run.source.index.count or not len(hashes):
            return np.empty(0, np.int64)
        numbers: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for _, _, wanted in self._block_numbers(hashes):
            numbers.append(wanted)
            if sum(map(len, numbers)) >= max_blocks:
                break
        return np.unique(np.concatenate(numbers))[:max_blocks]

    def preload_blocks(self, wanted: NDArray[np.int64]) -> None:
        """Read blocks of the file into the block cache or the page cache. Thread-safe."""
        run = self.run
        if run is None:
            return
        run.source.blocks(wanted)
        for neighbours in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            run.source.prefetch_blocks(int(neighbours[0]), int(neighbours[-1]) + 1)

    @property
    def remote(self) -> bool:
        """Whether the part's blocks are read by remote requests."""
        return self.run is not None and self.run.remote

    def _block_numbers(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Yield ranges (from, to) of the hashes with the numbers of the blocks that may hold them, piece by piece."""
        index = self.source.index
        lowest, highest = max(int(index.fence[0]), self.range.lo), min(index.highest, self.range.hi - 1)
        begin = int(np.searchsorted(hashes, np.uint64(lowest), "left"))
        end = max(begin, int(np.searchsorted(hashes, np.uint64(highest), "right")))
        first = np.maximum(np.searchsorted(index.fence, hashes[begin:end], "left") - 1, 0)
        last = np.maximum(np.searchsorted(index.fence, hashes[begin:end], "right") - 1, first)
        position = 0
        while position < end - begin:
            stop = int(np.searchsorted(first, first[position] + _BLOCKS_PER_STEP, "left"))
            # Count the hashes of each block by differences: the block ranges of several hashes may overlap.
            spread = np.zeros(int(last[stop - 1] - first[position]) + 2, np.int64)
            np.add.at(spread, first[position:stop] - first[position], 1)
            np.add.at(spread, last[position:stop] - first[position] + 1, -1)
            yield begin + position, begin + stop, np.flatnonzero(np.cumsum(spread) > 0) + first[position]
            position = stop

    def unmatched_rows(self, after: int, until: int, max_indexed: int) -> Iterator[Rows]:
        """Yield the rows with a time in (`after`, `until`] that were never matched, in pieces.

        A first call scans the part, and indexes the rows that expire next. Later calls then read only expired rows.

        Args:
            after, until: the interval of times; rows without time are never in it.
            max_indexed: rows in the index, at most; after these have expired, the part is scanned again.
        """
        # Reopened files with rows without time do not know how late their other rows are, so they are scanned once.
        known = self.rows is not None or not self.timeless
        if after >= until or self.oldest > until or (known and self.newest <= after):
            return
        if self._expiry_index is None or not self._expiry_index.covers(after, until):
            yield from self._scan_unmatched(after, until, max_indexed)
            return
        # Rows may have been matched since the scan. Their marks may have moved into their flags.
        positions = self._expiry_index.between(after, until)
        if self.marks is not None:
            marked = self.marks[positions >> 6] >> (positions & 63).astype(np.uint64) & np.uint64(1)
            positions = positions[marked == 0]
        for rows in self.rows_at_positions(positions):
            unmatched = rows.words[:, META] & np.uint64(MATCHED) == 0
            if unmatched.any():
                yield rows if unmatched.all() else rows.take(unmatched)

    def _scan_unmatched(self, after: int, until: int, max_indexed: int) -> Iterator[Rows]:
        """See `unmatched_rows`: scan the part, and index its unmatched rows with later times."""
        layout, marks = self.layout, _NO_MARKS if self.marks is None else self.marks
        index = ExpiryIndexBuilder(until, max_indexed)
        positions = np.empty(_PIECE_ROWS, np.int64)
        for rows, base in self.chunks():
            words = rows.packed().words
            if len(words) > len(positions):
                positions = np.empty(len(words), np.int64)
            count = ordered_scan.unmatched_between(
                address(words), len(words), layout.stride, layout.time, marks, base, after, index.until,
                self.range.lo, self.range.hi - 1, positions,
            )  # fmt: skip
            selected = positions[:count]
            times = words[selected, layout.time].view(np.int64)
            expired = selected[times <= until]
            index.add(times[times > until], selected[times > until] + base)
            if len(expired):
                rows_at, heaps_at = addresses(words, rows.heap)
                yield Rows(*gather_rows(rows_at[expired], heaps_at[expired], layout.rows.width, layout.shape.blobs))
        self._expiry_index = index.build()

    def rows_at_positions(self, positions: NDArray[np.int64]) -> Iterator[Rows]:
        """Yield the rows at the positions (ascending), in pieces."""
        layout = self.layout
        for start in range(0, len(positions), _PIECE_ROWS):
            chosen = positions[start : start + _PIECE_ROWS]
            if self.rows is not None:
                rows_at = np.uint64(address(self.rows.words)) + chosen.astype(np.uint64) * np.uint64(layout.stride)
                heaps_at = np.full(len(chosen), address(self.rows.heap), np.uint64)
                yield Rows(*gather_rows(rows_at, heaps_at, layout.rows.width, layout.shape.blobs))
                continue
            number = np.searchsorted(self.source.index.starts, chosen, "right") - 1
            cuts = [0, *(np.flatnonzero(np.diff(number // _BLOCKS_PER_STEP)) + 1).tolist(), len(chosen)]
            for begin, end in pairwise(cuts):
                wanted, inverse = np.unique(number[begin:end], return_inverse=True)
                blocks = self.blocks(wanted)
                inside = (chosen[begin:end] - blocks.bases[inverse]).astype(np.uint64)
                rows_at = blocks.words_at[inverse] + inside * np.uint64(layout.stride)
                yield Rows(*gather_rows(rows_at, blocks.heap_at[inverse], layout.rows.width, layout.shape.blobs))

    def mark_named(
        self, hashes: NDArray[np.uint64], times: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Mark the rows with these names (sorted) as matched.

        Returns:
            Positions of the names that the part does not have.
        """
        if not self.count or not len(hashes):
            return np.arange(len(hashes))
        layout, lost = self.layout, []
        inside_from, inside_to = len(hashes), 0
        for begin, end, blocks in self._candidate_ranges(hashes):
            inside_from, inside_to = min(inside_from, begin), max(inside_to, end)
            missing = np.empty(end - begin, np.int64)
            count = ordered.mark_named(
                hashes[begin:end], times[begin:end], numbers[begin:end], end - begin, blocks.words_at, blocks.starts,
                blocks.bases, blocks.fence, layout.stride, layout.time, layout.number, self.density(), self.bits(),
                missing,
            )  # fmt: skip
            lost.append(missing[:count] + begin)
        # Counted again, because some of the rows may have been marked before.
        self.marked = 0 if self.marks is None else int(np.bitwise_count(self.marks).sum())
        return np.concatenate([np.arange(inside_from), *lost, np.arange(max(inside_to, inside_from), len(hashes))])


def row_addresses(blocks: Blocks, stride: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the address of every row of the blocks, and the address of its heap."""
    counts = np.diff(blocks.starts)
    number = np.repeat(np.arange(len(counts)), counts)
    inside = (np.arange(blocks.starts[-1]) - blocks.starts[number]).astype(np.uint64)
    return blocks.words_at[number] + inside * np.uint64(stride), blocks.heap_at[number]

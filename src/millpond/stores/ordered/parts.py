"""Parts of an ordered table: immutable rows in the order of (hash, time, number), in memory or in a run file."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import BlockSource, Shape, rows_per_block
from millpond.files.refs import RunRef
from millpond.kernels.ordered import order as ordered
from millpond.kernels.ordered import scan as ordered_scan
from millpond.kernels.ordered.order import Pairs, PartBlocks
from millpond.kernels.pointers import address, data_of
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, NEVER, HashRange, Rows
from millpond.stores.ordered.layout import OrderedLayout
from millpond.stores.runs.run import Run

BEGINNING = -(1 << 63)
"""Earlier than every time."""

_SAMPLE = 256
_PART_BLOCKS = 256
"""Blocks of a file that are brought into memory at a time."""
_TOP_STAMP = (1 << 48) - 1
_PIECE = 65536
_NONE: NDArray[np.uint64] = np.empty(0, np.uint64)


class Blocks(NamedTuple):
    """Some blocks of a part, in order (see `PartBlocks`); `pins` keeps them alive."""

    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]
    starts: NDArray[np.int64]
    bases: NDArray[np.int64]
    fence: NDArray[np.uint64]
    pins: Any


class Part:
    """Immutable rows in the order of (hash, time, number), each of which may be marked as matched.

    Args:
        layout: of the rows.
        rows: the rows, in memory.
        upto: the version whose state has all these rows.

    Attributes:
        range: the hashes that count. count: rows.
        oldest, newest: bounds of their times, rows without time left out; timeless: whether there are such rows.
        run: the file, once written; file: the file on its way.
        marks: a bit for each row that was matched and does not say so itself; None as long as there is none.
        sought: how many keys were looked for in the file, in this batch.
    """

    def __init__(self, layout: OrderedLayout, rows: Rows, upto: int) -> None:
        self.layout = layout
        self.upto = upto
        self.sought = 0
        self.range = HashRange()
        self.count = rows.count
        self.rows: Rows | None = rows
        self.run: Run | None = None
        self.file: Future[Run] | None = None
        self.marks: NDArray[np.uint64] | None = None
        times = layout.times(rows)
        timed = times[times != NEVER] if self.count else times
        self.timeless = len(timed) < self.count
        self.oldest = int(timed.min()) if len(timed) else NEVER
        self.newest = int(timed.max()) if len(timed) else BEGINNING
        sample = times[:: max(1, self.count // _SAMPLE)]
        self._sample: NDArray[np.int64] | None = np.sort(sample)

    @classmethod
    def of_run(cls, layout: OrderedLayout, run: Run, upto: int) -> Part:
        """A part in a file, of which only the footer was read."""
        part = cls.__new__(cls)
        assert run.ref is not None
        part.layout, part.upto, part.range = layout, upto, run.range
        part.count, part.rows, part.run, part.file, part.marks = run.rows, None, run, None, None
        part.sought = 0
        part.timeless = run.ref.newest == _TOP_STAMP
        part.oldest = run.ref.oldest * 1000 if run.ref.oldest else BEGINNING
        part.newest = run.ref.newest * 1000 + 999
        part._sample = None
        return part

    @property
    def ref(self) -> RunRef | None:
        """The name of the part's file, if it is written."""
        return None if self.run is None else self.run.ref

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        held = 0 if self.marks is None else self.marks.nbytes
        if self.rows is not None:
            return held + self.rows.words.nbytes + self.rows.heap.nbytes
        return held + (0 if self.run is None else self.run.memory)

    @property
    def bytes(self) -> int:
        """Bytes of the rows, wherever they are."""
        if self.rows is not None:
            return self.rows.words.nbytes + self.rows.heap.nbytes
        assert self.ref is not None
        return self.ref.bytes

    def settle(self, run: Run) -> None:
        """Leave memory: the same rows are in a file now."""
        self.run, self.file, self.rows = run, None, None

    def dead(self, expired: int) -> bool:
        """Whether all rows are expired."""
        return self.newest <= expired and not self.timeless

    def expired_share(self, expired: int) -> float:
        """About how many of the rows have a time up to `expired`."""
        if self.oldest > expired:
            return 0.0
        if self._sample is not None:
            return float(np.searchsorted(self._sample, expired, "right")) / max(1, len(self._sample))
        if self.timeless or self.oldest == BEGINNING:
            return 0.0
        return min(1.0, (expired - self.oldest) / max(1, self.newest - self.oldest))

    def bits(self) -> NDArray[np.uint64]:
        """The marks, made if there were none."""
        if self.marks is None:
            rows = self.count if self.rows is not None else self.source.index.rows
            self.marks = np.zeros(-(-rows // 64), np.uint64)
        return self.marks

    def burn(self) -> None:
        """Have the rows in memory themselves say that they were matched; nobody may be writing them."""
        if self.marks is not None and self.rows is not None:
            ordered_scan.burn(address(self.rows.words), self.count, self.layout.stride, self.marks)
            self.marks = None

    # Reading

    def blocks(self, wanted: NDArray[np.int64] | None = None) -> Blocks:
        """Some blocks (all, if not given) with their addresses."""
        if self.rows is not None:
            words = self.rows.words
            one = np.array([address(words)], np.uint64)
            return Blocks(
                one[: min(1, self.count)],
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
        """The blocks of the file."""
        assert self.run is not None
        return self.run.source

    def density(self) -> float:
        """Rows a unit of hash."""
        if self.rows is None or self.count < 2:
            return 0.0
        return ordered.density_of(self.count, self.rows.words[0, HASH], self.rows.words[-1, HASH])

    def chunks(self) -> Iterator[tuple[Rows, int]]:
        """All rows in order, in pieces, each with the position of its first row; pieces are views where possible."""
        if self.rows is not None:
            for start in range(0, self.count, _PIECE):
                yield Rows(self.rows.words[start : start + _PIECE], self.rows.heap), start
            return
        layout = self.layout
        step = max(1, _PIECE // rows_per_block(layout.rows))
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
        shape: Shape,
        lo: NDArray[np.int64],
        hi: NDArray[np.int64],
        room: int,
    ) -> Iterator[Pairs]:
        """Pair probes with the rows that have their key and a time in their interval.

        Args:
            probes: rows in hash order whose key columns are those of the part.
            shape: of the probes.
            lo, hi: the interval of each probe, both ends included; no time if `lo` > `hi`.
            room: pairs in a piece, at most.
        """
        if not probes.count or not self.count:
            return
        words = np.ascontiguousarray(probes.words)
        layout = self.layout
        out = Pairs(
            np.empty(room, np.int64), np.empty(room, np.uint64), np.empty(room, np.uint64), np.empty(room, np.int64)
        )
        for begin, end, blocks in self._searched(np.ascontiguousarray(words[:, HASH])):
            state = np.array([0, 0, 0, -1, 0], np.int64)
            at = (data_of(words[begin:]), data_of(probes.heap), words.strides[0], shape.key_start, end - begin)
            part = PartBlocks(*blocks[:5])
            while True:
                found = ordered.match(
                    *at, lo[begin:end], hi[begin:end], part, layout.places, self.density(), state, out
                )
                if found:
                    some = slice(found)
                    probes_found = out.probes[some] + begin
                    yield Pairs(probes_found, out.rows_at[some], out.heaps_at[some], out.positions[some])
                if found < room:
                    break

    def _searched(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, Blocks]]:
        """Hashes (from, to) with the blocks in which they may be."""
        if self.rows is not None:
            yield 0, len(hashes), self.blocks()
            return
        for begin, end, wanted in self._numbers(hashes):
            self.sought += end - begin
            yield begin, end, self.blocks(wanted)

    def near(self, hashes: NDArray[np.uint64], most: int) -> NDArray[np.int64]:
        """The numbers of up to so many blocks of the file in which rows of some hashes (in order) may be."""
        run = self.run
        if run is None or not run.source.index.count or not len(hashes):
            return np.empty(0, np.int64)
        found: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for _, _, wanted in self._numbers(hashes):
            found.append(wanted)
            if sum(map(len, found)) >= most:
                break
        return np.unique(np.concatenate(found))[:most]

    def bring(self, wanted: NDArray[np.int64]) -> None:
        """Have some blocks of the file read: into the cache of blocks, or the page cache. For any thread."""
        run = self.run
        if run is None:
            return
        run.source.blocks(wanted)
        for some in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            run.source.expect_blocks(int(some[0]), int(some[-1]) + 1)

    @property
    def far(self) -> bool:
        """Whether its blocks are brought by requests."""
        return self.run is not None and self.run.far

    def _numbers(self, hashes: NDArray[np.uint64]) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        """Hashes (from, to) with the numbers of the blocks in which they may be, some at a time."""
        index = self.source.index
        lowest, highest = max(int(index.fence[0]), self.range.lo), min(index.highest, self.range.hi - 1)
        begin = int(np.searchsorted(hashes, np.uint64(lowest), "left"))
        end = max(begin, int(np.searchsorted(hashes, np.uint64(highest), "right")))
        first = np.maximum(np.searchsorted(index.fence, hashes[begin:end], "left") - 1, 0)
        last = np.maximum(np.searchsorted(index.fence, hashes[begin:end], "right") - 1, first)
        at = 0
        while at < end - begin:
            stop = int(np.searchsorted(first, first[at] + _PART_BLOCKS, "left"))
            spread = np.zeros(int(last[stop - 1] - first[at]) + 2, np.int64)
            np.add.at(spread, first[at:stop] - first[at], 1)
            np.add.at(spread, last[at:stop] - first[at] + 1, -1)
            yield begin + at, begin + stop, np.flatnonzero(np.cumsum(spread) > 0) + first[at]
            at = stop

    def between(self, after: int, until: int, *, unmatched: bool) -> Iterator[Rows]:
        """Rows with a time in (`after`, `until`], perhaps only those that were not matched, in pieces."""
        if self.oldest > until or (self.newest <= after and not self.timeless):
            return
        layout, marks = self.layout, _NONE if self.marks is None else self.marks
        found = np.empty(_PIECE, np.int64)
        for rows, base in self.chunks():
            words = np.ascontiguousarray(rows.words)
            if len(words) > len(found):
                found = np.empty(len(words), np.int64)
            count = ordered_scan.between(
                address(words), len(words), layout.stride, layout.time, marks, base, after, until, unmatched,
                self.range.lo, self.range.hi - 1, found,
            )  # fmt: skip
            if count:
                rows_at, heaps_at = addresses(words, rows.heap)
                at = found[:count]
                yield Rows(*gather_rows(rows_at[at], heaps_at[at], layout.rows.width, layout.shape.blobs))

    def at(self, positions: NDArray[np.int64]) -> Iterator[Rows]:
        """The rows at some positions (ascending), in pieces."""
        layout = self.layout
        for start in range(0, len(positions), _PIECE):
            some = positions[start : start + _PIECE]
            if self.rows is not None:
                rows_at = np.uint64(address(self.rows.words)) + some.astype(np.uint64) * np.uint64(layout.stride)
                heaps_at = np.full(len(some), address(self.rows.heap), np.uint64)
                yield Rows(*gather_rows(rows_at, heaps_at, layout.rows.width, layout.shape.blobs))
                continue
            number = np.searchsorted(self.source.index.starts, some, "right") - 1
            cuts = [0, *(np.flatnonzero(np.diff(number // _PART_BLOCKS)) + 1).tolist(), len(some)]
            for begin, end in pairwise(cuts):
                wanted, inverse = np.unique(number[begin:end], return_inverse=True)
                blocks = self.blocks(wanted)
                inside = (some[begin:end] - blocks.bases[inverse]).astype(np.uint64)
                rows_at = blocks.words_at[inverse] + inside * np.uint64(layout.stride)
                yield Rows(*gather_rows(rows_at, blocks.heap_at[inverse], layout.rows.width, layout.shape.blobs))

    def mark_named(
        self, hashes: NDArray[np.uint64], times: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Mark rows by name (sorted); which of the names are not here."""
        if not self.count or not len(hashes):
            return np.arange(len(hashes))
        layout, lost = self.layout, []
        inside_from, inside_to = len(hashes), 0
        for begin, end, blocks in self._searched(hashes):
            inside_from, inside_to = min(inside_from, begin), max(inside_to, end)
            missing = np.empty(end - begin, np.int64)
            count = ordered.mark_named(
                hashes[begin:end], times[begin:end], numbers[begin:end], end - begin, blocks.words_at, blocks.starts,
                blocks.bases, blocks.fence, layout.stride, layout.time, layout.number, self.density(), self.bits(),
                missing,
            )  # fmt: skip
            lost.append(missing[:count] + begin)
        return np.concatenate([np.arange(inside_from), *lost, np.arange(max(inside_to, inside_from), len(hashes))])


def row_addresses(blocks: Blocks, stride: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The address of every row of some blocks, and of its heap."""
    counts = np.diff(blocks.starts)
    number = np.repeat(np.arange(len(counts)), counts)
    inside = (np.arange(blocks.starts[-1]) - blocks.starts[number]).astype(np.uint64)
    return blocks.words_at[number] + inside * np.uint64(stride), blocks.heap_at[number]

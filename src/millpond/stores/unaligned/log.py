"""The log of the unaligned append store: its segments from the write buffer on, through compaction, to the manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.errors import StateDamagedError, TransientError
from millpond.files.formats.append_file import AppendFile, AppendFileWriter
from millpond.files.formats.blocks import shape_of
from millpond.files.refs import RunRef, TableManifest
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.runs.sort import order_by_hash
from millpond.kernels.unaligned import stat_table as kernels
from millpond.layout import HASH, META, RowLayout, Rows
from millpond.stores.append_files import AppendFiles
from millpond.stores.jobs import CompactSegments, Elsewhere
from millpond.stores.runs.pace import Pace
from millpond.stores.unaligned.compaction import CompactionInput, compact
from millpond.stores.unaligned.segment import ENTRY, TIME_BITS, Covered, Segment, entries_in, fill_index, ids_in, places
from millpond.stores.unaligned.stat_table import PrefetchBuffer, WindowStat, WriteBuffer

_LEAST_OUTDATED = 1 << 16  # bytes of outdated rows that are worth a compaction

_MOST_SEGMENTS = 64  # from which the oldest are made one

_log = logging.getLogger(__name__)

Alive = Mapping[int, list[tuple[NDArray[np.uint8], int]]]
"""By a segment's number, for each part of its index: which entries are of open windows, and how many rows."""


class Workers(NamedTuple):
    """What works behind the batch's back: `compacting` compacts, `writing` makes segments durable.

    `elsewhere` has compactions done by others.
    """

    compacting: Executor
    writing: Executor
    elsewhere: Elsewhere | None = None


class WindowLog:
    """Segments of one table.

    Args:
        layout: of the rows. files: where segments are written.
        stat, prefetched: of the table; what the manifest's segments hold is noted there.
        workers: see there.
        directory: for temporary files. piece: bytes of what is worked on at once.
        maximum: the space amplification from which segments are compacted.
        manifest: what to open.

    Attributes:
        segments: oldest first. covered: what durable ones cover of the deltas.
        live: rows of open windows in segments. row_bytes: bytes of a row, about.
        compactions: how often segments were compacted.

    Raises:
        StateDamagedError: a segment is missing or damaged.
    """

    def __init__(
        self,
        layout: RowLayout,
        files: AppendFiles,
        stat: WindowStat,
        prefetched: PrefetchBuffer,
        workers: Workers,
        manifest: TableManifest,
        *,
        directory: str,
        piece: int,
        maximum: float,
    ) -> None:
        self._layout = layout
        self.files = files
        self._stat = stat
        self._prefetched = prefetched
        self._workers = workers
        self._directory = directory
        self._piece = piece
        self._maximum = maximum
        self.segments: list[Segment] = []
        self.covered = Covered(manifest.flushed, manifest.skip)
        self.row_bytes = 8 * layout.width
        self.compactions = 0
        self._next = 0  # number of the next segment
        self._dead: list[NDArray[np.uint64]] = []  # taken since the last segment, with rows in older ones
        self._pace = Pace()
        self._compacting: tuple[int, Future[tuple[RunRef, AppendFile]]] | None = None
        for ref in reversed(manifest.runs):
            self._open(ref)
        self.live = int(stat.table["rows"][stat.table["id"] != 0].sum())

    def _open(self, ref: RunRef) -> None:
        file = self.files.open(ref, [self._layout, ENTRY])
        if len(file.sections) != 3:
            raise StateDamagedError("A state file is damaged: it is not a segment.", file=file.data.place)
        segment = Segment(file, self._next, ref=ref, covered=self.covered)
        self._next += 1
        self.segments.append(segment)
        for ids in ids_in(self.files, segment):
            self._stat.remove(ids, self._prefetched.left)
        for _, entries in entries_in(self.files, [segment], None):
            self._stat.make_room(len(entries.words))
            words = entries.words[entries.words[:, HASH] != 0]
            ids = np.ascontiguousarray(words[:, HASH])
            times = (words[:, META] >> np.uint64(TIME_BITS)).astype(np.int64)
            self._stat.count += kernels.add_entries(self._stat.table, ids, places(words), times, segment.seq)

    @property
    def next(self) -> int:
        """The number of the next segment."""
        return self._next

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return sum(ids.nbytes for ids in self._dead) + sum(segment.file.memory for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.file.data.size for segment in self.segments)

    @property
    def rows(self) -> int:
        """Rows in segments, outdated ones included."""
        return sum(segment.rows for segment in self.segments)

    @property
    def place(self) -> str | None:
        """Where the newest segment is, for messages."""
        return self.segments[-1].file.data.place if self.segments else None

    def take(self, ids: NDArray[np.uint64], rows: NDArray[np.int32]) -> None:
        """Note that windows go which have so many rows in segments."""
        stored = rows > 0
        self.live -= int(rows.sum())
        if stored.any():
            self._dead.append(ids[stored])

    def write(self, buffer: WriteBuffer, covered: Covered) -> None:
        """Make a segment of the write buffer, which is empty then; with it, the log covers so much of the deltas."""
        stat = self._stat
        count = kernels.count_lists(stat.table)
        slots, axis = np.empty(count, np.int64), np.empty(count, np.uint64)
        kernels.list_slots(stat.table, slots, axis)
        axis, order = order_by_hash(axis)
        slots = slots[order]
        rows_at, row_axis = np.empty(buffer.rows, np.uint64), np.empty(buffer.rows, np.uint64)
        entries = np.empty((count, ENTRY.width), np.uint64)
        left = self._prefetched.left
        at = (address(buffer.words), self._layout.width, buffer.following)
        rows = kernels.unlist(stat.table, slots, axis, *at, left, rows_at, row_axis, entries)
        if not self._prefetched.sweep():
            self._prefetched.clear()
        dead = np.concatenate(self._dead) if self._dead else np.empty(0, np.uint64)
        if not rows and not len(dead) and all(segment.written is None for segment in self.segments):
            self.covered = covered  # what the deltas held has gone with the windows that it was of
            buffer.clear()
            return
        heap_at = np.uint64(address(buffer.heap))
        per_piece = max(1, self._piece // self.row_bytes)
        shape = shape_of(self._layout)

        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self._layout)
            for begin in range(0, rows, per_piece):
                picked = rows_at[begin : min(rows, begin + per_piece)]
                heaps_at = np.full(len(picked), heap_at, np.uint64)
                writer.add(Rows(*gather_rows(picked, heaps_at, shape.width, shape.blobs)), row_axis[begin:])
            fill_index(writer, entries, dead)

        staged = self.files.stage(fill, [self._layout, ENTRY], rows)
        written = self._workers.writing.submit(staged.publish)
        self.segments.append(Segment(staged.file, self._next, covered=covered, written=written))
        self._next += 1
        self.live += rows
        if rows:
            self.row_bytes = 8 * self._layout.width + buffer.heap_used // buffer.rows
        self._dead = []
        buffer.clear()

    def adopt(self) -> None:
        """Take over what has become durable, and what was compacted."""
        for segment in self.segments:
            if segment.written is None:
                continue
            if not segment.written.done():
                break
            segment.adopt()
            self.covered = segment.covered
        while (
            len(self.segments) > 1 and not self.segments[0].rows and self.segments[0].ref and self._compacting is None
        ):
            gone = self.segments.pop(0)  # it says which windows of older segments went, and there are none
            assert gone.ref is not None
            self.files.forget(gone.ref, gone.file)
        if self._compacting is not None and self._compacting[1].done():
            (count, future), self._compacting = self._compacting, None
            try:
                ref, file = future.result()
            except (TransientError, OSError) as error:
                _log.warning("Compacting %d segments failed and will be tried again: %s", count, error)
                return
            old, last = self.segments[:count], self.segments[count - 1]
            compacted = Segment(file, last.seq, ref=ref, covered=last.covered)
            self.segments[:count] = [compacted] if compacted.rows else []
            self.compactions += 1
            for segment in old:
                if segment.ref is not None:
                    self.files.forget(segment.ref, segment.file)

    @property
    def amplification(self) -> float:
        """Rows in segments per row of an open window; 1 while little is outdated, or it is being compacted."""
        total = self.rows
        outdated = (total - self.live) * self.row_bytes
        if self._compacting is not None or outdated < _LEAST_OUTDATED:
            return 1.0
        return total / max(1, self.live)

    @property
    def outgrown(self) -> bool:
        """Whether so much is outdated that the next scan of the indexes should lead to a compaction."""
        return self.amplification > self._maximum or self._many

    @property
    def far_outgrown(self) -> bool:
        """Whether that cannot wait for the next scan."""
        return self.amplification > self._maximum * 1.25 or self._many

    @property
    def _many(self) -> bool:
        return len(self.segments) > _MOST_SEGMENTS and self._compacting is None

    def compact(self, alive: Alive) -> None:
        """Begin to compact the oldest segments, as few as bring the amplification well below its maximum."""
        total = self.rows
        goal = (1 + (self._maximum - 1) / 2) * self.live
        inputs: list[CompactionInput] = []
        for segment in self.segments:
            few = len(self.segments) - len(inputs) <= _MOST_SEGMENTS // 2
            if segment.ref is None or (total <= goal and few):
                break
            bits = [bits for bits, _ in alive[segment.seq]]
            rows = sum(count for _, count in alive[segment.seq])
            inputs.append(CompactionInput(segment.file, np.concatenate(bits) if bits else np.empty(0, np.uint8), rows))
            total -= segment.rows - rows
        while inputs and not inputs[0].rows:
            gone = self.segments.pop(0)
            assert gone.ref is not None
            self.files.forget(gone.ref, gone.file)
            inputs.pop(0)
        if inputs:
            self._compacting = len(inputs), self._begin(inputs)

    def _begin(self, inputs: list[CompactionInput]) -> Future[tuple[RunRef, AppendFile]]:
        at = (self.files, inputs, self._layout, self._directory, self._piece, self._pace)
        old = self.segments[: len(inputs)]
        self._pace.hurry(self.amplification > 2 * self._maximum)

        def here() -> Future[tuple[RunRef, AppendFile]]:
            return self._workers.compacting.submit(compact, *at)

        def opened(refs: Sequence[RunRef]) -> tuple[RunRef, AppendFile]:
            (ref,) = refs
            return ref, self.files.open(ref, [self._layout, ENTRY])

        def job() -> CompactSegments:
            return CompactSegments(
                schema=self._layout.schema,
                inputs=tuple(segment.ref for segment in old if segment.ref is not None),
                alive=tuple(np.packbits(each.alive, bitorder="little").tobytes() for each in inputs),
                rows=tuple(each.rows for each in inputs),
                piece=self._piece,
            )

        elsewhere = self._workers.elsewhere
        return here() if elsewhere is None else elsewhere.submit(job, here, opened)

    def refs(self) -> tuple[RunRef, ...]:
        """The durable segments, newest first, up to the first that is not."""
        refs: list[RunRef] = []
        for segment in self.segments:
            if segment.ref is None:
                break
            refs.append(segment.ref)
        return tuple(refs[::-1])

    def close(self) -> None:
        """Let go of the segments."""
        self._pace.stop()
        if self._compacting is not None:
            self._compacting[1].cancel()
            self._compacting = None
        for segment in self.segments:
            if segment.written is not None:
                segment.written.cancel()
        self.segments = []  # their local copies stay, for who opens them next

"""The log of the unaligned append store: its segments, from the write buffer through compaction to the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from millpond.errors import StateDamagedError
from millpond.files.formats.append_file import AppendFile, AppendFileWriter
from millpond.files.formats.blocks import kernel_layout
from millpond.files.refs import RunRef, TableManifest
from millpond.kernels.memory import LOW_HALF
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.runs.sort import order_by_hash
from millpond.kernels.unaligned import stat_table as kernels
from millpond.layout import HASH, RowLayout, Rows
from millpond.stores.append_files import AppendFiles
from millpond.stores.jobs import CompactSegments
from millpond.stores.runs.background_merge import BackgroundMerge
from millpond.stores.runs.pace import Pace
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.compaction import MAX_SEGMENT_ROWS, CompactionInput, compact
from millpond.stores.unaligned.segment import (
    ENTRY,
    TIME_BITS,
    Covered,
    Segment,
    fill_index,
    read_entries,
    read_taken_ids,
)
from millpond.stores.unaligned.stat_table import PrefetchBuffer, WindowStat, WriteBuffer

_MIN_OUTDATED_BYTES = 1 << 16  # bytes of outdated rows from which a compaction pays

_COMPRESSION = 2  # bytes of rows per byte of their blocks, roughly

_MAX_SEGMENTS = 64  # number of segments from which the oldest are merged

LiveEntries = Mapping[int, list[tuple[NDArray[np.uint8], int]]]
"""For each segment number, the parts of its index: a flag for each entry of an open window, and the rows of these."""


class WindowLog:
    """The segments of one table.

    Args:
        layout: of the rows. files: writes and opens segments.
        stat, prefetched: of the table; the windows in the manifest's segments are added to `stat`.
        resources: threads for compactions and writes, and the budget that bounds temporaries.
        directory: directory for temporary files.
        maximum: space amplification from which segments are compacted.
        writable: whether segments may be written, and so compacted.
        manifest: the state to open.

    Attributes:
        segments: oldest first. covered: the part of the deltas that durable segments cover.
        live_rows: rows of open windows in segments. row_bytes: bytes of a row, roughly.
        compactions: number of compactions so far.

    Raises:
        StateDamagedError: a segment is missing or damaged.
    """

    def __init__(
        self,
        layout: RowLayout,
        files: AppendFiles,
        stat: WindowStat,
        prefetched: PrefetchBuffer,
        resources: TableResources,
        manifest: TableManifest,
        *,
        directory: str,
        maximum: float,
        writable: bool,
    ) -> None:
        self._layout = layout
        self.files = files
        self._stat = stat
        self._prefetched = prefetched
        self._resources = resources
        self._directory = directory
        self._piece = resources.budget.piece
        self._maximum = maximum
        self._writable = writable
        self.segments: list[Segment] = []
        self.covered = Covered(manifest.flushed, manifest.skip)
        self.row_bytes = 8 * layout.width
        self.compactions = 0
        self._next_seq = 0  # number of the next segment
        self._taken: list[NDArray[np.uint64]] = []  # windows taken since the last segment, with rows in older ones
        self._pace = Pace()
        self._compaction = BackgroundMerge[Segment, tuple[RunRef, AppendFile]]()
        # Oldest first: the list of taken windows in a segment concerns older segments only.
        for ref in reversed(manifest.runs):
            self._open(ref)
        self.live_rows = int(stat.table["rows"][stat.table["id"] != 0].sum())

    def _open(self, ref: RunRef) -> None:
        file = self.files.open(ref, [self._layout, ENTRY])
        if len(file.sections) != 3:
            raise StateDamagedError("A state file is damaged: it is not a segment.", file=file.data.place)
        segment = Segment(file, self._next_seq, ref=ref, covered=self.covered)
        self._next_seq += 1
        self.segments.append(segment)
        if segment.rows:
            # Roughly, since blocks may be compressed; too large only means smaller pieces.
            stored = _COMPRESSION * int(segment.data.sizes.sum()) // segment.rows
            self.row_bytes = max(self.row_bytes, stored)
        # Before the entries of the segment: a window may have been taken, and opened again.
        for ids in read_taken_ids(self.files, segment):
            self._stat.remove(ids, self._prefetched.released)
        own_rows = 0
        for _, entries in read_entries(self.files, [segment], None):
            self._stat.make_room(len(entries.words))
            ids, axis, places = np.ascontiguousarray(entries.words[entries.words[:, HASH] != 0].T)
            times = (axis >> np.uint64(TIME_BITS)).astype(np.int64)
            self._stat.count += kernels.add_entries(self._stat.table, ids, places, times, segment.seq)
            own_rows += int((places & LOW_HALF).sum())  # an entry's low half is its number of rows (see `ENTRY`)
        if not file.visible.whole:
            segment.foreign_rows = segment.rows - own_rows

    @property
    def next_seq(self) -> int:
        """The number of the next segment."""
        return self._next_seq

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        return sum(ids.nbytes for ids in self._taken) + sum(segment.file.memory for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Size of all segments in bytes; of a shared one, the partition's share."""
        return sum(segment.bytes for segment in self.segments)

    @property
    def rows(self) -> int:
        """Number of rows in segments, outdated ones included."""
        return sum(segment.rows for segment in self.segments)

    @property
    def place(self) -> str | None:
        """Place of the newest segment, for messages."""
        return self.segments[-1].file.data.place if self.segments else None

    def record_taken(self, ids: NDArray[np.uint64], rows: NDArray[np.int32]) -> None:
        """Record windows as taken, each with its number of rows in segments."""
        stored = rows > 0
        self.live_rows -= int(rows.sum())
        if stored.any():
            self._taken.append(ids[stored])

    def write(self, buffer: WriteBuffer, covered: Covered) -> None:
        """Turn the write buffer into a segment, and clear it; the log then covers `covered` of the deltas."""
        stat = self._stat
        count = kernels.count_lists(stat.table)
        slots, axis = np.empty(count, np.int64), np.empty(count, np.uint64)
        kernels.list_slots(stat.table, slots, axis)
        axis, order = order_by_hash(axis)
        slots = slots[order]
        rows_at, row_axis = np.empty(buffer.rows, np.uint64), np.empty(buffer.rows, np.uint64)
        entries = np.empty((count, ENTRY.width), np.uint64)
        left = self._prefetched.released
        buffer_at = (address(buffer.words), self._layout.width, buffer.following)
        rows = kernels.drain_buffer(stat.table, slots, axis, *buffer_at, left, rows_at, row_axis, entries)
        if not self._prefetched.sweep():
            self._prefetched.clear()
        dead = np.concatenate(self._taken) if self._taken else np.empty(0, np.uint64)
        if not rows and not len(dead) and all(segment.written is None for segment in self.segments):
            self.covered = covered  # all windows with rows in the deltas were taken
            buffer.clear()
            return
        heap_at = np.uint64(address(buffer.heap))
        per_piece = max(1, self._piece // self.row_bytes)
        shape = kernel_layout(self._layout)

        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self._layout)
            for begin in range(0, rows, per_piece):
                picked = rows_at[begin : min(rows, begin + per_piece)]
                heaps_at = np.full(len(picked), heap_at, np.uint64)
                writer.add(Rows(*gather_rows(picked, heaps_at, shape.width, shape.blobs)), row_axis[begin:])
            fill_index(writer, entries, dead)

        staged = self.files.stage(fill, [self._layout, ENTRY], rows)
        # The segment is read from the local disk at once, and becomes durable on another thread.
        written = self._resources.write_pool.submit(staged.publish)
        self.segments.append(Segment(staged.file, self._next_seq, covered=covered, written=written))
        self._next_seq += 1
        self.live_rows += rows
        if rows:
            self.row_bytes = 8 * self._layout.width + buffer.heap_used // buffer.rows
        self._taken = []
        buffer.clear()

    def adopt(self) -> None:
        """Take over segments that became durable, and a finished compaction."""
        for segment in self.segments:
            if segment.written is None:
                continue
            # Coverage grows in order: a segment covers deltas only together with all earlier ones.
            if not segment.written.done():
                break
            segment.adopt()
            self.covered = segment.covered
        while (
            len(self.segments) > 1
            and not self.segments[0].rows
            and self.segments[0].ref
            and not self._compaction.running
        ):
            oldest = self.segments.pop(0)  # it only names taken windows of older segments, and there are none
            assert oldest.ref is not None
            self.files.drop_copy(oldest.ref, oldest.file)
        if (done := self._compaction.take()) is not None:
            old, (ref, file) = done
            compacted = Segment(file, old[-1].seq, ref=ref, covered=old[-1].covered)
            self.segments[: len(old)] = [compacted] if compacted.rows else []
            self.compactions += 1
            for segment in old:
                if segment.ref is not None:
                    self.files.drop_copy(segment.ref, segment.file)

    @property
    def space_amplification(self) -> float:
        """Rows in segments per row of an open window; 1 while few rows are outdated, or a compaction runs."""
        total = self.rows
        outdated = (total - self.live_rows) * self.row_bytes
        if self._compaction.running or outdated < _MIN_OUTDATED_BYTES:
            return 1.0
        return total / max(1, self.live_rows)

    @property
    def compaction_due(self) -> bool:
        """Whether the next index scan should lead to a compaction, because too many rows are outdated."""
        return self._writable and (self.space_amplification > self._maximum or self._too_many_segments)

    @property
    def compaction_urgent(self) -> bool:
        """Whether a compaction cannot wait for the next index scan."""
        return self.space_amplification > self._maximum * 1.25 or self._too_many_segments

    @property
    def _too_many_segments(self) -> bool:
        return len(self.segments) > _MAX_SEGMENTS and not self._compaction.running

    def compact(self, alive: LiveEntries) -> None:
        """Begin to compact the oldest segments.

        It takes as few as bring the amplification well below its maximum, and no more than fit into one segment.
        """
        total, live = self.rows, 0
        goal = (1 + (self._maximum - 1) / 2) * self.live_rows
        inputs: list[CompactionInput] = []
        # Only the oldest segments: no older one is left for their lists of taken windows, so the result needs none.
        for segment in self.segments:
            few_left = len(self.segments) - len(inputs) <= _MAX_SEGMENTS // 2
            if segment.ref is None or (total <= goal and few_left):
                break
            bits = [bits for bits, _ in alive[segment.seq]]
            rows = sum(count for _, count in alive[segment.seq])
            live += rows
            if live > MAX_SEGMENT_ROWS:
                break
            inputs.append(CompactionInput(segment.file, np.concatenate(bits) if bits else np.empty(0, np.uint8), rows))
            total -= segment.rows - rows
        # The oldest segments without rows of open windows are dropped, not rewritten.
        while inputs and not inputs[0].rows:
            oldest = self.segments.pop(0)
            assert oldest.ref is not None
            self.files.drop_copy(oldest.ref, oldest.file)
            inputs.pop(0)
        # A single segment without outdated rows is left alone: each index scan would only copy it again.
        if len(inputs) > 1 or (inputs and inputs[0].rows < self.segments[0].rows):
            self._start_compaction(inputs)

    def _start_compaction(self, inputs: list[CompactionInput]) -> None:
        arguments = (self.files, inputs, self._layout, self._directory, self._piece, self._pace)
        old = self.segments[: len(inputs)]
        self._pace.set_full_speed(self.space_amplification > 2 * self._maximum)

        def compact_locally() -> Future[tuple[RunRef, AppendFile]]:
            return self._resources.background.submit(compact, *arguments)

        def open_result(refs: Sequence[RunRef]) -> tuple[RunRef, AppendFile]:
            (ref,) = refs
            return ref, self.files.open(ref, [self._layout, ENTRY])

        def job() -> CompactSegments:
            return CompactSegments(
                schema=self._layout.schema,
                inputs=tuple(segment.ref for segment in old if segment.ref is not None),
                alive=tuple(np.packbits(source.alive, bitorder="little").tobytes() for source in inputs),
                rows=tuple(source.rows for source in inputs),
                piece=self._piece,
            )

        remote_compactor = self._resources.remote_compactor
        result = (
            compact_locally()
            if remote_compactor is None
            else remote_compactor.submit(job, compact_locally, open_result)
        )
        self._compaction.track(old, result)

    def refs(self) -> tuple[RunRef, ...]:
        """Return the durable segments, newest first, up to the first segment that is not durable."""
        refs: list[RunRef] = []
        for segment in self.segments:
            if segment.ref is None:
                break
            refs.append(segment.ref)
        return tuple(refs[::-1])

    def close(self) -> None:
        """Close the log and release its segments."""
        self._pace.stop()
        self._compaction.close()
        for segment in self.segments:
            if segment.written is not None:
                segment.written.cancel()
        self.segments = []  # their local copies stay for the next slot that opens them

"""The unaligned append store: lists of rows by key and window, each read once, when its window closes (FlowKV §4.2).

Rows go to a write buffer, and with the batch's delta to the log of deltas. What leaves the buffer becomes a segment of
the log: data and index (`log_segment.py`). In memory, a record for each open window (`window_stat.py`) holds its
estimated trigger time. When windows are asked for whose rows are in segments, one scan of the indexes finds them, and
those of the windows nearest to their trigger: the predictive batch read. The same scan tells what is outdated, and is
used for compaction when too much is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import StateDamagedError, TransientError, UsageError
from millpond.files.append_file import AppendFile, AppendFileWriter
from millpond.files.blocks import shape_of
from millpond.files.refs import RunRef, TableManifest
from millpond.files.segment import encode_rows
from millpond.kernels import windows as kernels
from millpond.kernels.gather import addresses, gather_rows, heap_bytes
from millpond.kernels.pointers import address
from millpond.kernels.sort import order_by_hash
from millpond.layout import HASH, META, RowLayout, Rows, TableSchema
from millpond.stores.append_files import AppendFiles, Part
from millpond.stores.budget import MemoryBudget
from millpond.stores.fold import Input, blocks_of, fold, rows_between
from millpond.stores.log_segment import ENTRY, TIME_BITS, Covered, Segment, entries_of, fill_index, ids_in, places
from millpond.stores.protocol import TableDelta
from millpond.stores.spooled import Log
from millpond.stores.window_stat import PrefetchBuffer, WindowStat, WriteBuffer, too_small

READ_BATCH_RATIO = 0.02
MAXIMUM_SPACE_AMPLIFICATION = 1.5

_DEAD = np.uint64(1)
_LATEST = (1 << 48) - 1
_MOST_DELTAS = 64
_MOST_DELTA_BYTES = 512 << 20
_LEAST_OUTDATED = 1 << 16  # bytes of outdated rows that are worth a compaction
_BLOCKS = 32  # of data that are copied at once
_CHUNK = 16384

_log = logging.getLogger(__name__)


class UnalignedTable:
    """Lists of rows by (key, initial window), on one partition. Not thread-safe: one writer.

    A window is known by 64 bits made from its key's hash and the last key column, a word: its initial boundary, which
    does not change when the window grows. Windows for which these are the same share a list: who takes it looks at the
    keys, and appends again what it did not want.

    Args:
        schema: the stored columns, the last key column a word.
        files: where segments are written. budget: the memory shared with the other tables of the slot.
        background: writes and folds segments.
        manifest: what to open; the deltas behind it are then to be given to `load`. Reads the directory and the index
            of each segment, not the data.
        directory: for temporary files.
        read_batch_ratio: share of the open windows that a predictive batch read brings in beside those asked for.
        maximum_space_amplification: rows in segments per row of an open window from which they are compacted.
        write_buffer: bytes of the write buffer, at most; as the memory allows, if not given.

    Raises:
        StateDamagedError: a segment is missing or damaged.
    """

    def __init__(
        self,
        schema: TableSchema,
        files: AppendFiles,
        budget: MemoryBudget,
        background: Executor,
        manifest: TableManifest = TableManifest(),  # noqa: B008
        *,
        directory: str,
        read_batch_ratio: float = READ_BATCH_RATIO,
        maximum_space_amplification: float = MAXIMUM_SPACE_AMPLIFICATION,
        write_buffer: int | None = None,
    ) -> None:
        self.layout = RowLayout(schema)
        if not schema.keys or schema.keys[-1].kind != "word":
            raise UsageError(
                "The last key column of an unaligned table must be a word.", action="Put the window there."
            )
        self._window = self.layout.offsets[len(schema.keys) - 1]
        self._files = files
        self._budget = budget
        self._account = budget.open()
        self._background = background
        self._directory = directory
        self._ratio = read_batch_ratio
        self._most = maximum_space_amplification
        self._write_buffer = write_buffer
        self._stat = WindowStat()
        self._buffer = WriteBuffer(self.layout)
        self._prefetched = PrefetchBuffer()
        self._segments: list[Segment] = []  # oldest first
        self._seq = 0  # of the next segment
        self._dead: list[NDArray[np.uint64]] = []  # taken since the last segment, with rows in older ones
        self._covered = Covered(manifest.flushed, manifest.skip)
        self._folding: tuple[int, Future[tuple[RunRef, AppendFile]]] | None = None
        self._version = manifest.flushed
        self._sealed = True
        self._log = Log(directory, self._account.limit // 16)
        self._ops = 0  # rows and tombstones of the running batch; before the first batch: of the deltas loaded
        self._to_skip = manifest.skip
        self._deltas = self._delta_bytes = 0  # since the last segment
        self._live = 0  # rows of open windows in segments
        self._figures = dict.fromkeys(
            ("hits", "misses", "loads", "loaded_rows", "taken_rows", "fetched_bytes", "taken_bytes", "folds"), 0
        )
        self._row_bytes = 8 * self.layout.width
        self._open(manifest)

    def _open(self, manifest: TableManifest) -> None:
        for ref in reversed(manifest.runs):
            file = self._files.open(ref, [self.layout, ENTRY])
            if len(file.sections) != 3:
                raise StateDamagedError("A state file is damaged: it is not a segment.", file=file.data.place)
            segment = Segment(file, self._seq, ref=ref, covered=self._covered)
            self._seq += 1
            self._segments.append(segment)
            for ids in ids_in(self._files, segment):
                self._stat.remove(ids, self._prefetched.left)
            for part, rows in self._index([segment], None):
                entries = entries_of(part, rows)
                self._stat.make_room(len(entries.words))
                ids = np.ascontiguousarray(entries.words[:, HASH])
                times = (entries.words[:, META] >> np.uint64(TIME_BITS)).astype(np.int64)
                self._stat.count += kernels.add_entries(
                    self._stat.table, ids, places(entries.words), times, segment.seq
                )
        self._live = int(self._stat.table["rows"][self._stat.table["id"] != 0].sum())
        self._account.force(self._memory())

    # What operators and slots ask of every table

    @property
    def portion(self) -> int:
        """Bytes of input that should be worked on at once, at most."""
        return 2 * self._budget.piece

    @property
    def ahead(self) -> int:
        """How many keys should be worked on together: any number."""
        return 1 << 32

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch: one, in any order."""
        return 1

    # A batch

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`. Written segments are taken over here."""
        if not self._sealed:
            raise UsageError(f"The batch on version {self._version} was not sealed.", action="Open the table anew.")
        self._version = version
        self._sealed = False
        self._ops = 0
        self._adopt()
        if self._deltas >= _MOST_DELTAS or self._delta_bytes >= min(
            _MOST_DELTA_BYTES, max(32 << 20, self._budget.total // 2)
        ):
            self._freeze()
        if self._amplification > self._most * 1.25:
            self._load(np.empty(0, np.uint64))
        if self._account.reserved > self._account.limit:
            self._freeze()
            self._buffer.clear(shrink=True)
            self._evict()
        self._account.force(self._memory())

    def append(self, rows: Rows, times: NDArray[np.int64]) -> None:
        """Append rows, each to the list of its key and window.

        Args:
            rows: all words filled, but for `META`.
            times: when the window of each is expected to be triggered, in milliseconds; the latest of a window counts.
        """
        words = np.ascontiguousarray(rows.words)
        heap = np.ascontiguousarray(rows.heap)
        words[:, META] = np.clip(times, 0, _LATEST).astype(np.uint64) << np.uint64(16)
        self._budget.relieve()
        for start in range(0, len(words), _CHUNK):
            piece = Rows(words[start : start + _CHUNK], heap)
            self._log.add(encode_rows(piece, self.layout, True))
            self._put(piece)

    def _put(self, rows: Rows) -> None:
        count = rows.count
        long_bytes = self._buffer.long_bytes(rows)
        self._make_room(count, long_bytes)
        ids = self._ids(rows.words[:, HASH], rows.words[:, self._window])
        times = (rows.words[:, META] >> np.uint64(16)).astype(np.int64)
        first = self._buffer.put(rows, long_bytes)
        table, following = self._stat.table, self._buffer.following
        self._stat.count += kernels.append(table, ids, times, first, self._seq, following, self._prefetched.left)
        self._ops += count

    def _ids(self, hashes: NDArray[np.uint64], windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        out = np.empty(len(hashes), np.uint64)
        kernels.window_ids(hashes, windows, out)
        return out

    def take(self, hashes: NDArray[np.uint64], windows: NDArray[np.int64]) -> Iterator[Rows]:
        """Remove some windows (each named once) and yield their rows, as they were appended.

        To be consumed whole, before anything else is asked of the table.

        Yields:
            Pieces of bounded size, unless a single list is larger; all rows of one list stand together.
        """
        hashes = np.ascontiguousarray(hashes).view(np.uint64)
        boundaries = np.ascontiguousarray(windows).view(np.uint64)
        ids = self._ids(hashes, boundaries)
        records = self._stat.look(ids)
        known = records["id"] != 0
        ids, hashes, boundaries, records = ids[known], hashes[known], boundaries[known], records[known]
        stored = records["rows"] > 0
        missing = stored & (records["chunk"] == kernels.NOWHERE)
        self._figures["hits"] += int((stored & ~missing).sum())
        self._figures["misses"] += int(missing.sum())
        most = max(1, self._budget.piece // self._row_bytes)
        sizes = np.cumsum(records["rows"].astype(np.int64) + 1)
        begin = 0
        while begin < len(ids):
            done = int(sizes[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(sizes, done + most, "right")))
            yield from self._take(ids, hashes, boundaries, begin, end)
            self._budget.relieve()
            begin = end

    def _take(
        self,
        ids: NDArray[np.uint64],
        hashes: NDArray[np.uint64],
        boundaries: NDArray[np.uint64],
        begin: int,
        end: int,
    ) -> Iterator[Rows]:
        part = ids[begin:end]
        records = self._stat.look(part)
        missing = part[(records["rows"] > 0) & (records["chunk"] == kernels.NOWHERE)]
        if len(missing):
            self._load(missing, ids[end:])
            records = self._stat.look(part)
        rows_at, heaps_at = self._collect(records)
        rows = Rows(*gather_rows(rows_at, heaps_at, self.layout.width, shape_of(self.layout).blobs))
        stored = records["rows"] > 0
        self._figures["taken_rows"] += int(records["rows"].sum())
        self._figures["taken_bytes"] += rows.words.nbytes + rows.heap.nbytes
        self._live -= int(records["rows"].sum())
        if stored.any():
            self._dead.append(part[stored])
        self._stat.remove(part, self._prefetched.left)
        if not self._prefetched.sweep():
            self._prefetched.clear()
        self._bury(hashes[begin:end], boundaries[begin:end])
        if rows.count:
            yield rows

    def _collect(self, records: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        buffer = self._buffer
        chunks = self._prefetched.addresses()
        at = (records, *chunks, address(buffer.words), address(buffer.heap), self.layout.width, buffer.following)
        nothing = np.empty(0, np.uint64)
        count = kernels.collect(*at, nothing, nothing)
        rows_at, heaps_at = np.empty(count, np.uint64), np.empty(count, np.uint64)
        if count:
            kernels.collect(*at, rows_at, heaps_at)
        return rows_at, heaps_at

    def _bury(self, hashes: NDArray[np.uint64], boundaries: NDArray[np.uint64]) -> None:
        """Note in the delta that windows were taken."""
        words = np.zeros((len(hashes), self.layout.width), np.uint64)
        words[:, HASH] = hashes
        words[:, META] = _DEAD
        words[:, self._window] = boundaries
        self._log.add(encode_rows(Rows(words, np.empty(0, np.uint8)), self.layout, True))
        self._ops += len(words)

    def seal(self) -> TableDelta:
        """End the batch: what was appended and taken, in order, encoded."""
        if not self._ops:
            self._log.add(
                encode_rows(Rows(np.empty((0, self.layout.width), np.uint64), np.empty(0, np.uint8)), self.layout, True)
            )
        pieces = self._log.finish()
        delta = TableDelta(self._ops, pieces)
        self._sealed = True
        self._version += 1
        self._ops = 0
        self._deltas += 1
        self._delta_bytes += delta.bytes
        self._account.force(self._memory())
        self._budget.relieve()
        return delta

    def load(self, delta_rows: Rows) -> None:
        """Apply rows of a delta, in recovery; deltas come in the order of their versions, behind the manifest's."""
        words = delta_rows.words
        if self._to_skip:
            covered = min(self._to_skip, len(words))
            self._to_skip -= covered
            words = words[covered:]
        words = np.ascontiguousarray(words)
        dead = (words[:, META] & _DEAD) != 0
        cuts = np.flatnonzero(np.diff(dead)) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(words)], strict=True):
            if begin == end:
                continue
            if not dead[begin]:
                for start in range(begin, end, _CHUNK):
                    self._put(Rows(words[start : min(end, start + _CHUNK)], delta_rows.heap))
                continue
            ids = self._ids(words[begin:end, HASH], words[begin:end, self._window])
            records = self._stat.look(ids)
            stored = records["rows"] > 0
            stored &= records["id"] != 0
            self._live -= int(records["rows"][stored].sum())
            if stored.any():
                self._dead.append(ids[stored])
            self._stat.remove(ids, self._prefetched.left)
            self._ops += end - begin
        self._deltas += 1
        self._delta_bytes += words.nbytes + len(delta_rows.heap)

    # Memory

    def _memory(self) -> int:
        dead = sum(ids.nbytes for ids in self._dead)
        directories = sum(segment.file.memory for segment in self._segments)
        return self._stat.memory + self._buffer.memory + self._prefetched.memory + dead + directories

    def _make_room(self, count: int, long_bytes: int) -> None:
        buffer = self._buffer
        growth = self._stat.growth(count)
        needed = buffer.needed(count, long_bytes)
        most = self._write_buffer or self._account.limit * 2 // 5
        if buffer.rows and (
            needed > max(most, buffer.memory)
            or not self._account.reserve(self._memory() - buffer.memory + needed + growth)
        ):
            self._freeze()
            if buffer.memory > most:
                buffer.clear(shrink=True)
            needed = buffer.needed(count, long_bytes)
        if not self._account.reserve(self._memory() - buffer.memory + needed + growth):
            self._evict()
            wanted = self._memory() - buffer.memory + needed + growth
            if not self._account.reserve(wanted):
                if self._stat.memory + growth > self._account.limit:
                    raise too_small()
                self._account.force(wanted)
        self._stat.make_room(count)

    def _evict(self) -> None:
        """Let go of the prefetch buffer."""
        table = self._stat.table
        table["chunk"][table["chunk"] >= 0] = kernels.NOWHERE
        self._prefetched.clear()

    # Segments

    def _freeze(self) -> None:
        """Make a segment of the write buffer."""
        buffer, stat = self._buffer, self._stat
        count = kernels.count_lists(stat.table, buffer.following)
        slots, axis = np.empty(count, np.int64), np.empty(count, np.uint64)
        kernels.list_slots(stat.table, slots, axis)
        axis, order = order_by_hash(axis)
        slots = slots[order]
        rows_at, row_axis = np.empty(buffer.rows, np.uint64), np.empty(buffer.rows, np.uint64)
        entries = np.empty((count, ENTRY.width), np.uint64)
        left = self._prefetched.left
        at = (address(buffer.words), self.layout.width, buffer.following)
        rows = kernels.unlist(stat.table, slots, axis, *at, left, rows_at, row_axis, entries)
        if not self._prefetched.sweep():
            self._prefetched.clear()
        dead = np.concatenate(self._dead) if self._dead else np.empty(0, np.uint64)
        heap_at = np.uint64(address(buffer.heap))
        per_piece = max(1, self._budget.piece // self._row_bytes)
        shape = shape_of(self.layout)

        def fill(writer: AppendFileWriter) -> None:
            writer.begin(self.layout)
            for begin in range(0, rows, per_piece):
                picked = rows_at[begin : min(rows, begin + per_piece)]
                heaps_at = np.full(len(picked), heap_at, np.uint64)
                writer.add(Rows(*gather_rows(picked, heaps_at, shape.width, shape.blobs)), row_axis[begin:])
            fill_index(writer, entries, dead)

        staged = self._files.stage(fill, [self.layout, ENTRY], rows)
        covered = Covered(self._version, self._ops)
        if self._sealed:  # deltas are being loaded: they lie behind what the manifest covers
            covered = Covered(self._covered.version, self._covered.rows + self._ops)
        written = self._background.submit(staged.publish)
        self._segments.append(Segment(staged.file, self._seq, covered=covered, written=written))
        self._seq += 1
        self._live += rows
        if rows:
            self._row_bytes = 8 * self.layout.width + buffer.heap_used // buffer.rows
        self._dead = []
        self._deltas = self._delta_bytes = 0
        buffer.clear()

    def _adopt(self) -> None:
        for segment in self._segments:
            if segment.written is None:
                continue
            if not segment.written.done():
                break
            segment.adopt()
            self._covered = segment.covered
        if self._folding is not None and self._folding[1].done():
            (count, future), self._folding = self._folding, None
            try:
                ref, file = future.result()
            except (TransientError, OSError) as error:
                _log.warning("Compacting %d segments failed and will be tried again: %s", count, error)
                return
            old, last = self._segments[:count], self._segments[count - 1]
            folded = Segment(file, last.seq, ref=ref, covered=last.covered)
            self._segments[:count] = [folded] if folded.rows else []
            self._figures["folds"] += 1
            for segment in old:
                if segment.ref is not None:
                    self._files.forget(segment.ref, segment.file)

    @property
    def _amplification(self) -> float:
        """Rows in segments per row of an open window; 1 while little is outdated, or it is being folded."""
        total = sum(segment.rows for segment in self._segments)
        outdated = (total - self._live) * self._row_bytes
        if self._folding is not None or outdated < _LEAST_OUTDATED:
            return 1.0
        return total / max(1, self._live)

    # The predictive batch read

    def _load(self, missing: NDArray[np.uint64], more: Sequence[int] | NDArray[np.uint64] = ()) -> None:
        """Bring in windows: the missing ones, those of `more` that have room, and those nearest to their trigger."""
        table = self._stat.table
        account = self._account
        room = max(0, account.limit - self._memory()) * 2 // 3 // self._row_bytes
        rows = np.empty(len(missing), np.int64)
        kernels.want(table, missing, rows)
        room -= int(rows.sum())
        wanted = [missing]
        if len(more):
            ids = np.asarray(more, np.uint64)
            records = self._stat.look(ids)
            absent = (records["rows"] > 0) & (records["chunk"] == kernels.NOWHERE)
            ids, sizes = ids[absent], np.cumsum(records["rows"][absent].astype(np.int64))
            ids = ids[: int(np.searchsorted(sizes, room, "right"))]
            room -= int(sizes[len(ids) - 1]) if len(ids) else 0
            kernels.want(table, ids, np.empty(len(ids), np.int64))
            wanted.append(ids)
        most = int(self._ratio * self._stat.count) if len(missing) else 0
        near = np.empty(most, np.uint64)
        near = near[: kernels.nearest(table, most, max(0, room), near)] if most else near
        self._bring(np.concatenate([*wanted, near]))

    def _bring(self, ids: NDArray[np.uint64]) -> None:
        table, width, blobs = self._stat.table, self.layout.width, shape_of(self.layout).blobs
        sizes = np.empty(len(ids), np.int64)
        latest = kernels.want(table, ids, sizes)
        offsets = np.cumsum(sizes) - sizes
        total = int(sizes.sum())
        words = np.empty((total, width), np.uint64)
        heap = _Heap()
        compacting = self._amplification > self._most
        until = None if compacting else (int(latest) << TIME_BITS) | ((1 << TIME_BITS) - 1)
        alive: dict[int, list[tuple[NDArray[np.uint8], int]]] = {segment.seq: [] for segment in self._segments}
        fill = offsets.copy()
        try:
            for segment, found in self._scan(until, fill, alive, complete=compacting):
                self._fetch(segment, *found, words, heap, blobs)
        except BaseException:
            kernels.arrived(table, ids, offsets, kernels.NOWHERE)
            raise
        if (fill != offsets + sizes).any():
            kernels.arrived(table, ids, offsets, kernels.NOWHERE)
            raise StateDamagedError(
                "The index of the log does not name all rows of a window.",
                action="Restart from an older checkpoint.",
                file=self._segments[-1].file.data.place if self._segments else None,
            )
        if len(ids):
            self._figures["loads"] += 1
            self._figures["loaded_rows"] += total
            chunk = self._prefetched.add(Rows(words, heap.data[: heap.used]), len(ids))
            kernels.arrived(table, ids, offsets, chunk)
            self._account.force(self._memory())
        if compacting:
            self._fold(alive)

    def _index(self, segments: Sequence[Segment], until: int | None) -> Iterator[tuple[Part, list[Rows]]]:
        parts = [part for segment in segments for part in segment.parts(until)]
        yield from zip(parts, self._files.read_ahead(parts), strict=True)

    def _scan(
        self,
        until: int | None,
        fill: NDArray[np.int64],
        alive: dict[int, list[tuple[NDArray[np.uint8], int]]],
        *,
        complete: bool,
    ) -> Iterator[tuple[Segment, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]]:
        """Scan the indexes: where are the rows of wanted windows, and (of all blocks read) what is outdated?"""
        by_file = {id(segment.file): segment for segment in self._segments}
        if complete:
            for segment in self._segments:
                segment.outdated[:] = False
        for part, rows in self._index(self._segments, until):
            segment = by_file[id(part.file)]
            self._figures["fetched_bytes"] += sum(size for _, size in part.file.ranges(part.section, part.blocks))
            blocks, entries, bounds = entries_of(part, rows)
            bits = np.empty(len(entries), np.uint8)
            rows_alive = np.empty(len(blocks), np.int64)
            out = [np.empty(len(entries), np.int64) for _ in range(3)]
            count = kernels.scan(self._stat.table, entries, bounds, segment.seq, fill, rows_alive, bits, *out)
            segment.outdated[blocks] = rows_alive == 0
            if complete:
                alive[segment.seq].append((bits, int(rows_alive.sum())))
            if count:
                yield segment, (out[0][:count], out[1][:count], out[2][:count])

    def _fetch(
        self,
        segment: Segment,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        dests: NDArray[np.int64],
        words: NDArray[np.uint64],
        heap: _Heap,
        blobs: NDArray[np.int64],
    ) -> None:
        """Copy ranges of a segment's rows to where they are wanted."""
        blocks = blocks_of(segment.data, starts, counts)
        self._figures["fetched_bytes"] += int(segment.data.sizes[blocks].sum())
        parts = [Part(segment.file, segment.data, blocks[i : i + _BLOCKS]) for i in range(0, len(blocks), _BLOCKS)]
        for part, pieces in zip(parts, self._files.read_ahead(parts), strict=True):
            for block, rows in zip(part.blocks.tolist(), pieces, strict=True):
                low, high = int(segment.data.starts[block]), int(segment.data.starts[block + 1])
                picked, targets = rows_between(starts, counts, dests, low, high)
                rows_at, heaps_at = addresses(rows.words, rows.heap)
                rows_at = rows_at[picked]
                if len(blobs):
                    heap.reserve(int(heap_bytes(rows_at, len(rows_at), blobs)))
                heap.used = kernels.gather_to(
                    rows_at,
                    heaps_at,
                    targets,
                    len(picked),
                    words.shape[1],
                    blobs,
                    address(words),
                    address(heap.data),
                    heap.used,
                )

    def _fold(self, alive: dict[int, list[tuple[NDArray[np.uint8], int]]]) -> None:
        """Begin to fold the oldest segments, as few as bring the amplification well below its maximum."""
        total = sum(segment.rows for segment in self._segments)
        goal = (1 + (self._most - 1) / 2) * self._live
        inputs: list[Input] = []
        for segment in self._segments:
            if segment.ref is None or total <= goal:
                break
            bits = [bits for bits, _ in alive[segment.seq]]
            rows = sum(count for _, count in alive[segment.seq])
            inputs.append(Input(segment.file, np.concatenate(bits) if bits else np.empty(0, np.uint8), rows))
            total -= segment.rows - rows
        while inputs and not inputs[0].rows:
            gone = self._segments.pop(0)
            assert gone.ref is not None
            self._files.forget(gone.ref, gone.file)
            inputs.pop(0)
        if inputs:
            at = (self._files, inputs, self.layout, self._directory, self._budget.piece)
            self._folding = len(inputs), self._background.submit(fold, *at)

    # The rest

    def manifest(self) -> TableManifest:
        """The segments that hold the state together with what is behind `skip` rows of the deltas behind `flushed`."""
        refs: list[RunRef] = []
        for segment in self._segments:
            if segment.ref is None:
                break
            refs.append(segment.ref)
        return TableManifest(tuple(refs[::-1]), self._covered.version, self._stat.count, skip=self._covered.rows)

    def stats(self) -> dict[str, float]:
        """Figures.

        `keys`: open windows. `bytes`: in memory and files. `hot_bytes`: in memory.
        `segments`, `segment_rows`: in the log; `live_rows`: of them, those of open windows.
        Since the table was opened: `prefetch_hits`, `prefetch_misses`: windows with rows in segments that were taken
        and had been brought in before, or not; `prefetch_hit_ratio`; `batch_reads`; `read_amplification`: rows brought
        in per row taken; `fetched_bytes`; `compactions`.
        """
        figures = self._figures
        hits, misses = figures["hits"], figures["misses"]
        return {
            "keys": self._stat.count,
            "bytes": self._memory() + sum(segment.file.data.size for segment in self._segments),
            "hot_bytes": self._memory(),
            "segments": len(self._segments),
            "segment_rows": sum(segment.rows for segment in self._segments),
            "live_rows": self._live,
            "prefetch_hits": hits,
            "prefetch_misses": misses,
            "prefetch_hit_ratio": hits / max(1, hits + misses),
            "batch_reads": figures["loads"],
            "read_amplification": figures["loaded_rows"] / max(1, figures["taken_rows"]),
            "fetched_bytes": figures["fetched_bytes"],
            "compactions": figures["folds"],
        }

    def close(self) -> None:
        """Give all memory back."""
        if self._folding is not None:
            self._folding[1].cancel()
            self._folding = None
        for segment in self._segments:
            if segment.written is not None:
                segment.written.cancel()
            if segment.ref is not None:
                self._files.forget(segment.ref, segment.file)
        self._segments = []
        self._evict()
        self._buffer.clear(shrink=True)
        self._account.close()


class _Heap:
    """Bytes of long values, growing."""

    def __init__(self) -> None:
        self.data = np.empty(0, np.uint8)
        self.used = 0

    def reserve(self, more: int) -> None:
        """Make room for so many more bytes."""
        if self.used + more > len(self.data):
            grown = np.empty(max(self.used + more, 2 * len(self.data)), np.uint8)
            grown[: self.used] = self.data[: self.used]
            self.data = grown

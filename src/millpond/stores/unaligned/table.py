"""The unaligned append store: lists of rows by key and window, each read once, when its window closes (FlowKV §4.2).

Rows go to a write buffer, and with the batch's delta to the log of deltas. Rows that leave the buffer become a segment
of the log: data and index (`log.py`, `segment.py`). In memory, a record for each open window (`stat_table.py`) holds
its estimated trigger time. When windows are requested that have rows in segments, one index scan finds these rows, and
those of the windows nearest to their trigger: the predictive batch read (`batch_read.py`). The same scan finds outdated
rows, and starts a compaction when there are too many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.formats.blocks import kernel_layout
from millpond.files.formats.segment import encode_rows
from millpond.files.refs import TableManifest
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.unaligned import stat_table as kernels
from millpond.layout import HASH, META, HashRange, RowLayout, Rows, TableSchema, Words
from millpond.stores.append_files import AppendFiles
from millpond.stores.delta_backlog import DeltaBacklog
from millpond.stores.hash_filter import inside
from millpond.stores.memory.spooled import SpooledLog
from millpond.stores.protocol import TableDelta
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.batch_read import BatchRead
from millpond.stores.unaligned.log import WindowLog
from millpond.stores.unaligned.segment import Covered
from millpond.stores.unaligned.stat_table import PrefetchBuffer, WindowStat, WriteBuffer, outgrown_error

READ_BATCH_RATIO = 0.02
MAXIMUM_SPACE_AMPLIFICATION = 1.5

_TAKEN = np.uint64(1)  # flag of a delta row that records a taken window
_MAX_TIME = (1 << 48) - 1  # milliseconds that fit above the flags of the meta word
_CHUNK_ROWS = 16384  # rows appended or replayed at a time


class UnalignedTable:
    """Lists of rows by (key, initial window), on one partition. Not thread-safe: one writer.

    A window is identified by 64 bits made from its key's hash and the last key column, a word: its initial boundary,
    which does not change when the window grows. Windows with equal ids share a list: the caller who takes it compares
    the keys, and appends rows of other keys again.

    Args:
        schema: the stored columns, the last key column a word.
        files: writes segments.
        resources: the memory and the threads that the table shares with the other tables of its slot.
        manifest: the state to open; `load` then applies the later deltas. Opening reads the directory and the index of
            each segment, not the data.
        directory: directory for temporary files.
        read_batch_ratio: share of the open windows that a predictive batch read loads besides the requested ones.
        maximum_space_amplification: rows in segments per row of an open window from which they are compacted.
        write_buffer: bytes of the write buffer, at most; by default as the memory allows.
        writable: whether segments may be written; if not, all rows loaded stay in memory.

    Raises:
        StateDamagedError: a segment is missing or damaged.
    """

    def __init__(
        self,
        schema: TableSchema,
        files: AppendFiles,
        resources: TableResources,
        manifest: TableManifest = TableManifest(),  # noqa: B008
        *,
        directory: str,
        read_batch_ratio: float = READ_BATCH_RATIO,
        maximum_space_amplification: float = MAXIMUM_SPACE_AMPLIFICATION,
        write_buffer: int | None = None,
        writable: bool = True,
    ) -> None:
        self.layout = RowLayout(schema)
        if not schema.keys or schema.keys[-1].kind != "word":
            raise UsageError(
                "The last key column of an unaligned table must be a word.", action="Put the window there."
            )
        self._window = self.layout.offsets[len(schema.keys) - 1]
        self._budget = resources.budget
        self._writable = writable
        self._read_batch_ratio = read_batch_ratio
        self._write_buffer = write_buffer
        self._stat = WindowStat()
        self._buffer = WriteBuffer(self.layout)
        self._prefetched = PrefetchBuffer()
        self._segments = WindowLog(
            self.layout,
            files,
            self._stat,
            self._prefetched,
            resources,
            manifest,
            directory=directory,
            maximum=maximum_space_amplification,
            writable=writable,
        )
        # Opened last: a segment that cannot be read must not leave an account behind.
        self._account = self._budget.open()
        self._version = manifest.flushed
        self._sealed = True
        self._delta_log = SpooledLog(directory, self._account.limit // 16)
        self._ops = 0  # rows and tombstones of the running batch; before the first batch: of the deltas loaded
        self._rows_to_skip = manifest.skip
        self._opened_at = Covered(manifest.flushed, manifest.skip)
        self._backlog = DeltaBacklog(self._budget.total)  # deltas since the last segment
        self._figures = dict.fromkeys(("hits", "misses", "loads", "loaded_rows", "taken_rows", "fetched_bytes"), 0)
        self._before = dict(self._figures)  # at the start of the running batch
        self._account.force(self._memory())

    # Interface of every table

    @property
    def portion_bytes(self) -> int:
        """Bytes of input to work on at once, at most."""
        return 2 * self._budget.piece

    @property
    def portion_keys(self) -> int:
        """Number of keys to work on together: unlimited."""
        return 1 << 32

    @property
    def place(self) -> str | None:
        """Place of the newest segment, for messages."""
        return self._segments.place

    def passes(self, rows: int) -> int:
        """Return 1: rows are taken in any order, so one pass is enough."""
        return 1

    # A batch

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`, and take over written segments."""
        if not self._sealed:
            raise UsageError(f"The batch on version {self._version} was not sealed.", action="Open the table again.")
        self._version = version
        self._sealed = False
        self._ops = 0
        self._before = dict(self._figures)
        self._segments.adopt()
        if self._backlog.due:
            self._freeze()
        if self._segments.compaction_urgent:
            self._load_windows(np.empty(0, np.uint64))
        if self._account.reserved > self._account.limit:
            self._freeze()
            self._buffer.clear(shrink=True)
            self._evict()
        self._account.force(self._memory())

    def append(self, rows: Rows, times: NDArray[np.int64]) -> None:
        """Append rows, each to the list of its key and window.

        Args:
            rows: all words filled, except for `META`.
            times: expected trigger time of each row's window, in milliseconds; the latest time of a window counts.
        """
        rows = rows.packed()
        rows.words[:, META] = np.clip(times, 0, _MAX_TIME).astype(np.uint64) << np.uint64(16)
        self._budget.trim_if_needed()
        for piece in rows.pieces(_CHUNK_ROWS):
            self._delta_log.add(encode_rows(piece, self.layout, True))
            self._put(piece)

    def _put(self, rows: Rows) -> None:
        count = rows.count
        long_bytes = self._buffer.long_bytes(rows)
        self._make_room(count, long_bytes)
        ids = self._ids(rows.words[:, HASH], rows.words[:, self._window])
        times = (rows.words[:, META] >> np.uint64(16)).astype(np.int64)
        first = self._buffer.put(rows, long_bytes)
        table, following = self._stat.table, self._buffer.following
        self._stat.count += kernels.append(
            table, ids, times, first, self._segments.next_seq, following, self._prefetched.released
        )
        self._ops += count

    def _ids(self, hashes: NDArray[np.uint64], windows: NDArray[np.uint64]) -> NDArray[np.uint64]:
        out = np.empty(len(hashes), np.uint64)
        kernels.window_ids(hashes, windows, out)
        return out

    def postpone(self, hashes: NDArray[np.uint64], windows: NDArray[np.int64], times: NDArray[np.int64]) -> None:
        """Postpone the expected trigger times (milliseconds) of windows.

        The new times are not part of the state: after a restart, the times given to `append` count again.
        """
        ids = self._ids(hashes, windows.view(np.uint64))
        kernels.postpone(self._stat.table, ids, np.clip(times, 0, _MAX_TIME), self._prefetched.released)

    def take(self, hashes: NDArray[np.uint64], windows: NDArray[np.int64]) -> Iterator[Rows]:
        """Remove windows and yield their rows, as they were appended.

        The iterator must be consumed completely before the table is used otherwise.

        Yields:
            Pieces of bounded size, unless a single list is larger; all rows of one list are in one piece.
        """
        boundaries = windows.view(np.uint64)
        ids = self._ids(hashes, boundaries)
        records = self._stat.lookup(ids)
        known = np.zeros(len(ids), np.bool_)
        known[np.unique(ids, return_index=True)[1]] = True  # a list that several keys share is read once
        known &= records["id"] != 0
        ids, hashes, boundaries, records = ids[known], hashes[known], boundaries[known], records[known]
        stored = records["rows"] > 0
        missing = stored & (records["chunk"] == kernels.NOWHERE)
        self._figures["hits"] += int((stored & ~missing).sum())
        self._figures["misses"] += int(missing.sum())
        most = max(1, self._budget.piece // self._segments.row_bytes)
        sizes = np.cumsum(records["rows"].astype(np.int64) + 1)
        begin = 0
        while begin < len(ids):
            done = int(sizes[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(sizes, done + most, "right")))
            yield from self._take_piece(ids, hashes, boundaries, begin, end)
            self._budget.trim_if_needed()
            begin = end

    def _take_piece(
        self,
        ids: NDArray[np.uint64],
        hashes: NDArray[np.uint64],
        boundaries: NDArray[np.uint64],
        begin: int,
        end: int,
    ) -> Iterator[Rows]:
        part = ids[begin:end]
        records, rows = self._read_piece(part, ids[end:])
        # Nothing is changed before the read: if it fails, the windows are still open.
        self._figures["taken_rows"] += int(records["rows"].sum())
        self._segments.record_taken(part, records["rows"])
        self._stat.remove(part, self._prefetched.released)
        if not self._prefetched.sweep():
            self._prefetched.clear()
        self._log_taken(hashes[begin:end], boundaries[begin:end])
        if rows.count:
            yield rows

    def scan(self) -> Iterator[Rows]:
        """Yield the rows of all windows, which stay, in pieces as for `take`."""
        ids = self._stat.table["id"]
        ids = ids[ids != 0]
        records = self._stat.lookup(ids)
        sizes = np.cumsum(records["rows"].astype(np.int64) + 1)
        most = max(1, self._budget.piece // self._segments.row_bytes)
        begin = 0
        while begin < len(ids):
            done = int(sizes[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(sizes, done + most, "right")))
            _, rows = self._read_piece(ids[begin:end], ids[end:])
            yield rows
            if self._account.reserved > self._account.limit:
                self._evict()
                self._account.force(self._memory())
            begin = end

    def _read_piece(self, part: NDArray[np.uint64], later: NDArray[np.uint64]) -> tuple[NDArray[Any], Rows]:
        """Read the records and the rows of windows; windows of `later` are loaded along with missing ones."""
        records = self._stat.lookup(part)
        missing = part[(records["rows"] > 0) & (records["chunk"] == kernels.NOWHERE)]
        if len(missing):
            self._load_windows(missing, later)
            records = self._stat.lookup(part)
        rows_at, heaps_at = self._collect(records)
        return records, Rows(*gather_rows(rows_at, heaps_at, self.layout.width, kernel_layout(self.layout).blobs))

    def _collect(self, records: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        buffer = self._buffer
        chunks = self._prefetched.addresses()
        arguments = (records, *chunks, address(buffer.words), address(buffer.heap), self.layout.width, buffer.following)
        nothing = np.empty(0, np.uint64)
        count = kernels.collect(*arguments, nothing, nothing)
        rows_at, heaps_at = np.empty(count, np.uint64), np.empty(count, np.uint64)
        if count:
            kernels.collect(*arguments, rows_at, heaps_at)
        return rows_at, heaps_at

    def _log_taken(self, hashes: NDArray[np.uint64], boundaries: NDArray[np.uint64]) -> None:
        """Record in the delta that windows were taken."""
        words = np.zeros((len(hashes), self.layout.width), np.uint64)
        words[:, HASH] = hashes
        words[:, META] = _TAKEN
        words[:, self._window] = boundaries
        self._delta_log.add(encode_rows(Rows(words, np.empty(0, np.uint8)), self.layout, True))
        self._ops += len(words)

    def seal(self) -> TableDelta:
        """End the batch, and return its appends and takes, in order, encoded."""
        if not self._ops:
            self._delta_log.add(
                encode_rows(Rows(np.empty((0, self.layout.width), np.uint64), np.empty(0, np.uint8)), self.layout, True)
            )
        pieces = self._delta_log.finish()
        delta = TableDelta(self._ops, pieces)
        self._sealed = True
        self._version += 1
        self._ops = 0
        self._backlog.add(self._version, delta.bytes)
        self._account.force(self._memory())
        self._budget.trim_if_needed()
        return delta

    def load(self, delta_rows: Rows, visible: HashRange = HashRange()) -> None:  # noqa: B008
        """Apply a delta during recovery; deltas come in the manifest's order.

        Rows outside `visible` are skipped, but count among the rows that segments cover (`TableManifest.skip`).
        """
        # Segments cover the first `skip` rows of the deltas behind `flushed`.
        covered = min(self._rows_to_skip, delta_rows.count)
        self._rows_to_skip -= covered
        delta_rows = delta_rows.take(slice(covered, None))
        words = delta_rows.words
        dead = (words[:, META] & _TAKEN) != 0
        cuts = {*(np.flatnonzero(np.diff(dead)) + 1).tolist(), *range(0, len(words), _CHUNK_ROWS), len(words)}
        for begin, end in pairwise(sorted(cuts)):
            own = inside(delta_rows.take(slice(begin, end)), visible).packed()
            if own.count and not dead[begin]:
                self._put(own)  # may first write a segment of earlier rows, so these rows count only afterwards
            elif own.count:
                self._replay_taken(own.words)
            self._ops += end - begin - own.count
        self._backlog.add(0, words.nbytes + len(delta_rows.heap))

    def _replay_taken(self, words: Words) -> None:
        """Replay that windows were taken."""
        ids = self._ids(words[:, HASH], words[:, self._window])
        records = self._stat.lookup(ids)
        known = records["id"] != 0
        self._segments.record_taken(ids[known], records["rows"][known])
        self._stat.remove(ids, self._prefetched.released)
        self._ops += len(words)

    # Memory

    def _memory(self) -> int:
        return self._stat.memory + self._buffer.memory + self._prefetched.memory + self._segments.memory

    def _make_room(self, count: int, long_bytes: int) -> None:
        buffer = self._buffer
        growth = self._stat.growth(count)
        needed = buffer.needed(count, long_bytes)
        most = self._write_buffer or self._account.limit * 2 // 5
        # A table that may not write segments keeps all rows, whatever the limit.
        if not self._writable:
            self._account.force(self._memory() - buffer.memory + needed + growth)
            self._stat.make_room(count)
            return
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
                # The records alone are too large, even if other tables release memory.
                if self._stat.memory + growth > self._budget.tables // 2:
                    raise outgrown_error()
                self._account.force(wanted)
        self._stat.make_room(count)

    def _evict(self) -> None:
        """Release the prefetch buffer."""
        table = self._stat.table
        table["chunk"][table["chunk"] >= 0] = kernels.NOWHERE
        self._prefetched.clear()

    # Segments

    def _freeze(self) -> None:
        """Turn the write buffer into a segment."""
        covered = Covered(self._version, self._ops)
        if self._sealed:  # deltas are being loaded, which follow those that the manifest covers
            covered = Covered(self._opened_at.version, self._opened_at.rows + self._ops)
        self._segments.write(self._buffer, covered)
        self._backlog.cover(self._version)  # all of them: the write buffer had all their rows

    # The predictive batch read

    def _load_windows(self, missing: NDArray[np.uint64], more: Sequence[int] | NDArray[np.uint64] = ()) -> None:
        """Load windows: the missing ones, those of `more` that have room, and those nearest to their trigger."""
        table = self._stat.table
        account = self._account
        room = max(0, account.limit - self._memory()) * 2 // 3 // self._segments.row_bytes
        rows = np.empty(len(missing), np.int64)
        kernels.mark_loading(table, missing, rows)
        room -= int(rows.sum())
        wanted = [missing]
        if len(more):
            ids = np.asarray(more, np.uint64)
            records = self._stat.lookup(ids)
            absent = (records["rows"] > 0) & (records["chunk"] == kernels.NOWHERE)
            ids, sizes = ids[absent], np.cumsum(records["rows"][absent].astype(np.int64))
            ids = ids[: int(np.searchsorted(sizes, room, "right"))]
            room -= int(sizes[len(ids) - 1]) if len(ids) else 0
            kernels.mark_loading(table, ids, np.empty(len(ids), np.int64))
            wanted.append(ids)
        # Without missing windows, the scan serves compaction only, and loads none.
        most = int(self._read_batch_ratio * self._stat.count) if len(missing) else 0
        near = np.empty(most, np.uint64)
        near = near[: kernels.nearest(table, most, max(0, room), near)] if most else near
        self._read_windows(np.concatenate([*wanted, near]))

    def _read_windows(self, ids: NDArray[np.uint64]) -> None:
        read = BatchRead(self._segments, self._stat, self.layout)
        try:
            rows, begins = read.rows(ids)
        finally:
            self._figures["fetched_bytes"] += read.bytes
        if len(ids):
            self._figures["loads"] += 1
            self._figures["loaded_rows"] += rows.count
            chunk = self._prefetched.add(rows, len(ids))
            kernels.set_chunk(self._stat.table, ids, begins, chunk)
            self._account.force(self._memory())
        read.compact()

    # The rest

    def manifest(self) -> TableManifest:
        """List the segments; the state is these and the deltas after `flushed`, except their first `skip` rows."""
        covered = self._segments.covered
        return TableManifest(self._segments.refs(), covered.version, self._stat.count, skip=covered.rows)

    def stats(self) -> dict[str, float]:
        """Return figures.

        `keys`: open windows. `bytes`: in memory and files. `hot_bytes`: in memory.
        Since the table was opened: `prefetch_hits`, `prefetch_misses`: windows taken with rows in segments that were
        loaded before, or not; `prefetch_hit_ratio`; `batch_reads`; `read_amplification`: rows loaded per row taken;
        `fetched_bytes`; `compactions`.
        In this batch: `read_ahead_hits`, `read_ahead_misses`: as the prefetch figures; `fetched_rows`: rows loaded;
        `taken_rows`: rows taken that were in segments.
        """
        figures = self._figures
        now = {name: figures[name] - self._before[name] for name in figures}
        hits, misses = figures["hits"], figures["misses"]
        return {
            "keys": self._stat.count,
            "bytes": self._memory() + self._segments.bytes,
            "hot_bytes": self._memory(),
            "prefetch_hits": hits,
            "prefetch_misses": misses,
            "prefetch_hit_ratio": hits / max(1, hits + misses),
            "batch_reads": figures["loads"],
            "read_amplification": figures["loaded_rows"] / max(1, figures["taken_rows"]),
            "fetched_bytes": figures["fetched_bytes"],
            "compactions": self._segments.compactions,
            "read_ahead_hits": now["hits"],
            "read_ahead_misses": now["misses"],
            "fetched_rows": now["loaded_rows"],
            "taken_rows": now["taken_rows"],
        }

    def close(self) -> None:
        """Close the table and release all memory."""
        self._segments.close()
        self._evict()
        self._buffer.clear(shrink=True)
        self._account.close()

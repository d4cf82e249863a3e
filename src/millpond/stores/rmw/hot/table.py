"""The hot table: the mutable rows of one table, in memory, with an index in hash order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.hot_table import extract, sweep
from millpond.kernels.hot_table import state as hs
from millpond.kernels.hot_table.arena import long_bytes, long_bytes_at, relocate
from millpond.kernels.hot_table.expiry import find
from millpond.kernels.hot_table.index import walk
from millpond.kernels.hot_table.upsert import (
    BLOCK,
    TOUCH_NONE,
    overwrite,
    raise_access_times,
    remove,
    settle,
    touch_rows,
    upsert,
)
from millpond.kernels.pointers import address, data_of
from millpond.layout import META, Bytes, HashRange, RowLayout, Rows, Words
from millpond.stores.memory.heap import Heap
from millpond.stores.memory.reserved_mapping import ReservedMapping
from millpond.stores.protocol import FoundRows, LocatedRows
from millpond.stores.rmw.hot.index import HotIndex

# Row ids have 32 bits.
_MAX_ROWS = (1 << 32) - 2
# Bytes of address space and rows, at least: in a slot with little memory, the rows of one call may exceed the memory.
_MIN_SPACE = 64 << 20
_MIN_CAPACITY = 1 << 16
_LIST_BYTES = 8  # bytes of a row in the lists of free and of touched rows
_INDEX_BYTES = 24  # bytes of a row in the index, at most, except while it grows
_WASTED_DIVISOR = 4  # divisor: the share of long values' bytes that is freed and not reusable yet, on average
_TOMBSTONE_DIVISOR = 8  # divisor: the share of tombstones among the rows from which they are freed
_SAMPLE_ROWS = 8192  # rows sampled to choose the rows to evict


class HotTable:
    """Rows addressed by row id, in one slab whose address never changes.

    Args:
        layout: of the rows.
        initial: a whole row: the words of a fresh row other than its key.
        range_: the hash range of the table.
        space: bytes that rows and long values may take together, at most.

    Attributes:
        words: the slab, one row id per line; lines may be longer than a row.
        heap: the long values.
        moves: number of times that rows got other ids. evictions: number of evictions so far.
    """

    def __init__(self, layout: RowLayout, initial: Words, range_: HashRange, space: int) -> None:
        self.layout = layout
        shape = kernel_layout(layout)
        self._references, self._blobs = shape.references, shape.blobs
        self._initial = np.array(initial, np.uint64, copy=True).reshape(layout.width)
        # Pad rows of seven words to a cache line of eight, or most of them would straddle two.
        width = layout.width + (layout.width % 8 == 7)
        space = max(space, _MIN_SPACE)
        capacity = min(max(space // (8 * width), _MIN_CAPACITY), _MAX_ROWS)
        self._slab = ReservedMapping(capacity * width * 8)
        self._free = ReservedMapping(capacity * 4)
        self._touched = ReservedMapping((capacity + 1) * 4)
        self._free_ids: NDArray[np.uint32] = self._free.view(np.uint32)
        self._touched_ids: NDArray[np.uint32] = self._touched.view(np.uint32)
        self.words: Words = self._slab.view(np.uint64)[: capacity * width].reshape(capacity, width)
        self.state = np.zeros(hs.SIZE, np.int64)
        # Twice the space: freed chunks take room until they are reused or packed, and values are accounted for only
        # after they are written.
        self.heap = Heap(self.state, 2 * space if layout.bytes_columns else 0)
        self._scratch = np.empty(2 * BLOCK, np.uint64)
        state = self.state
        state[hs.SLAB] = self._slab.address
        state[hs.STRIDE] = width * 8
        state[hs.WIDTH] = layout.width
        state[hs.INITIAL] = address(self._initial)
        state[hs.KEY_START] = layout.key_start
        state[hs.KEY_STOP] = layout.key_stop
        state[hs.LOST] = hs.NOTHING_LOST
        state[hs.KEY_NULLS] = np.array(shape.null_mask, np.uint64).view(np.int64)
        self._write_range(range_)
        self.index = HotIndex(state)
        self._clean_tombstones = 0  # tombstones that are in runs, roughly
        self._filed: ReservedMapping | None = None
        self._list_bytes = _LIST_BYTES
        self.moves = self.evictions = 0

    def _write_range(self, range_: HashRange) -> None:
        state = self.state
        state[hs.LOW] = np.array(range_.lo, np.uint64).view(np.int64)
        span = range_.hi - range_.lo - 1
        state[hs.SHIFT] = max(0, span.bit_length() - 32)
        state[hs.LAST] = span >> int(state[hs.SHIFT])

    # Figures

    @property
    def count(self) -> int:
        """Number of rows in the table."""
        return int(self.state[hs.COUNT])

    @property
    def dirty(self) -> int:
        """Number of rows changed since they were last copied into a run."""
        return int(self.state[hs.DIRTY_ROWS])

    @property
    def tombstones(self) -> int:
        """Number of tombstones among the rows."""
        return int(self.state[hs.DEAD])

    @property
    def expiring(self) -> bool:
        """Whether rows expire, so that their stamps are times of expiry."""
        return bool(self.state[hs.EXPIRY])

    @property
    def used_rows(self) -> int:
        """Number of rows that memory is in use for."""
        return int(self.state[hs.HIGH])

    @property
    def free_rows(self) -> int:
        """Number of rows that were used and are free again."""
        return int(self.state[hs.FREE])

    @property
    def row_room(self) -> int:
        """Number of rows that can be added before the address space ends."""
        return len(self.words) - int(self.state[hs.HIGH]) + self.free_rows

    def fits(self, keys: int, long_bytes: int) -> bool:
        """Return whether the address space has room for fresh rows of `keys` with `long_bytes` of long values."""
        return keys <= self.row_room and self.heap.used + long_bytes <= self.heap.capacity

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the slab."""
        return int(self.state[hs.STRIDE])

    @property
    def average_row_bytes(self) -> int:
        """Bytes of a row with its long values, on average."""
        return self.layout.width * 8 + self.heap.used // max(1, self.count)

    @property
    def row_cost(self) -> int:
        """Bytes of memory that a row takes, on average, including lists and index."""
        return self.row_cost_with((self.heap.used - self.heap.free) // max(1, self.count))

    def row_cost_with(self, long_bytes: int) -> int:
        """Return `row_cost` of rows with this number of bytes of long values each."""
        return self.row_bytes + self._list_bytes + _INDEX_BYTES + long_bytes + long_bytes // _WASTED_DIVISOR

    def growth_bytes(self, keys: int, long_bytes: int) -> int:
        """Return the additional memory that `keys` fresh rows with `long_bytes` bytes of long values may take."""
        rows = max(0, keys - self.free_rows) * (self.row_bytes + self._list_bytes)
        index = self.index.growth_bytes(keys) if keys > self.index.room else 0
        # Freed chunks are reused for values of similar length; half of them may not fit.
        values = max(0, long_bytes - self.heap.free // 2)
        return rows + index + values

    @property
    def memory(self) -> int:
        """Bytes of memory in use: rows ever used, index, arena, lists."""
        state = self.state
        return int(state[hs.HIGH]) * (self.row_bytes + self._list_bytes) + self.index.memory + self.heap.used

    # Rows

    def long_key_bytes(self, keys: Rows) -> int:
        """Return the arena bytes that the long key columns of keys take, at most."""
        return self._long_bytes(keys, self._blobs[: self.layout.key_bytes])

    def long_bytes(self, rows: Rows) -> int:
        """Return the arena bytes that the long values of whole rows take, at most."""
        return self._long_bytes(rows, self._blobs)

    def found_bytes(self, found: FoundRows) -> int:
        """Return the arena bytes that the long values of rows found in runs take, at most."""
        return int(long_bytes_at(found.rows_at, self._blobs)) if len(self._blobs) else 0

    def _long_bytes(self, rows: Rows, columns: NDArray[np.int64]) -> int:
        if not len(columns):
            return 0
        return int(long_bytes(address(rows.words), len(rows.words), rows.words.strides[0] // 8, columns))

    def upsert(
        self, keys: Rows, stamps: NDArray[np.int64] | int, touch: int, defer: bool
    ) -> tuple[LocatedRows, NDArray[np.int64]]:
        """Find or create the rows of keys; there must be room for all of them.

        Returns:
            The rows, and the positions of keys that were absent.
        """
        words = keys.words
        count = len(words)
        rows = np.empty(count, np.int64)
        created = np.empty(count, np.bool_)
        pending = np.empty(count, np.int64)
        constant = isinstance(stamps, (int, np.integer))
        self._slab.advise_huge_pages((int(self.state[hs.HIGH]) + count) * self.row_bytes)
        absent = upsert(
            self.state,
            self._references,
            self.heap.lists,
            self._free_ids,
            self._touched_ids,
            data_of(words),
            words.strides[0] // 8,
            count,
            data_of(keys.heap),
            0 if constant else address(stamps),  # type: ignore[arg-type]
            stamps if constant else 0,
            touch,
            defer,
            rows,
            created,
            pending,
            self._scratch,
        )
        if absent < 0:
            raise UsageError(
                f"A key's hash {int(words[-1 - absent, 0])} lies outside the range of the table's partition.",
                action="Route each row to the partition that owns its hash.",
            )
        self.index.advance(count)
        return LocatedRows(rows, created), pending[:absent]

    def fill_found(self, located: LocatedRows, pending: NDArray[np.int64], found: FoundRows, touch: int) -> None:
        """Fill fresh rows with the values that their keys have in runs.

        Args:
            located, pending: results of `upsert`.
            found: rows of the upserted keys that the runs hold.
            touch: as for `upsert`.
        """
        fresh = np.searchsorted(pending, found.positions)
        # The kernel walks fresh and found rows in step, so the found ones must ascend.
        order = np.argsort(fresh, kind="stable")
        settle(
            self.state,
            self._references,
            self.heap.lists,
            self._touched_ids,
            located.rows,
            located.created,
            pending,
            fresh[order],
            found.rows_at[order],
            found.heaps_at[order],
            touch,
        )

    def find(self, keys: Rows) -> NDArray[np.int64]:
        """Return the row ids of keys, −1 for those that are not in the table."""
        rows = np.empty(len(keys.words), np.int64)
        words = keys.words
        find(self.state, self._references, address(words), words.strides[0] // 8, address(keys.heap), rows)
        return rows

    def allocate_expiry_list(self) -> NDArray[np.uint32]:
        """Allocate a list with room for every row; from now on each row counts 4 bytes of memory more."""
        self._filed = ReservedMapping((len(self.words) + 1) * 4)
        self._list_bytes += 4
        return self._filed.view(np.uint32)

    def load(self, rows: Rows) -> None:
        """Load whole rows, replacing rows of equal keys, as dirty rows. There must be room for all of them."""
        located, _ = self.upsert(rows, 0, TOUCH_NONE, True)
        words = rows.words
        overwrite(
            self.state,
            self._references,
            self.heap.lists,
            located.rows,
            address(words),
            words.strides[0] // 8,
            address(rows.heap),
        )

    def touch(self, rows: NDArray[np.int64]) -> None:
        """Mark rows as changed by the batch."""
        touch_rows(self.state, self._touched_ids, rows)

    def remove(self, rows: NDArray[np.int64]) -> int:
        """Turn rows into tombstones; returns the number of rows that were live before."""
        return int(remove(self.state, self._references, self.heap.lists, self._touched_ids, rows))

    def live(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Filter out tombstones."""
        return ids[(self.words[ids, META] & np.uint64(hs.TOMBSTONE)) == 0] if self.tombstones else ids

    def stamp(self, hashes: NDArray[np.uint64], stamps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Raise the stamps of the rows with these hashes (packed); returns a mask of the hashes that have rows."""
        present = np.empty(len(hashes), np.uint8)
        raise_access_times(self.state, hashes, stamps, present)
        return present.view(np.bool_)

    # Copies

    def touched_ids(self) -> NDArray[np.uint32]:
        """Return the rows changed in this batch, in the order of their first change."""
        return self._touched_ids[: int(self.state[hs.TOUCHED_ROWS])]

    def reset_touched(self) -> None:
        """Start a new list of touched rows, whose flags have been cleared."""
        self.state[hs.TOUCHED_ROWS] = 0

    def clear_touched(self) -> None:
        """Clear the touched flag of every row that has it."""
        for ids in self.walk(_SAMPLE_ROWS, hs.TOUCHED):
            self.words[ids, META] &= ~np.uint64(hs.TOUCHED)

    def clear_stamps(self) -> None:
        """Clear the stamps of all rows."""
        for ids in self.walk(_SAMPLE_ROWS):
            self.words[ids, META] &= np.uint64(hs.FLAGS)

    def copy(self, ids: NDArray[np.uint32], *, keep: int = 0, clear: int = 0, compact: bool = True) -> Rows:
        """Copy rows.

        Args:
            ids: row ids. keep: flags to keep in the copies.
            clear: flags, which all of the rows have, to clear in the table.
            compact: copy long values too, so that the copies do not depend on the table.
        """
        words = np.empty((len(ids), self.layout.width), np.uint64)
        extract.gather(self.state, ids, words, keep, clear)
        if clear & hs.DIRTY:
            self.state[hs.DIRTY_ROWS] -= len(ids)
            if keep & hs.TOMBSTONE and self.tombstones:
                self._clean_tombstones += int(np.count_nonzero(words[:, META] & np.uint64(hs.TOMBSTONE)))
        if not compact:
            return Rows(words, self.heap.data[: int(self.state[hs.HEAP_TOP])])
        return Rows(words, self._compact_heap(words))

    def _compact_heap(self, words: Words) -> Bytes:
        if not len(self._blobs):
            return np.empty(0, np.uint8)
        stride = words.shape[1]
        size = long_bytes(address(words), len(words), stride, self._blobs)
        heap = np.empty(size, np.uint8)
        used = relocate(address(words), len(words), stride, self._blobs, address(self.heap.data), heap, 0)
        return heap[:used]

    def walk(self, size: int, flag: int = 0, start: int = 0) -> Iterator[NDArray[np.uint32]]:
        """Yield row ids in hash order, at most `size` at a time, of all rows or of those with a flag.

        The rows must not change meanwhile, except for their flags.

        Args:
            size: of a piece. flag: a flag to filter by (0: all rows).
            start: a hash; rows before it are skipped, except for a few close to it.
        """
        self.index.finish_growing()
        slot = self.index.home(start)
        while slot >= 0:
            ids = np.empty(size, np.uint32)
            count = sweep.walk_flagged(self.state, slot, flag, ids) if flag else walk(self.state, slot, ids)
            slot = int(self.state[hs.WALK])
            if count:
                yield ids[:count]

    # Making room

    def set_range(self, range_: HashRange) -> None:
        """Switch to another hash range. The table must be empty."""
        if self.count:
            raise UsageError("A table that holds rows cannot cover another range.", action="Evict them first.")
        self._write_range(range_)
        self.index.rescale()

    def evict(self, share: float, rows: int) -> Iterator[Rows]:
        """Evict about a share of the rows: lowest stamps first, rows changed in this batch last.

        The table must not be used before the last piece is taken.

        Args:
            share: between 0 and 1.
            rows: rows in a piece, at most.

        Yields:
            The dirty ones among the evicted rows, in hash order, with their flags except the dirty flag.
        """
        self.evictions += 1
        self.index.finish_growing()
        rank, ties = self._threshold(share)
        slot = 0
        # A piece never needs more than all long values together, even if a few are very long.
        room = min(2 * rows * (self.heap.used // max(1, self.count) + 64), self.heap.used) if len(self._blobs) else 0
        while slot >= 0:
            words = np.empty((rows, self.layout.width), np.uint64)
            heap = np.empty(room, np.uint8)
            count = sweep.evict(self.state, self._blobs, self.heap.lists, self._free_ids, slot, rank, ties, words, heap)
            slot = int(self.state[hs.WALK])
            if count:
                yield Rows(words[:count], heap[: int(self.state[hs.COPIED])])
            else:
                room *= 2  # a single row had more long values than fit
        ids = self.touched_ids()
        # Evicted rows leave the list of touched rows; `MemoryManager.spilled` has them.
        left = ids[(self.words[ids, META] & np.uint64(hs.TOUCHED)) != 0]
        self._touched_ids[: len(left)] = left
        self.state[hs.TOUCHED_ROWS] = len(left)

    def drop_tombstones(self, *, dirty: bool) -> None:
        """Free tombstones that are in runs, if there are many.

        Args:
            dirty: also free tombstones that are in no run yet; allowed if no run holds older versions of their keys.
        """
        if (self.tombstones if dirty else self._clean_tombstones) * _TOMBSTONE_DIVISOR > self.count:
            self.index.finish_growing()
            kept = hs.TOUCHED if dirty else hs.TOUCHED | hs.DIRTY
            sweep.drop_dead(self.state, self._blobs, self.heap.lists, self._free_ids, kept)
            self._clean_tombstones = 0

    def _threshold(self, share: float) -> tuple[int, int]:
        """Choose which rows to evict, from a sample.

        Returns:
            The rank below which rows are evicted; and of rows with exactly this rank, the share (of 2³²) to evict.
        """
        ranks = np.empty(_SAMPLE_ROWS, np.uint64)
        step = max(1, int(self.state[hs.SLOTS]) // _SAMPLE_ROWS)
        ranks = np.sort(ranks[: sweep.sample_ranks(self.state, step, ranks)])
        if share >= 1 or not len(ranks):
            return 1 << 63, 0
        rank = ranks[int(len(ranks) * share)]
        below, upto = np.searchsorted(ranks, rank, "left"), np.searchsorted(ranks, rank, "right")
        return int(rank), int((len(ranks) * share - below) / (upto - below) * (1 << 32))

    def pack_rows(self) -> None:
        """Move the rows together and release the memory behind them; row ids change. No row may be touched."""
        self.index.shrink()
        self.index.finish_growing()
        count = self.count
        free = self._free_ids[: self.free_rows]
        below = free[free < count]
        self._free_ids[: len(below)] = below
        self.state[hs.FREE] = len(below)
        high = int(self.state[hs.HIGH])
        sweep.move_rows(self.state, self._free_ids, count)
        self.state[hs.HIGH] = count
        self.moves += 1
        self._slab.release(count * self.row_bytes, high * self.row_bytes)
        self._free.release(0, len(free) * 4)

    def pack_values(self) -> None:
        """Move the long values together and release the memory of freed ones."""
        self.index.finish_growing()
        self.heap.switch_half()
        sweep.move_values(self.state, self._blobs)
        self.heap.release_old_half()

    def close(self) -> None:
        """Release all memory."""
        for mapping in (self._slab, self._free, self._touched, self._filed):
            if mapping is not None:
                mapping.close()
        self.heap.close()
        self.index.close()

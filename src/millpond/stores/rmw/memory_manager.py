"""Memory of a table: how many rows may be added, and which have to be evicted."""

from __future__ import annotations

import numpy as np

from millpond.errors import SettingError
from millpond.kernels.hot_table.state import TOUCHED
from millpond.layout import META, HashRange, Rows
from millpond.stores.memory.budget import Account
from millpond.stores.rmw.eviction_buffer import EvictedRun, EvictionBuffer
from millpond.stores.rmw.hot.table import HotTable
from millpond.stores.runs.run_set import RunSet

_ADVANCE_KEYS = 16384  # keys for which room is made in advance if memory is plentiful
_MIN_EVICTED_SHARE = 0.2  # share of the rows that one eviction moves out, at least
_MIN_PIECE_BYTES = 1 << 18  # bytes of an evicted piece, at least
_MIN_SAMPLE_ROWS = 256  # rows needed to estimate the cost of a row
_MIN_PACK_BYTES = 1 << 20  # bytes of freed chunks from which packing pays


class MemoryManager:
    """The memory of one table.

    The memory that runs hold permanently is subtracted first. Three quarters of the remainder are for hot rows, the
    rest for rows in the eviction buffer.

    Attributes:
        complete: whether every key of the table is in memory, so that a key not found there is new.
        spilled: runs with rows that the running batch had changed before they were evicted, oldest first.
    """

    def __init__(
        self,
        hot: HotTable,
        runs: RunSet,
        buffer: EvictionBuffer | None,
        account: Account,
        *,
        second_chances: bool = False,
    ) -> None:
        self._hot = hot
        self._runs = runs
        self._eviction_buffer = buffer
        self._account = account
        self._second_chances = second_chances
        self.complete = runs.rows == 0
        self.spilled: list[EvictedRun] = []
        self._batch_evictions = 0  # evictions in this batch
        self._keys_present = 0  # keys known to be in memory, for which no room is needed
        self._spare_keys = 0  # keys that may be added without making room
        self._spare_bytes = 0  # bytes of long values that may be added without making room
        self._prefetched_bytes = 0  # bytes of prefetched rows, when room was last made
        self._row_cost = 0  # bytes of a row, as last seen
        self._value_margin = 0  # largest number of bytes of long values written between two upserts so far

    @property
    def capacity(self) -> int:
        """Number of rows that the table has memory for, based on the size of its rows, or of rows evicted before."""
        self._update_row_cost()
        return self._capacity(self._row_cost or self._hot.row_cost)

    def capacity_for(self, rows: Rows) -> int:
        """Return `capacity`, based on the size of these rows if they are larger than those seen so far."""
        cost = self._hot.row_cost_with(self._hot.long_bytes(rows) // rows.count)
        return min(self.capacity, self._capacity(cost))

    def _capacity(self, row_cost: int) -> int:
        return max(0, self._account.limit - self._fixed_bytes()) * 3 // 4 // row_cost

    def _update_row_cost(self) -> None:
        if self._hot.count >= _MIN_SAMPLE_ROWS:
            self._row_cost = self._hot.row_cost

    def restrict(self, range_: HashRange) -> None:
        """Evict all rows, so that the whole memory is free for rows of one hash range."""
        while self._hot.count and self._eviction_buffer is not None:
            self.evict(self._eviction_buffer, 1.0)  # may leave a few rows if a piece is full
        if self._hot.heap.used:
            self._hot.pack_values()
        self._hot.set_range(range_)
        self._spare_keys = self._spare_bytes = self._batch_evictions = self._keys_present = 0

    def expect_present(self, keys: int) -> None:
        """Note that the next `keys` keys for which room is requested are in memory already."""
        self._keys_present = keys

    def make_room(self, keys: int, long_bytes: int) -> None:
        """Make room for `keys` fresh rows with `long_bytes` bytes of long keys."""
        if 0 < keys <= self._keys_present:
            self._keys_present -= keys
            # No eviction is needed. Should other keys come, the index must still have room for them.
            if keys > self._hot.index.room:
                self._hot.index.grow(keys)
            if self._hot.fits(keys, long_bytes):
                return
        self._keys_present = 0
        # Prefetched rows count among the memory of runs: when they grow, hot rows have less room.
        prefetched = self._runs.prefetched_memory
        spare = keys <= self._spare_keys and long_bytes <= self._spare_bytes
        # The kernels do not check the address space, so it is checked whatever is spare.
        if not spare or prefetched > self._prefetched_bytes or not self._hot.fits(keys, long_bytes):
            self._prefetched_bytes = prefetched
            self._find_room(keys, long_bytes)
        self._spare_keys -= keys
        self._spare_bytes -= long_bytes

    def reserve_values(self, long_bytes: int) -> None:
        """Account for `long_bytes` bytes of long values that are about to be written to existing rows."""
        hot = self._hot
        hot.heap.reserve(long_bytes)
        if not hot.fits(0, long_bytes):
            raise self._too_small()
        self._spare_bytes -= long_bytes
        self._value_margin = max(self._value_margin, long_bytes)

    def _find_room(self, keys: int, long_bytes: int) -> None:
        hot = self._hot
        long_bytes += self._value_margin
        if not self._reserve(hot.growth_bytes(max(keys, _ADVANCE_KEYS), long_bytes)):
            # Each eviction in a batch adds a run to search until the batch ends, so each evicts more than the last.
            share = min(1.0, _MIN_EVICTED_SHARE * (1 + self._batch_evictions))
            while not self._reserve(hot.growth_bytes(keys, long_bytes)):
                if self._eviction_buffer is None or not hot.count:
                    self._account.force(self._needed_bytes(hot.growth_bytes(keys, long_bytes)))
                    break
                self._evict_for(self._eviction_buffer, keys, long_bytes, share)
                share *= 2
        if keys > hot.index.room:
            hot.index.grow(keys)
        if not hot.fits(keys, long_bytes):
            raise self._too_small()
        hot.heap.reserve(long_bytes)
        spare = max(0, (self._account.reserved - self._fixed_bytes()) * 3 // 4 - hot.memory)
        if hot.layout.bytes_columns:
            # Half of the spare memory is for rows, half for their long values.
            spare //= 2
            self._spare_bytes = max(long_bytes, spare + hot.heap.free // 2)
        self._spare_keys = max(keys, min(hot.index.room, hot.row_room, hot.free_rows + spare // (hot.row_bytes + 8)))

    def _fixed_bytes(self) -> int:
        return self._runs.memory - (self._eviction_buffer.memory if self._eviction_buffer is not None else 0)

    def _needed_bytes(self, growth: int) -> int:
        # Hot rows get three quarters of the account; the last quarter is for the eviction buffer.
        return self._fixed_bytes() + (self._hot.memory + growth) * 4 // 3

    def _reserve(self, growth: int) -> bool:
        return self._account.reserve(self._needed_bytes(growth))

    def _evict_for(self, buffer: EvictionBuffer, keys: int, long_bytes: int, share: float) -> None:
        """Evict at least a share of the rows, and enough to make room for the keys and long values."""
        hot = self._hot
        # With margins: the threshold of an eviction comes from a sample of the rows.
        share = max(share, 1.1 * (keys - hot.free_rows) / hot.count)
        if long_bytes:
            share = max(share, 1.2 * long_bytes / max(1, hot.heap.used))
        self.evict(buffer, min(1.0, share))
        heap = hot.heap
        if heap.free > max(_MIN_PACK_BYTES, heap.used // 2):
            hot.pack_values()

    def evict(self, buffer: EvictionBuffer, share: float) -> None:
        """Move a share of the rows to the eviction buffer."""
        hot = self._hot
        # From now on, an absent key may be in a run.
        self.complete = False
        self._batch_evictions += 1
        self._update_row_cost()
        # Based on the reserved memory, not on the memory in use: many small runs take many requests to search.
        buffers = max(2 * _MIN_PIECE_BYTES, (self._account.reserved - self._fixed_bytes()) // 4, hot.memory // 3)
        piece = max(_MIN_PIECE_BYTES, buffers // 3)
        row_bytes = hot.average_row_bytes
        for rows in hot.evict(share, max(64, piece // row_bytes)):
            # Back-pressure: wait for the writers, so that evicted rows cannot fill the memory that was just freed.
            buffer.drain(max(0, buffers - rows.words.nbytes - rows.heap.nbytes))
            evicted = buffer.add(rows)
            if (rows.words[:, META] & np.uint64(TOUCHED)).any():
                self.spilled.append(evicted)
        if self._second_chances and not hot.expiring:
            hot.clear_stamps()

    def shrink_to_limit(self) -> None:
        """Shrink to the current limit, and release fragmented memory; called between batches."""
        hot, buffer = self._hot, self._eviction_buffer
        limit = self._account.limit
        if buffer is not None and self._account.reserved > limit and hot.count:
            over = 1 - limit / self._account.reserved
            self.evict(buffer, min(1.0, over + _MIN_EVICTED_SHARE / 2))
            hot.pack_rows()
            self._pack_values()
            self._account.force(self._needed_bytes(0))
        elif hot.heap.free > max(_MIN_PACK_BYTES, hot.heap.used // 2):
            self._pack_values()
        self._spare_keys = self._spare_bytes = self._batch_evictions = self._keys_present = 0

    def _pack_values(self) -> None:
        if self._hot.layout.bytes_columns:
            self._hot.pack_values()

    @staticmethod
    def _too_small() -> SettingError:
        return SettingError(
            "The state that has to be in memory at once outgrew it.", action="Raise spark.millpond.slot.memory."
        )

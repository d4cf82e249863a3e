"""Cache of rows that can be fetched again: kept while memory lasts, then dropped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.hot_table.state import ACCESS_TIME_SHIFT
from millpond.layout import HASH, META, HashRange, RowLayout, Rows, TableSchema, Words
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.hot.table import HotTable

_MIN_EVICTED_SHARE = 0.2
"""Share of the rows that an eviction drops, at least."""

_EVICTION_ROWS = 4096  # rows copied at a time while rows are evicted
_ADD_ROWS = 8192
"""Rows added at a time."""


class CacheTable:
    """A cache of rows by key that drops the least recently used rows when memory is short. Not thread-safe.

    Args:
        schema: the stored columns. initial: the words of a fresh row.
        budget: the memory shared with the tables of the slot.
        range_: the hash range of the cache.

    Attributes:
        layout: of the rows.
        max_rows: number of rows, at most.
    """

    def __init__(self, schema: TableSchema, initial: Words, budget: MemoryBudget, range_: HashRange) -> None:
        self.layout = RowLayout(schema)
        self.max_rows = 1 << 31
        self._hot = HotTable(self.layout, initial, range_, budget.total)
        self._account = budget.open()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._hot.count

    @property
    def memory(self) -> int:
        """Bytes of memory that the rows take."""
        return self._hot.memory

    def find(self, keys: Rows, stamp: int) -> NDArray[np.int64]:
        """Return the row ids of keys, valid until `add`; -1 for keys that are not cached.

        Args:
            keys: with hash, nulls and key columns. stamp: the access time; it never moves back.
        """
        rows = self._hot.find(keys)
        self.stamp(keys.word(HASH), stamp)
        return rows

    def stamp(self, hashes: Words, stamp: int) -> None:
        """Set the access time of the rows with these hashes."""
        self._hot.stamp(hashes, np.full(len(hashes), stamp))

    def copy(self, ids: NDArray[np.int64]) -> Rows:
        """Copy rows with their long values."""
        return self._hot.copy(ids.astype(np.uint32))

    def add(self, rows: Rows, stamp: int) -> int:
        """Add whole rows, replacing rows of equal keys, as far as there is room.

        Returns:
            The number of rows added, which are the first ones.
        """
        rows.words[:, META] = np.uint64(stamp << ACCESS_TIME_SHIFT)
        count = min(rows.count, self.max_rows)
        for start in range(0, count, _ADD_ROWS):
            piece = rows.take(slice(start, min(start + _ADD_ROWS, count)))
            if not self._make_room(piece):
                return start
            self._hot.load(piece)
        return count

    def _make_room(self, rows: Rows) -> bool:
        """Make room for rows, within the memory and the row limit. Returns False if that is impossible."""
        hot = self._hot
        long_bytes = hot.long_bytes(rows)
        share = _MIN_EVICTED_SHARE
        while hot.count + rows.count > self.max_rows or not self._reserve(rows.count, long_bytes):
            if not hot.count:
                return False
            for _ in hot.evict(min(1.0, share), _EVICTION_ROWS):
                pass  # evicted rows are dropped: they can be fetched again
            if hot.heap.free > hot.heap.used // 2:
                hot.pack_values()
            # Evict twice as much each time, so that few rounds suffice.
            share *= 2
        if rows.count > hot.index.room:
            hot.index.grow(rows.count)
        hot.heap.reserve(long_bytes)
        return hot.fits(rows.count, long_bytes)

    def _reserve(self, rows: int, long_bytes: int) -> bool:
        return self._account.reserve(self._hot.memory + self._hot.growth_bytes(rows, long_bytes))

    def shrink_to_limit(self) -> None:
        """Release memory that other tables are short of; called between batches."""
        # Evict a margin beyond the excess, or the next rows would cause an eviction at once.
        over = 1 - self._account.limit / max(1, self._account.reserved)
        if over > 0 and self._hot.count:
            for _ in self._hot.evict(min(1.0, over + _MIN_EVICTED_SHARE / 2), _EVICTION_ROWS):
                pass
            self._hot.pack_rows()
            if self.layout.bytes_columns:
                self._hot.pack_values()
            self._account.force(self._hot.memory)

    def close(self) -> None:
        """Release all memory."""
        self._hot.close()
        self._account.close()

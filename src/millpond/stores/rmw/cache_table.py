"""Rows that could be had again from elsewhere: in memory as long as there is room, then dropped."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.hot_table.state import STAMP_SHIFT
from millpond.layout import HASH, META, HashRange, RowLayout, Rows, TableSchema, Words
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.rmw.hot_table import HotTable

_SHARE = 0.2
"""Of the rows leave together, at least."""

_PIECE = 4096
_ADDED = 8192
"""Rows that are added at once."""


class CacheTable:
    """A table of rows by key that forgets those with the earliest stamps when memory is short. Not thread-safe.

    Args:
        schema: the stored columns. initial: the words of a fresh row.
        budget: the memory that it shares with the tables of its slot.
        range_: the hashes that it holds.

    Attributes:
        layout: of the rows.
        most: how many rows it holds at most.
    """

    def __init__(self, schema: TableSchema, initial: Words, budget: MemoryBudget, range_: HashRange) -> None:
        self.layout = RowLayout(schema)
        self.most = 1 << 31
        self._hot = HotTable(self.layout, initial, range_, 2 * budget.total)
        self._account = budget.open()

    @property
    def rows(self) -> int:
        """How many there are."""
        return self._hot.count

    @property
    def memory(self) -> int:
        """Bytes that they take."""
        return self._hot.memory

    def find(self, keys: Rows, stamp: int) -> NDArray[np.int64]:
        """The ids of the rows of some keys, good until `add`; -1 for those that are not here.

        Args:
            keys: with hash, nulls and key columns. stamp: when they are used; it never moves back.
        """
        rows = self._hot.find(keys)
        self.stamp(keys.words[:, HASH], stamp)
        return rows

    def stamp(self, hashes: Words, stamp: int) -> None:
        """Say when the rows with some hashes will be used."""
        self._hot.stamp(np.ascontiguousarray(hashes), np.full(len(hashes), stamp))

    def copy(self, ids: NDArray[np.int64]) -> Rows:
        """Copies of rows with their long values."""
        return self._hot.copy(ids.astype(np.uint32))

    def add(self, rows: Rows, stamp: int) -> int:
        """Take whole rows, in place of others of the same keys, as far as there is room.

        Returns:
            How many were taken: the first ones.
        """
        rows.words[:, META] = np.uint64(stamp << STAMP_SHIFT)
        count = min(rows.count, self.most)
        for start in range(0, count, _ADDED):
            some = Rows(rows.words[start : min(start + _ADDED, count)], rows.heap)
            if not self._make_room(some):
                return start
            self._hot.load(some)
        return count

    def _make_room(self, rows: Rows) -> bool:
        """Make room, in memory and under the limit."""
        hot = self._hot
        long_bytes = hot.long_bytes(rows)
        share = _SHARE
        while hot.count + rows.count > self.most or not self._reserve(rows.count, long_bytes):
            if not hot.count:
                return False
            for _ in hot.evict(min(1.0, share), _PIECE):
                pass  # what leaves can be had again
            if hot.heap.free > hot.heap.used // 2:
                hot.pack_values()
            share *= 2
        if rows.count > hot.index.room:
            hot.index.grow(rows.count)
        hot.heap.reserve(long_bytes)
        return rows.count <= hot.row_room and hot.heap.used + long_bytes <= hot.heap.capacity

    def _reserve(self, rows: int, long_bytes: int) -> bool:
        return self._account.reserve(self._hot.memory + self._hot.growth(rows, long_bytes))

    def tidy(self) -> None:
        """Between batches: give memory back that others are short of."""
        over = 1 - self._account.limit / max(1, self._account.reserved)
        if over > 0 and self._hot.count:
            for _ in self._hot.evict(min(1.0, over + _SHARE / 2), _PIECE):
                pass
            self._hot.pack_rows()
            if self.layout.bytes_columns:
                self._hot.pack_values()
            self._account.force(self._hot.memory)

    def close(self) -> None:
        """Give all memory back."""
        self._hot.close()
        self._account.close()

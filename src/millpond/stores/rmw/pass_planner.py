"""Plan of a batch: processed at once, or in passes over hash ranges that each fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable

from millpond.stores.rmw.memory_manager import MemoryManager

_UNLIMITED_KEYS = 1 << 32  # more keys than any batch has
_BLOCK_KEYS = 16384  # keys processed together, at least, if memory allows
_MIN_BLOCK_KEYS = 1024  # keys processed together, at least, whatever the memory
_MAX_MISS_SHARE = 0.02  # share of missing keys below which nearly all keys count as in memory
_SORTED_PASSES = 2  # passes if all keys fit in memory: hash order avoids repeated reads of a block
_MIN_ROWS_TO_ORDER = 2048  # number of rows below which order does not matter


class PassPlanner:
    """Expectations of a table's next batch, learned from the last one.

    Args:
        memory: the table's memory.
        run_blocks: counts the blocks of all runs behind the table.

    Attributes:
        over_budget: whether the keys of the batch are expected not to fit in memory together.
        sweeping: whether more keys are missing than the runs have blocks, so that passes read every block anyway.
        lookups: keys of this batch that were looked up. misses: those that were not in memory.
    """

    def __init__(self, memory: MemoryManager, run_blocks: Callable[[], int]) -> None:
        self._memory = memory
        self._run_blocks = run_blocks
        self.over_budget = True
        self.sweeping = False
        self.lookups = self.misses = 0
        self._rows = 0  # rows of this batch, where its passes were asked for
        self._upserts = 0  # lookups of this batch that change the key's row
        self._changed_keys = 0
        self._arriving = 0  # keys that may come into memory, and for which the index has no room yet
        self._lookups_per_row = 1.0  # in the last batch; fewer where an operator folds a key's rows before it looks up
        self._miss_share = 1.0  # share of the last batch's keys that were not in memory
        self._distinct_share = 1.0  # share of the last batch's keys that differ from its other keys

    @property
    def in_memory(self) -> bool:
        """Whether nearly all keys are in memory."""
        return self._memory.complete or self._miss_share < _MAX_MISS_SHARE

    @property
    def block(self) -> int:
        """Number of keys to process together if rows are evicted; with more, they could evict each other."""
        capacity = self._memory.capacity
        return max(min(_BLOCK_KEYS, capacity), capacity // 4, _MIN_BLOCK_KEYS)

    @property
    def block_if_needed(self) -> int:
        """`block`, or no limit where nearly all keys are in memory."""
        return _UNLIMITED_KEYS if self.in_memory else self.block

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges for a batch.

        One, if nearly all keys are in memory. Few, if the missing ones fit in memory together: rows in hash order read
        each block of a run once. Otherwise as many as needed for each pass to fit.

        Args:
            rows: number of rows of the batch.
        """
        self._rows = rows
        lookups = rows * self._lookups_per_row
        # Estimate with a margin, as the next batch may have more missing or more distinct keys than the last.
        arriving = lookups * min(2 * self._miss_share, 1.25 * self._distinct_share)
        self.over_budget = not self._memory.complete and arriving > self._memory.capacity
        self.sweeping = self.over_budget and arriving > self._run_blocks()
        if self.over_budget:
            return math.ceil(lookups * self._distinct_share / self.block)
        self._arriving = int(arriving)
        return 1 if self.in_memory or rows < _MIN_ROWS_TO_ORDER else _SORTED_PASSES

    def take_arriving(self) -> int:
        """Return how many keys the next pass may bring into memory, and count them as provided for."""
        arriving = self.block if self.over_budget else self._arriving
        self._arriving = 0
        return arriving

    def count_lookups(self, keys: int, *, upserts: bool) -> None:
        """Count keys of this batch that were looked up, for reading or for an upsert."""
        self.lookups += keys
        self._upserts += keys if upserts else 0

    def seal(self, changed_keys: int) -> None:
        """Note how many different keys the batch has changed."""
        self._changed_keys = changed_keys

    def learn(self) -> None:
        """Learn from the batch that has ended, and reset the counters."""
        if self.lookups:
            self._miss_share = self.misses / self.lookups
            # Lookups for reading change no row, so changed keys tell the number of distinct keys only without them.
            only_upserts = self._upserts == self.lookups
            self._distinct_share = min(1.0, self._changed_keys / self.lookups) if only_upserts else 1.0
            if self._rows:
                self._lookups_per_row = min(1.0, self.lookups / self._rows)
        self.lookups = self.misses = self._upserts = self._rows = 0

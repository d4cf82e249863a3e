"""Lookup of keys in memory and in runs, and prefetching of keys that the next batch will look up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.hot_table.state import ACCESS_TIME_SHIFT, FRESH, TOMBSTONE
from millpond.kernels.hot_table.upsert import TOUCH_ALL, TOUCH_NONE
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, META, RowLayout, Rows, Words
from millpond.stores.protocol import FoundRows, LocatedRows
from millpond.stores.rmw.hot.table import HotTable
from millpond.stores.rmw.memory_manager import MemoryManager
from millpond.stores.rmw.pass_planner import PassPlanner
from millpond.stores.rmw.policy import PrefetchShare, Stamps
from millpond.stores.runs.prefetcher import Prefetcher, PrefetchFigures
from millpond.stores.runs.run_set import RunSet


class KeyLookup:
    """Looks keys up in the hot table, then in the runs behind it; rows found in runs are copied into memory.

    Args:
        layout: of the rows. hot: rows in memory. runs: the runs behind it. memory: makes room for rows.
        plan: counts lookups and misses. stamps: access times of rows, by the policy.
        prefetcher: reads hinted keys; None to ignore hints.
        share: share of the memory that prefetched keys may take.
    """

    def __init__(
        self,
        layout: RowLayout,
        hot: HotTable,
        runs: RunSet,
        memory: MemoryManager,
        plan: PassPlanner,
        stamps: Stamps,
        prefetcher: Prefetcher | None,
        share: PrefetchShare,
    ) -> None:
        self._layout = layout
        self._hot = hot
        self._runs = runs
        self._memory = memory
        self._plan = plan
        self._stamps = stamps
        self._prefetcher = prefetcher
        self._share = share
        self._not_prefetched = 0  # hinted keys not read, because the passes read every block anyway

    def upsert(self, keys: Rows, stamps: NDArray[np.int64] | int, mode: int) -> LocatedRows:
        """Find the rows of keys and make fresh ones for new keys (see `RmwTable.upsert`).

        Args:
            keys, stamps: as there. mode: which rows the batch changes (`TOUCH_*`).
        """
        if not self._hot.expiring:
            stamps = self._stamps.used(stamps)
        keys = keys.contiguous()
        count = len(keys.words)
        self._memory.make_room(count, self._hot.long_key_bytes(keys))
        # If every key is in memory, an absent key is new, and no run is searched.
        search = not self._memory.complete
        located, pending = self._hot.upsert(keys, stamps, mode, search)
        self._plan.misses += len(pending)
        if search and len(pending):
            found = self._search_runs(keys, pending)
            # Room first: the kernel that copies long values into the arena does not check for it.
            self._memory.reserve_values(self._hot.found_bytes(found))
            self._hot.fill_found(located, pending, found, mode)
        if mode != TOUCH_NONE:
            self._plan.count_lookups(count, upserts=mode == TOUCH_ALL)
        return located

    def find(self, keys: Rows, stamp: int, *, counted: bool) -> NDArray[np.int64]:
        """Find the rows of keys without making or changing any (see `RmwTable.find`)."""
        keys = keys.contiguous()
        count = len(keys.words)
        if not self._memory.complete:  # may evict rows, so it comes before the search
            self._memory.make_room(count, self._hot.long_key_bytes(keys))
        rows = self._hot.find(keys)
        absent = np.flatnonzero(rows < 0)
        if counted:
            self._plan.count_lookups(count, upserts=False)
            self._plan.misses += len(absent)
        if not self._memory.complete:
            if not self._hot.expiring:
                self._hot.stamp(keys.word(HASH), np.full(count, self._stamps.used(stamp)))
            if len(absent):
                found = self._search_runs(keys, absent)
                if len(found.positions):
                    rows[found.positions] = self._load_found(found, stamp)
        present = np.flatnonzero(rows >= 0)
        removed = (self._hot.words[rows[present], META] & np.uint64(TOMBSTONE | FRESH)) != 0
        rows[present[removed]] = -1
        return rows

    def prefetch(self, hashes: Words, stamp: int, needed: int) -> int:
        """Keep hinted keys in memory, and read the missing ones (see `RmwTable.prefetch`)."""
        if self._memory.complete:
            return 0
        hashes = np.unique(hashes)
        stamp = 0 if self._hot.expiring else self._stamps.hinted(stamp)
        # A higher access time keeps hinted rows in memory until their batch.
        present = self._hot.stamp(hashes, np.full(len(hashes), stamp))
        absent = hashes[~present]
        if self._plan.sweeping:
            self._not_prefetched += len(absent)
        elif self._prefetcher is not None:
            self._prefetcher.prefetch(absent, needed)
        return len(absent)

    @property
    def prefetches(self) -> PrefetchFigures:
        """Prefetch figures of the last batch."""
        return PrefetchFigures() if self._prefetcher is None else self._prefetcher.latest

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._stamps.begin(version)

    def seal(self, version: int) -> None:
        """End the batch that read state `version`, and close its prefetch figures."""
        if self._prefetcher is not None:
            self._prefetcher.end_batch(version)
            latest = self._prefetcher.latest
            self._share.learn(latest)
            self._prefetcher.latest = latest._replace(dropped=latest.dropped + self._not_prefetched)
        self._not_prefetched = 0

    def clear_figures(self) -> None:
        """Report no prefetches until the next batch."""
        if self._prefetcher is not None:
            self._prefetcher.latest = PrefetchFigures()

    def close(self) -> None:
        """End background reads."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def _search_runs(self, keys: Rows, pending: NDArray[np.int64]) -> FoundRows:
        """Look keys up in the runs, and take them out of the prefetcher's queue."""
        if self._prefetcher is not None:
            # First take the keys from the queue, or a background read could fetch them a second time.
            self._prefetcher.dequeue(keys.words[pending, HASH])
        return self._runs.lookup(keys, pending)

    def _load_found(self, found: FoundRows, stamp: int) -> NDArray[np.int64]:
        """Copy rows found in runs into memory, and return their ids."""
        self._memory.reserve_values(self._hot.found_bytes(found))
        shape = kernel_layout(self._layout)
        rows = Rows(*gather_rows(found.rows_at, found.heaps_at, shape.width, shape.blobs))
        stamps = (rows.words[:, META] >> np.uint64(ACCESS_TIME_SHIFT)).astype(np.int64)
        if not self._hot.expiring:
            # A row that was just read must not be the first to leave because its stored access time is old.
            stamps = np.maximum(stamps, stamp)
        located, pending = self._hot.upsert(rows, stamps, TOUCH_NONE, True)
        self._hot.fill_found(located, pending, FoundRows(pending, *addresses(*rows), (rows,)), TOUCH_NONE)
        return located.rows

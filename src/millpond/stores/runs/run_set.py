"""The immutable part of a table: hash-ordered runs, searched and scanned as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import MemorySource
from millpond.kernels.runs.search import DELETED
from millpond.layout import HashRange, RowLayout, Rows, Words
from millpond.stores.protocol import FoundRows
from millpond.stores.runs.merge import PIECE_ROWS, View, merge
from millpond.stores.runs.prefetched_rows import PrefetchedRows, hash_identifies_rows
from millpond.stores.runs.run import Query, Run, search_through


class RunSet:
    """The runs of one table, newest first.

    Args:
        layout: of their rows.
        runs: the runs, newest first.
        range_: the hash range of the table; scans skip rows outside it.

    Attributes:
        prefetched: prefetched rows of hinted keys.
    """

    def __init__(self, layout: RowLayout, runs: Sequence[Run] = (), range_: HashRange = HashRange()) -> None:  # noqa: B008
        self.layout = layout
        # Tuples are replaced, never changed, so that another thread sees a consistent set without the lock.
        self.runs = tuple(runs)
        self.range = range_
        self.prefetched: tuple[PrefetchedRows, ...] = ()
        self._lock = threading.Lock()  # for `start_prefetch`, which any thread may call

    @property
    def rows(self) -> int:
        """Rows in all runs, older versions and tombstones included."""
        return sum(run.rows for run in self.runs)

    @property
    def memory(self) -> int:
        """Bytes of memory that the runs hold."""
        return sum(run.memory for run in self.runs) + self.prefetched_memory

    @property
    def prefetched_memory(self) -> int:
        """Bytes of memory that prefetched rows hold."""
        return sum(prefetch.memory for prefetch in self.prefetched)

    def start_prefetch(self, hashes: Words, needed: int, expected: int = 0) -> PrefetchedRows | None:
        """Create a prefetch, which the caller reads (see `PrefetchedRows`); None if the runs do not allow it."""
        with self._lock:
            if not self.runs or not hash_identifies_rows(self.runs):
                return None
            prefetch = PrefetchedRows(self.runs, self.layout, hashes, needed, expected)
            self.prefetched = (*self.prefetched, prefetch)
            return prefetch

    def release_prefetched(self, version: int) -> list[PrefetchedRows]:
        """Release rows prefetched for batches before the one that reads `version`, and rows no longer needed.

        Rows that came too late for the batch that they were expected in stay for the next one.
        """
        return self._release(
            lambda prefetch: prefetch.needed < version or (prefetch.needed == version and prefetch.exhausted)
        )

    def release(self, prefetch: PrefetchedRows) -> None:
        """Release a prefetch."""
        self._release(lambda other: other is prefetch)

    def _release(self, chosen: Callable[[PrefetchedRows], bool]) -> list[PrefetchedRows]:
        with self._lock:
            released = [prefetch for prefetch in self.prefetched if chosen(prefetch)]
            self.prefetched = tuple(prefetch for prefetch in self.prefetched if not chosen(prefetch))
        for prefetch in released:
            prefetch.cancel()
        return released

    def add(self, run: Run) -> None:
        """Add a run that is newer than all others."""
        with self._lock:
            self.runs = (run, *self.runs)

    def replace(self, old: Sequence[Run], new: Sequence[Run]) -> None:
        """Replace neighbouring runs: a run in memory by its file, or inputs by the merged run."""
        position = self.runs.index(old[0])
        if self.runs[position : position + len(old)] != tuple(old):
            raise ValueError("the runs to replace are not neighbours of this set")
        for run in new:
            run.inherit_due_stamp(old)
        with self._lock:
            self.runs = (*self.runs[:position], *new, *self.runs[position + len(old) :])
            for prefetch in self.prefetched:
                if prefetch.first is old[0] and new:
                    # The new run holds the same rows, so the prefetch still stands for it.
                    prefetch.first = new[0]
                elif prefetch.first in old:  # its rows would hide newer ones now
                    prefetch.cancel()
            self.prefetched = tuple(prefetch for prefetch in self.prefetched if prefetch.first in self.runs)

    def lookup(self, keys: Rows, pending: NDArray[np.int64]) -> FoundRows:
        """Find the newest live version of keys.

        Args:
            keys: rows with the words hash, nulls and key columns filled, in this set's layout.
            pending: positions of the keys to look up.

        Returns:
            The rows found, in hash order of their keys.
        """
        query = Query.of(keys, pending)
        select = np.arange(len(query.probes.hashes), dtype=np.int32)
        prefetches = self.prefetched
        runs, begin = self.runs, 0
        for number, run in enumerate(runs):
            for prefetch in prefetches:
                if prefetch.first is run:
                    select = search_through(runs[begin:number], query, select)
                    begin = number
                    # Prefetched rows stand for all runs from `first` on, so only newer runs are searched before them.
                    select = prefetch.search(query, select)
        search_through(runs[begin:], query, select)
        hits = np.flatnonzero(query.probes.found_at > DELETED)
        return FoundRows(
            query.probes.order[hits], query.probes.found_at[hits], query.probes.found_heap[hits], query.pins
        )

    def scan(self, extra: Rows | None = None, size: int = PIECE_ROWS) -> Iterator[Rows]:
        """Yield all live rows in hash order, in pieces of about `size` rows.

        Args:
            extra: rows in hash order that are newer than every run, each key once.
            size: rows in a piece, roughly.
        """
        runs = [run.view for run in self.runs]
        if extra is not None:
            runs.insert(0, View(MemorySource(extra, self.layout, filtered=False)))
        return merge(
            runs, self.layout, drop_tombstones=True, lowest=self.range.lo, highest=self.range.hi - 1, size=size
        )

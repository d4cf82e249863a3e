"""The immutable part of a table: hash-ordered runs, searched and scanned as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import MemorySource
from millpond.kernels.runs.search import DELETED
from millpond.layout import HashRange, RowLayout, Rows, Words
from millpond.stores.protocol import Found
from millpond.stores.runs.fetched import Fetched, can_be_fetched
from millpond.stores.runs.merge import PIECE_ROWS, View, merge
from millpond.stores.runs.run import Query, Run, search_through


class RunSet:
    """The runs of one table, newest first.

    Args:
        layout: of their rows.
        runs: the runs, newest first.
        range_: the hash range of the table; scans skip rows outside it.

    Attributes:
        fetched: prefetched rows of hinted keys.
    """

    def __init__(self, layout: RowLayout, runs: Sequence[Run] = (), range_: HashRange = HashRange()) -> None:  # noqa: B008
        self.layout = layout
        self.runs = tuple(runs)
        self.range = range_
        self.fetched: tuple[Fetched, ...] = ()
        self._lock = threading.Lock()  # for `fetch`, which any thread may call

    @property
    def rows(self) -> int:
        """Rows in all runs, older versions and tombstones included."""
        return sum(run.rows for run in self.runs)

    @property
    def memory(self) -> int:
        """Bytes of memory that the runs hold."""
        return sum(run.memory for run in self.runs) + self.fetched_memory

    @property
    def fetched_memory(self) -> int:
        """Bytes of memory that prefetched rows hold."""
        return sum(fetched.memory for fetched in self.fetched)

    def fetch(self, hashes: Words, needed: int, expected: int = 0) -> Fetched | None:
        """Create a prefetch of hashes, which the caller reads (see `Fetched`); None if the runs do not allow it."""
        with self._lock:
            if not self.runs or not can_be_fetched(self.runs):
                return None
            fetched = Fetched(self.runs, self.layout, hashes, needed, expected)
            self.fetched = (*self.fetched, fetched)
            return fetched

    def drop_fetched(self, version: int) -> list[Fetched]:
        """Release rows prefetched for batches before the one that reads `version`, and rows no longer needed.

        Rows that came too late for the batch that they were expected in stay for the next one.
        """
        return self._release(lambda one: one.needed < version or (one.needed == version and one.exhausted))

    def release(self, fetched: Fetched) -> None:
        """Release a prefetch."""
        self._release(lambda one: one is fetched)

    def _release(self, which: Callable[[Fetched], bool]) -> list[Fetched]:
        with self._lock:
            gone = [fetched for fetched in self.fetched if which(fetched)]
            self.fetched = tuple(fetched for fetched in self.fetched if not which(fetched))
        for fetched in gone:
            fetched.give_up()
        return gone

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
            run.inherit(old)
        with self._lock:
            self.runs = (*self.runs[:position], *new, *self.runs[position + len(old) :])
            for fetched in self.fetched:
                if fetched.first is old[0] and new:
                    # The new run holds the same rows, so the prefetch still stands for it.
                    fetched.first = new[0]
                elif fetched.first in old:  # its rows would hide newer ones now
                    fetched.give_up()
            self.fetched = tuple(fetched for fetched in self.fetched if fetched.first in self.runs)

    def lookup(self, keys: Rows, pending: NDArray[np.int64]) -> Found:
        """Find the newest live version of keys.

        Args:
            keys: rows with the words hash, nulls and key columns filled, in this set's layout.
            pending: positions of the keys to look up.

        Returns:
            The rows found, in hash order of their keys.
        """
        query = Query.of(keys, pending)
        select = np.arange(len(query.sought.hashes), dtype=np.int32)
        ahead = self.fetched
        runs, begin = self.runs, 0
        for number, run in enumerate(runs):
            for fetched in ahead:
                if fetched.first is run:
                    select = search_through(runs[begin:number], query, select)
                    begin = number
                    # Prefetched rows stand for all runs from `first` on, so only newer runs are searched before them.
                    select = fetched.search(query, select)
        search_through(runs[begin:], query, select)
        hits = np.flatnonzero(query.sought.found_at > DELETED)
        return Found(query.sought.order[hits], query.sought.found_at[hits], query.sought.found_heap[hits], query.pins)

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

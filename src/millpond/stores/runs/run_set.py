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
        layout: the layout of their rows.
        runs: the runs, newest first.
        range_: the hashes that the table is about; rows outside of it are not shown by scans.

    Attributes:
        fetched: what was read of some hashes before their keys are asked for.
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
        """Bytes that what was fetched holds."""
        return sum(fetched.memory for fetched in self.fetched)

    def fetch(self, hashes: Words, needed: int, expected: int = 0) -> Fetched | None:
        """Have what the runs hold of some hashes read by who asks for it (see `Fetched`); None if that cannot be."""
        with self._lock:
            if not self.runs or not can_be_fetched(self.runs):
                return None
            fetched = Fetched(self.runs, self.layout, hashes, needed, expected)
            self.fetched = (*self.fetched, fetched)
            return fetched

    def drop_fetched(self, version: int) -> list[Fetched]:
        """Let go of what was fetched for batches before the one that reads a version, and of what nobody will ask for.

        Rows that came too late for the batch that they were expected in are in the next one.
        """
        return self._let_go(lambda one: one.needed < version or (one.needed == version and one.exhausted))

    def let_go(self, fetched: Fetched) -> None:
        """Let go of something that was fetched."""
        self._let_go(lambda one: one is fetched)

    def _let_go(self, which: Callable[[Fetched], bool]) -> list[Fetched]:
        with self._lock:
            gone = [fetched for fetched in self.fetched if which(fetched)]
            self.fetched = tuple(fetched for fetched in self.fetched if not which(fetched))
        for fetched in gone:
            fetched.give_up()
        return gone

    def add(self, run: Run) -> None:
        """Put a run in front: it is newer than all others."""
        with self._lock:
            self.runs = (run, *self.runs)

    def replace(self, old: Sequence[Run], new: Sequence[Run]) -> None:
        """Put some runs in the place of neighbouring ones: a file for its memory run, a merged run for its inputs."""
        at = self.runs.index(old[0])
        if self.runs[at : at + len(old)] != tuple(old):
            raise ValueError("the runs to replace are not neighbours of this set")
        for run in new:
            run.inherit(old)
        with self._lock:
            self.runs = (*self.runs[:at], *new, *self.runs[at + len(old) :])
            for fetched in self.fetched:
                if fetched.first is old[0] and new:
                    fetched.first = new[0]
                elif fetched.first in old:  # it would hide newer rows now
                    fetched.give_up()
            self.fetched = tuple(fetched for fetched in self.fetched if fetched.first in self.runs)

    def lookup(self, keys: Rows, pending: NDArray[np.int64]) -> Found:
        """Find the newest live version of some keys.

        Args:
            keys: rows of which the words hash, nulls and key columns are filled, in this set's layout.
            pending: which of them to look for.

        Returns:
            Those found, in hash order.
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
                    select = fetched.search(query, select)
        search_through(runs[begin:], query, select)
        hits = np.flatnonzero(query.sought.found_at > DELETED)
        return Found(query.sought.order[hits], query.sought.found_at[hits], query.sought.found_heap[hits], query.pins)

    def scan(self, extra: Rows | None = None, size: int = PIECE_ROWS) -> Iterator[Rows]:
        """All live rows in hash order, in pieces of about `size` rows.

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

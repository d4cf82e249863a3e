"""Rows that were read from runs before their keys are asked for (Keyed Prefetching §IV-C).

Only the hashes of the keys are known beforehand. What is read stands in front of the runs that it comes from: a key is
looked for there first, and one of whose hash they hold nothing is not looked for in them at all. Newer runs go first,
as always, so that a hint may cost time and never a result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import shape_of
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.runs.search import DELETED
from millpond.layout import HASH, RowLayout, Rows, Words
from millpond.stores.runs.run import Query, Run, memory_run, search_through

_log = logging.getLogger(__name__)

_ABSENT, _THERE, _UNSURE = range(3)
_PER_HASH = 8 + 2
"""Bytes for a hash itself, what is known of it, and whether it was asked for."""


class Fetched:
    """What runs hold of some hashes.

    Args:
        runs: neighbours, newest first, down to the oldest of a set. layout: of their rows.
        hashes: in order, each once.
        needed: the version that the batch reads which they were announced for.
        expected: bytes that this will probably take.

    Attributes:
        first: the newest of the runs. memory: bytes that are held, or expected to be.
        used: how many of the hashes were asked for. seconds: how long it took to read them.
        row_bytes: memory for each hash of which something was found; 0 if nothing was.
    """

    def __init__(self, runs: Sequence[Run], layout: RowLayout, hashes: Words, needed: int, expected: int = 0) -> None:
        self.first = runs[0]
        self._expected = expected
        self.needed = needed
        self.hashes = hashes
        self.seconds = self.row_bytes = 0.0
        self._runs = runs
        self._layout = layout
        self._state = np.full(len(hashes), _UNSURE, np.uint8)
        self._asked = np.zeros(len(hashes), np.bool_)
        self._rows: Run | None = None
        self._done = threading.Event()
        self._given_up = False

    @property
    def done(self) -> bool:
        """Whether it has been read, or given up."""
        return self._done.is_set()

    @property
    def memory(self) -> int:
        """Bytes that it holds; until it is read, those that it probably will."""
        held = _PER_HASH * len(self.hashes) + (0 if self._rows is None else self._rows.memory)
        return held if self.done else max(held, self._expected)

    @property
    def read_keys(self) -> int:
        """Of how many of the hashes it is known what there is."""
        return 0 if self._rows is None else len(self.hashes)

    @property
    def exhausted(self) -> bool:
        """Whether all of them were asked for, and are in memory by now."""
        return self.done and bool(self._asked.all())

    @property
    def used(self) -> int:
        """How many of the hashes were asked for."""
        return int(np.count_nonzero(self._asked))

    def give_up(self) -> None:
        """Read no further: nobody needs it, or the runs are not what they were."""
        self._given_up = True

    def read(self) -> None:
        """Read all; for a thread of its own. What cannot be read is left to whoever asks for the keys."""
        started = time.perf_counter()
        try:
            if not self._given_up:
                self._read()
        except Exception as error:  # if it matters, whoever asks for the keys is told
            self._given_up = True
            _log.debug("keys were not read ahead: %s", error)
        finally:
            self.seconds = time.perf_counter() - started
            self._runs = ()
            self._done.set()

    def _read(self) -> None:
        query = Query.by_hash(self.hashes)
        found_at = query.sought.found_at
        select = np.arange(len(self.hashes), dtype=np.int32)
        search_through(self._runs, query, select)
        if self._given_up:
            return
        there = np.flatnonzero(found_at > DELETED)
        shape = shape_of(self._layout)
        rows = Rows(*gather_rows(found_at[there], query.sought.found_heap[there], shape.width, shape.blobs))
        self._rows = memory_run(rows, self._layout, filtered=False)
        self.row_bytes = _PER_HASH + self._rows.memory / len(there) if len(there) else 0.0
        state = np.full(len(self.hashes), _ABSENT, np.uint8)
        state[there] = _THERE
        state[found_at == DELETED] = _UNSURE  # of which key is not known
        self._state = state

    def holds(self, hashes: Words) -> NDArray[np.bool_]:
        """Which of some hashes are among its own."""
        return self._places(hashes)[1]

    def _places(self, hashes: Words) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return at, self.hashes[at] == hashes

    def search(self, query: Query, select: NDArray[np.int32]) -> NDArray[np.int32]:
        """Look for selected keys, and return those to seek in the runs; waits for what is being read of them."""
        at, mine = self._places(query.sought.hashes[select])
        if not mine.any():
            return select
        self._done.wait()
        if self._rows is None:
            return select
        self._asked[at[mine]] = True
        state = np.where(mine, self._state[at], _UNSURE)
        left = self._rows.search(query, select[state == _THERE])
        return np.sort(np.concatenate([select[state == _UNSURE], left]))


def can_be_fetched(runs: Sequence[Run]) -> bool:
    """Whether hashes alone tell what runs hold of keys: not if these belong to the partition by something else."""
    return all(run.view.window.whole or run.view.axis == HASH for run in runs)

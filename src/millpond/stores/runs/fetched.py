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
from millpond.stores.runs.run import Query, Run, memory_run

_UNREAD, _ABSENT, _THERE, _UNSURE = range(4)

_FIRST_KEYS = 256
"""Keys that are read first, to see how long their rows are, where that differs."""

_log = logging.getLogger(__name__)


class Fetched:
    """What runs hold of some hashes.

    Args:
        runs: neighbours, newest first, down to the oldest of a set. layout: of their rows.
        hashes: in order, each once.
        needed: the version that the batch reads which they were announced for.

    Attributes:
        first: the newest of the runs. seconds: how long it took to read them.
        dropped: keys that were not read for want of memory.
    """

    def __init__(self, runs: Sequence[Run], layout: RowLayout, hashes: Words, needed: int) -> None:
        self.first = runs[0]
        self.needed = needed
        self.hashes = hashes
        self.seconds = 0.0
        self.dropped = 0
        self._runs = runs
        self._layout = layout
        self._state = np.full(len(hashes), _UNREAD, np.uint8)
        self._asked = np.zeros(len(hashes), np.bool_)
        self._rows: tuple[Run, ...] = ()
        self._lock = threading.Lock()  # between who reads and who asks, until reading has begun
        self._begun = False
        self._done = threading.Event()
        self._given_up = False

    @property
    def done(self) -> bool:
        """Whether it has been read, or given up."""
        return self._done.is_set()

    @property
    def memory(self) -> int:
        """Bytes that it holds."""
        return self.hashes.nbytes + 2 * len(self.hashes) + sum(run.memory for run in self._rows)

    @property
    def read_keys(self) -> int:
        """Of how many of the hashes it is known what there is."""
        return int(np.count_nonzero(self._state))

    @property
    def used(self) -> int:
        """How many of these were asked for."""
        return int(np.count_nonzero(self._state[self._asked]))

    def give_up(self) -> None:
        """Read no further: nobody needs it, or the runs are not what they were."""
        self._given_up = True

    def read(self, most: int) -> None:
        """Read what nobody has asked for yet, for a thread of its own; what cannot be is left to whoever asks for it.

        Args:
            most: bytes of rows, about; the keys behind them are not read.
        """
        started = time.perf_counter()
        with self._lock:
            self._begun = True
            wanted = np.flatnonzero(~self._asked)
        try:
            self._read(wanted, most)
        except Exception as error:  # if it matters, whoever asks for the keys is told
            _log.debug("keys were not read ahead: %s", error)
        finally:
            self.seconds = time.perf_counter() - started
            self._runs = ()
            self._done.set()

    def _read(self, wanted: NDArray[np.int64], most: int) -> None:
        state = np.full(len(self.hashes), _UNREAD, np.uint8)
        parts: list[Run] = []
        row = 8 * self._layout.width
        begin, end = 0, _FIRST_KEYS if self._layout.bytes_columns else most // row
        while begin < min(end, len(wanted)):
            some = wanted[begin:end]
            rows = self._rows_of(some, state)
            if self._given_up:
                return
            if rows.count:
                parts.append(memory_run(rows, self._layout, filtered=False))
            size = rows.words.nbytes + rows.heap.nbytes
            most -= size
            following = max(0, most) // row
            if self._layout.bytes_columns:  # others may be longer
                following = min(following, most * len(some) // (2 * max(1, size)), 8 * end)
            begin, end = end, end + max(0, following)
        self.dropped = max(0, len(wanted) - begin)
        self._rows, self._state = tuple(parts), state

    def _rows_of(self, some: NDArray[np.int64], state: NDArray[np.uint8]) -> Rows:
        """The rows of some of the hashes, by number; notes what there is of them."""
        query = Query.by_hash(self.hashes[some])
        found_at = query.sought.found_at
        select = np.arange(len(some), dtype=np.int32)
        for run in self._runs:
            if self._given_up:
                break
            select = run.search(query, select)
        there = np.flatnonzero(found_at > DELETED)
        state[some] = _ABSENT
        state[some[there]] = _THERE
        state[some[found_at == DELETED]] = _UNSURE  # of which key is not known
        shape = shape_of(self._layout)
        return Rows(*gather_rows(found_at[there], query.sought.found_heap[there], shape.width, shape.blobs))

    def holds(self, hashes: Words) -> NDArray[np.bool_]:
        """Which of some hashes are among its own."""
        return self._places(hashes)[1]

    def _places(self, hashes: Words) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return at, self.hashes[at] == hashes

    def search(self, query: Query, select: NDArray[np.int32]) -> NDArray[np.int32]:
        """Look for selected keys, and return those to seek in the runs.

        Those that are being read are waited for; as long as nobody has begun to, they are taken out.
        """
        at, mine = self._places(query.sought.hashes[select])
        if not mine.any():
            return select
        with self._lock:
            self._asked[at[mine]] = True
            if not self._begun:
                return select
        self._done.wait()
        state = np.where(mine, self._state[at], _UNREAD)
        left = select[state == _THERE]
        for rows in self._rows:
            left = rows.search(query, left)
        return np.sort(np.concatenate([select[(state == _UNREAD) | (state == _UNSURE)], left]))


def can_be_fetched(runs: Sequence[Run]) -> bool:
    """Whether hashes alone tell what runs hold of keys: not if these belong to the partition by something else."""
    return all(run.view.window.whole or run.view.axis == HASH for run in runs)

"""Rows read from runs before their keys are looked up (Keyed Prefetching §IV-C).

Only the hashes of the keys are known in advance. The prefetched rows are searched before the runs that they come from.
If the runs hold no row of a hash, its keys are not looked up in them at all. Newer runs are still searched first, so a
hint may cost time but never changes a result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.runs.gather import gather_rows
from millpond.kernels.runs.search import DELETED
from millpond.layout import HASH, RowLayout, Rows, Words
from millpond.stores.runs.run import Query, Run, memory_run, search_through

_log = logging.getLogger(__name__)

_ABSENT, _PRESENT, _UNKNOWN = range(3)
_BYTES_PER_HASH = 8 + 2
"""Bytes of a hash, its state, and whether it was looked up."""


class PrefetchedRows:
    """Rows of given hashes, prefetched from runs.

    Args:
        runs: neighbours, newest first, down to the oldest of a set. layout: of their rows.
        hashes: ascending, each once.
        needed: the version read by the batch for which the keys were hinted.
        expected: bytes that the rows will probably take.

    Attributes:
        first: the newest of the runs. memory: bytes held, or expected to be held.
        used: number of hashes that were looked up. seconds: duration of the read.
        row_bytes: memory for each hash with a row; 0 if no row was found.
    """

    def __init__(self, runs: Sequence[Run], layout: RowLayout, hashes: Words, needed: int, expected: int = 0) -> None:
        self.first = runs[0]
        self._expected = expected
        self.needed = needed
        self.hashes = hashes
        self.seconds = self.row_bytes = 0.0
        self._runs = runs
        self._layout = layout
        self._state = np.full(len(hashes), _UNKNOWN, np.uint8)
        self._looked_up = np.zeros(len(hashes), np.bool_)
        self._rows: Run | None = None
        self._done = threading.Event()
        self._cancelled = False

    @property
    def done(self) -> bool:
        """Whether the read is done, or was cancelled."""
        return self._done.is_set()

    @property
    def memory(self) -> int:
        """Bytes held; until the read is done, at least the expected ones."""
        held = _BYTES_PER_HASH * len(self.hashes) + (0 if self._rows is None else self._rows.memory)
        return held if self.done else max(held, self._expected)

    @property
    def read_keys(self) -> int:
        """Number of hashes whose state in the runs is known."""
        return 0 if self._rows is None else len(self.hashes)

    @property
    def exhausted(self) -> bool:
        """Whether all hashes were looked up, so that their rows are in the hot table by now."""
        return self.done and bool(self._looked_up.all())

    @property
    def used(self) -> int:
        """Number of hashes that were looked up."""
        return int(np.count_nonzero(self._looked_up))

    def cancel(self) -> None:
        """Cancel the read: its rows are no longer needed, or the runs have changed."""
        self._cancelled = True

    def read(self) -> None:
        """Read all rows, on a background thread. Best effort: on error, the look-up of a key reads the runs itself."""
        started = time.perf_counter()
        try:
            if not self._cancelled:
                self._read()
        except Exception as error:  # best effort: a look-up of the keys reports the error
            self._cancelled = True
            _log.debug("keys were not read ahead: %s", error)
        finally:
            self.seconds = time.perf_counter() - started
            # Release the runs: they may be merged, and closed, while this object is still in use.
            self._runs = ()
            self._done.set()

    def _read(self) -> None:
        query = Query.by_hash(self.hashes)
        found_at = query.probes.found_at
        select = np.arange(len(self.hashes), dtype=np.int32)
        # A running read is not interrupted; it is checked for cancellation before and after.
        search_through(self._runs, query, select)
        if self._cancelled:
            return
        present = np.flatnonzero(found_at > DELETED)
        shape = kernel_layout(self._layout)
        rows = Rows(*gather_rows(found_at[present], query.probes.found_heap[present], shape.width, shape.blobs))
        self._rows = memory_run(rows, self._layout, filtered=False)
        self.row_bytes = _BYTES_PER_HASH + self._rows.memory / len(present) if len(present) else 0.0
        state = np.full(len(self.hashes), _ABSENT, np.uint8)
        state[present] = _PRESENT
        state[found_at == DELETED] = _UNKNOWN  # the key that was deleted is not known, only its hash
        self._state = state

    def holds(self, hashes: Words) -> NDArray[np.bool_]:
        """Return a mask of the hashes that are among its own."""
        return self._positions_of(hashes)[1]

    def _positions_of(self, hashes: Words) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        positions = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return positions, self.hashes[positions] == hashes

    def search(self, query: Query, select: NDArray[np.int32]) -> NDArray[np.int32]:
        """Look up the selected keys, and return those to search in the runs; waits for a read in progress."""
        positions, mine = self._positions_of(query.probes.hashes[select])
        if not mine.any():
            return select
        self._done.wait()
        # The read failed or was cancelled: the runs are searched as usual.
        if self._rows is None:
            return select
        self._looked_up[positions[mine]] = True
        state = np.where(mine, self._state[positions], _UNKNOWN)
        left = self._rows.search(query, select[state == _PRESENT])
        return np.sort(np.concatenate([select[state == _UNKNOWN], left]))


def hash_identifies_rows(runs: Sequence[Run]) -> bool:
    """Return whether hashes alone identify rows of the partition: not if rows belong to it by another word."""
    return all(run.view.visible.whole or run.view.axis == HASH for run in runs)

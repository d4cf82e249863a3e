"""The prefetching manager of a table (Keyed Prefetching §IV-C): turns hinted keys into reads of its runs.

Its buffer has two stages: waiting keys, each once, and keys that are being read or were read. When a thread is free,
the waiting keys are the next read, as far as there is memory: many keys in few merged requests. A waiting key that is
looked up leaves the buffer. A look-up of a key that is being read waits for that read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.layout import Words
from millpond.stores.runs.prefetched_rows import PrefetchedRows
from millpond.stores.runs.run_set import RunSet


class PrefetchFigures(NamedTuple):
    """Prefetch figures of one batch.

    Attributes:
        read: keys that were prefetched. used: those of them that were looked up.
        dropped: keys for which there was no memory. seconds: duration of the longest read.
    """

    read: int = 0
    used: int = 0
    dropped: int = 0
    seconds: float = 0.0

    def stats(self) -> dict[str, int]:
        """Return the figures under their metric names."""
        return {
            "prefetched_keys": self.read,
            "prefetched_used": self.used,
            "dropped_hints": self.dropped,
            "prefetch_ms": round(self.seconds * 1000),
        }


_FIRST_READ_KEYS = 256
"""Keys in the first read, before the size of their rows is known."""
_MAX_READ_GROWTH = 8
"""Growth of the number of keys from read to read, at most: the size of rows is known from the last read only."""
_MIN_SIZE_FACTOR = 0.75
"""Factor by which the estimated row size shrinks, at most, after a read of smaller rows."""
_MEMORY_SHARE = 0.8
"""Share of the remaining memory that a read may take: rows may be larger than estimated."""
_NO_HASHES: Words = np.empty(0, np.uint64)


class Prefetcher:
    """Prefetches keys of one table, in the background. `prefetch` may be called from any thread.

    Args:
        runs: of the table. pool: runs the reads; its threads may block.
        limit: returns the bytes that may be held for keys that were not looked up yet.

    Attributes:
        latest: prefetch figures of the last batch.
    """

    def __init__(self, runs: RunSet, pool: Executor, limit: Callable[[], int]) -> None:
        self._runs = runs
        self._pool = pool
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: dict[int, Words] = {}  # ascending hashes, by the version read by the batch that needs them
        self._reading: PrefetchedRows | None = None
        self._read_claimed = self._closed = False
        self._dropped = 0
        self._row_bytes = float(8 * runs.layout.width + 64)
        self._max_keys = _FIRST_READ_KEYS
        self.latest = PrefetchFigures()

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Queue keys for reading that are not in memory.

        Args:
            hashes: of the keys, ascending, each once. needed: the version read by the batch that needs the keys.
        """
        with self._lock:
            if self._closed:
                return
            for version, waiting in self._waiting.items():
                # A key that waits for an earlier batch is in memory for this one, too.
                if version <= needed:
                    hashes = hashes[~_mask_known(hashes, waiting)]
            for prefetch in self._runs.prefetched:
                hashes = hashes[~prefetch.holds(hashes)]
            if not len(hashes):
                return
            # Earlier hints take precedence, so that a flood of later ones cannot displace them.
            room = max(0, self._room() - sum(map(len, self._waiting.values())))
            self._dropped += max(0, len(hashes) - room)
            if room:
                earlier = self._waiting.get(needed, _NO_HASHES)
                self._waiting[needed] = np.sort(np.concatenate([earlier, hashes[:room]]))
            claimed = self._claim_read()
        if claimed:
            self._submit()

    def _room(self) -> int:
        """Return the number of keys that have memory besides keys read or being read."""
        # The limit may have shrunk below what is in memory.
        return max(0, int((self._limit() - self._runs.prefetched_memory) / self._row_bytes))

    def _claim_read(self) -> bool:
        """Return whether a read has to be submitted, and note that it will be."""
        # At most one read is submitted or running; hints that come meanwhile are in the next one.
        claimed = bool(self._waiting) and not self._read_claimed and not self._closed
        self._read_claimed = self._read_claimed or claimed
        return claimed

    def _submit(self) -> None:
        try:
            self._pool.submit(self._read)
        except RuntimeError:  # the slot is shutting down
            self.close()

    def _read(self) -> None:
        """Read waiting keys. Until they leave the queue here, a look-up takes them out of it, and waits for no read."""
        with self._lock:
            prefetch = self._reading = self._next_read()
        try:
            if prefetch is not None:
                prefetch.read()
        finally:
            with self._lock:
                if prefetch is not None:
                    self._learn(prefetch)
                self._reading = None
                self._read_claimed = False
                claimed = self._claim_read()
            if claimed:
                self._submit()

    def _next_read(self) -> PrefetchedRows | None:
        """Take the keys of the next read from the queue, those needed first."""
        while self._waiting and not self._closed:
            needed = min(self._waiting)
            hashes = self._waiting.pop(needed)
            for prefetch in self._runs.prefetched:
                hashes = hashes[~prefetch.holds(hashes)]
            chosen = hashes[: min(int(_MEMORY_SHARE * self._room()), self._max_keys)]
            if not len(chosen):
                self._dropped += len(hashes)
                continue
            if len(chosen) < len(hashes):
                self._waiting[needed] = hashes[len(chosen) :]
            following = self._runs.start_prefetch(chosen, needed, int(len(chosen) * self._row_bytes))
            # There are no runs, or their rows are not identified by hashes: nothing can be prefetched.
            if following is None:
                self._waiting.clear()
            return following
        return None

    def _learn(self, prefetch: PrefetchedRows) -> None:
        """Learn the row size from a read; release its rows if they exceed the memory, or if the read failed."""
        count = len(prefetch.hashes)
        self._row_bytes = max(prefetch.row_bytes, _MIN_SIZE_FACTOR * self._row_bytes, 16.0)
        self._max_keys = _MAX_READ_GROWTH * max(count, _FIRST_READ_KEYS)
        if self._runs.prefetched_memory > self._limit():
            self._runs.release(prefetch)
            self._dropped += count
        elif not prefetch.read_keys:  # the read failed: the keys may be hinted again
            self._runs.release(prefetch)

    def dequeue(self, hashes: Words) -> None:
        """Remove keys from the queue that are being looked up now.

        When this returns, a key is either in `RunSet.prefetched`, where the caller waits for it, or will not be read.
        """
        with self._lock:  # must be taken first: `_read` may be moving keys from the queue to `prefetched`
            hashes = np.sort(hashes) if self._waiting else hashes
            for needed, waiting in list(self._waiting.items()):
                # Few keys are looked up at a time, while many may wait.
                positions = np.minimum(np.searchsorted(waiting, hashes), len(waiting) - 1)
                positions = positions[waiting[positions] == hashes]
                if len(positions):
                    self._waiting[needed] = np.delete(waiting, positions)
                    if not len(self._waiting[needed]):
                        del self._waiting[needed]

    def end_batch(self, version: int) -> None:
        """Release rows prefetched for batches up to the one that read `version`, and close its figures.

        Rows that this batch did not look up may have come too late for it; they stay until the next batch ends.
        """
        with self._lock:
            released = self._runs.release_prefetched(version)
            read = [prefetch for prefetch in released if prefetch.done]
            self.latest = PrefetchFigures(
                sum(prefetch.read_keys for prefetch in read),
                sum(prefetch.used for prefetch in read),
                self._dropped,
                max((prefetch.seconds for prefetch in read), default=0.0),
            )
            self._dropped = 0
            self._waiting = {needed: waiting for needed, waiting in self._waiting.items() if needed >= version}

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._reading is not None:
                self._reading.cancel()


def _mask_known(hashes: Words, known: Words) -> NDArray[np.bool_]:
    """Return a mask of the hashes that are among `known`, which is ascending and not empty."""
    present: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes
    return present

"""The prefetching manager of a table (Keyed Prefetching §IV-C): turns announced keys into reads of its runs.

Its buffer has two stages: keys that wait, each once, and keys that are being read or have been. What waits when a
thread is free is the next read, as far as there is memory: many keys in few merged requests. A key that is asked for
while it waits is taken out; one that is asked for while it is read is waited for, and not read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.layout import Words
from millpond.stores.runs.fetched import Fetched
from millpond.stores.runs.run_set import RunSet


class Prefetches(NamedTuple):
    """What came of the hints for one batch.

    Attributes:
        read: keys that were read ahead. used: how many of them were asked for.
        dropped: keys for which there was no memory. seconds: how long the longest read took.
    """

    read: int = 0
    used: int = 0
    dropped: int = 0
    seconds: float = 0.0

    def stats(self) -> dict[str, int]:
        """As a table tells it."""
        return {
            "prefetched_keys": self.read,
            "prefetched_used": self.used,
            "dropped_hints": self.dropped,
            "prefetch_ms": round(self.seconds * 1000),
        }


_FIRST = 256
"""Keys that are read before it is known how large their rows are."""
_GROWTH = 8
"""How many times as many keys as the last read the next one may have: what is known of its rows' size is theirs."""
_SHRINKING = 0.75
"""Of the size of rows, what is believed after a read of smaller ones."""
_MARGIN = 0.8
"""Of the memory that is left, what a read should take: rows may be larger than those before."""
_NONE: Words = np.empty(0, np.uint64)


class Prefetcher:
    """Reads keys of one table ahead, in the background. `announce` may be called from any thread.

    Args:
        runs: of the table. pool: where they are read; its threads may wait.
        limit: how many bytes may be held for keys that were not asked for yet.

    Attributes:
        latest: what came of the hints for the batch that ended last.
    """

    def __init__(self, runs: RunSet, pool: Executor, limit: Callable[[], int]) -> None:
        self._runs = runs
        self._pool = pool
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: dict[int, Words] = {}  # in order, by the version that the batch reads which will ask for them
        self._reading: Fetched | None = None
        self._due = self._closed = False
        self._dropped = 0
        self._row_bytes = float(8 * runs.layout.width + 64)
        self._most = _FIRST
        self.latest = Prefetches()

    def announce(self, hashes: Words, needed: int) -> None:
        """Let keys be read that are not in memory.

        Args:
            hashes: theirs, in order, each once. needed: the version that the batch reads which will ask for them.
        """
        with self._lock:
            if self._closed:
                return
            for version, waiting in self._waiting.items():
                if version <= needed:
                    hashes = hashes[~_among(hashes, waiting)]
            for fetched in self._runs.fetched:
                hashes = hashes[~fetched.holds(hashes)]
            if not len(hashes):
                return
            # Those that were announced first go first, whoever may flood the slot behind them.
            room = max(0, self._room() - sum(map(len, self._waiting.values())))
            self._dropped += max(0, len(hashes) - room)
            if room:
                earlier = self._waiting.get(needed, _NONE)
                self._waiting[needed] = np.sort(np.concatenate([earlier, hashes[:room]]))
            due = self._is_due()
        if due:
            self._submit()

    def _room(self) -> int:
        """For how many keys there is memory beside what was read, or is being read."""
        return int((self._limit() - self._runs.fetched_memory) / self._row_bytes)

    def _is_due(self) -> bool:
        """Whether a thread is to be asked for."""
        due = bool(self._waiting) and not self._due and not self._closed
        self._due = self._due or due
        return due

    def _submit(self) -> None:
        try:
            self._pool.submit(self._read)
        except RuntimeError:  # the slot ends
            self.close()

    def _read(self) -> None:
        """Read what waits: until here, it is looked for by who asks for it, who waits for no other reads."""
        with self._lock:
            fetched = self._reading = self._next()
        try:
            if fetched is not None:
                fetched.read()
        finally:
            with self._lock:
                if fetched is not None:
                    self._learn(fetched)
                self._reading = None
                self._due = False
                due = self._is_due()
            if due:
                self._submit()

    def _next(self) -> Fetched | None:
        """What is to be read next, of that which is needed first."""
        while self._waiting and not self._closed:
            needed = min(self._waiting)
            hashes = self._waiting.pop(needed)
            for fetched in self._runs.fetched:
                hashes = hashes[~fetched.holds(hashes)]
            some = hashes[: min(int(_MARGIN * self._room()), self._most)]
            if not len(some):
                self._dropped += len(hashes)
                continue
            if len(some) < len(hashes):
                self._waiting[needed] = hashes[len(some) :]
            following = self._runs.fetch(some, needed, int(len(some) * self._row_bytes))
            if following is None:
                self._waiting.clear()
            return following
        return None

    def _learn(self, fetched: Fetched) -> None:
        """See from what was read how large rows are; what has outgrown the memory is let go of."""
        count = len(fetched.hashes)
        self._row_bytes = max(fetched.row_bytes, _SHRINKING * self._row_bytes, 16.0)
        self._most = _GROWTH * max(count, _FIRST)
        if self._runs.fetched_memory > self._limit():
            self._runs.let_go(fetched)
            self._dropped += count
        elif not fetched.read_keys:  # it failed: others may announce them again
            self._runs.let_go(fetched)

    def take(self, hashes: Words) -> None:
        """Keys that are asked for now need no reading ahead any more.

        What does not wait when this returns is in `RunSet.fetched`, where the caller waits for it, or will not be read.
        """
        with self._lock:  # first: a thread may just take what waits, to have it fetched
            hashes = np.sort(hashes) if self._waiting else hashes
            for needed, waiting in list(self._waiting.items()):
                # Few are asked for at a time, many may wait.
                at = np.minimum(np.searchsorted(waiting, hashes), len(waiting) - 1)
                at = at[waiting[at] == hashes]
                if len(at):
                    self._waiting[needed] = np.delete(waiting, at)
                    if not len(self._waiting[needed]):
                        del self._waiting[needed]

    def over(self, version: int) -> None:
        """Let go of what was read for batches up to the one that read a version; what that one has not asked for may
        have come too late for it, and stays until the next is over.
        """
        with self._lock:
            gone = self._runs.drop_fetched(version)
            read = [fetched for fetched in gone if fetched.done]
            self.latest = Prefetches(
                sum(fetched.read_keys for fetched in read),
                sum(fetched.used for fetched in read),
                self._dropped,
                max((fetched.seconds for fetched in read), default=0.0),
            )
            self._dropped = 0
            self._waiting = {needed: waiting for needed, waiting in self._waiting.items() if needed >= version}

    def close(self) -> None:
        """Read no further."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._reading is not None:
                self._reading.give_up()


def _among(hashes: Words, known: Words) -> NDArray[np.bool_]:
    """Which of some hashes are among others, which are in order and at least one."""
    there: NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, hashes), len(known) - 1)] == hashes
    return there

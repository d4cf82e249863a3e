"""The prefetching manager of a table (Keyed Prefetching §IV-C): turns announced keys into reads of its runs.

Its buffer has two stages: keys that wait, each once, and keys that are being read or have been. All that waits when a
read ends is the next read: many keys in few merged requests. A key that is asked for while it waits is taken out; one
that is asked for while it is read is waited for, and not read again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

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


class Prefetcher:
    """Reads keys of one table ahead, in the background. `announce` may be called from any thread.

    Args:
        runs: of the table. pool: where they are read; its threads may wait.
        limit: how many bytes may be held for keys that were not asked for yet; any thread asks.

    Attributes:
        latest: what came of the hints for the batch that ended last.
    """

    def __init__(self, runs: RunSet, pool: Executor, limit: Callable[[], int]) -> None:
        self._runs = runs
        self._pool = pool
        self._limit = limit
        self._lock = threading.Lock()
        self._waiting: list[tuple[bool, Words]] = []  # keys that were announced (True) or asked for, as it came
        self._count = 0  # keys that wait, at most
        self._needed = 0
        self._reading: Fetched | None = None
        self._closed = False
        self._dropped = 0
        self._row_bytes = float(8 * runs.layout.width + 64)
        self.latest = Prefetches()

    def announce(self, hashes: Words, needed: int) -> None:
        """Let keys be read that are not in memory.

        Args:
            hashes: theirs, in order, each once. needed: the version that the batch reads which will ask for them.
        """
        for fetched in self._runs.fetched:
            hashes = hashes[~fetched.holds(hashes)]
        if not len(hashes):
            return
        with self._lock:
            if self._closed:
                return
            most = max(0, int(self._room / self._row_bytes))
            if self._count + len(hashes) > most and len(self._waiting) > 1:
                self._wait(self._take_waiting())
            self._dropped += max(0, self._count + len(hashes) - most)
            self._wait(hashes[: max(0, most - self._count)])
            self._needed = max(self._needed, needed)
            following = self._next()
        self._submit(following)

    def _next(self) -> Fetched | None:
        """What is to be read next, if there is anything and nothing is being read."""
        if self._closed or self._reading is not None:
            return None
        hashes = self._take_waiting()
        self._reading = self._runs.fetch(hashes, self._needed) if len(hashes) else None
        return self._reading

    @property
    def _room(self) -> int:
        """How many bytes more may be held."""
        return self._limit() - self._runs.fetched_memory

    def _wait(self, hashes: Words) -> None:
        if len(hashes):
            self._waiting.append((True, hashes))
            self._count += len(hashes)

    def _take_waiting(self) -> Words:
        """The keys that wait, which do not any more: those that were announced after they were asked for last."""
        waiting, self._waiting, self._count = self._waiting[::-1], [], 0
        if len(waiting) < 2:
            return waiting[0][1] if waiting else np.empty(0, np.uint64)
        announced = np.repeat([kind for kind, _ in waiting], [len(hashes) for _, hashes in waiting])
        together: Words = np.concatenate([hashes for _, hashes in waiting])
        different, last = np.unique(together, return_index=True)
        left: Words = different[announced[last]]
        return left

    def _submit(self, fetched: Fetched | None) -> None:
        if fetched is not None:
            with suppress(RuntimeError):  # the slot ends
                self._pool.submit(self._read, fetched)

    def _read(self, fetched: Fetched) -> None:
        fetched.read(self._room)
        with self._lock:
            self._reading = None
            if fetched.read_keys:
                self._row_bytes = max(16.0, fetched.memory / fetched.read_keys)
            following = self._next()
        self._submit(following)

    def take(self, hashes: Words) -> None:
        """Keys that are asked for now need no reading ahead any more."""
        with self._lock:
            if self._count:
                self._waiting.append((False, hashes))

    def over(self, version: int) -> None:
        """Let go of what was read for batches up to the one that read a version."""
        gone = self._runs.drop_fetched(version)
        with self._lock:
            read = [fetched for fetched in gone if fetched.done]
            self.latest = Prefetches(
                sum(fetched.read_keys for fetched in read),
                sum(fetched.used for fetched in read),
                self._dropped + sum(fetched.dropped for fetched in read),
                max((fetched.seconds for fetched in read), default=0.0),
            )
            self._dropped = 0
            if self._needed <= version:
                self._take_waiting()

    def close(self) -> None:
        """Read no further."""
        with self._lock:
            self._closed = True
            self._take_waiting()
            if self._reading is not None:
                self._reading.give_up()

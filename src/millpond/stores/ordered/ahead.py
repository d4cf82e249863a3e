"""Reading blocks of files ahead, for keys that are announced (Keyed Prefetching §IV-C)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress

import numpy as np

from millpond.errors import MillpondError
from millpond.files.formats.blocks import BLOCK_BYTES
from millpond.layout import Words
from millpond.stores.ordered.parts import Part
from millpond.stores.runs.prefetcher import Prefetches


class BlocksAhead:
    """Brings the blocks in which announced keys may be near: into the cache of blocks, or into the page cache.

    What is announced while blocks are read waits, and is the next read, as far as there is room. `announce` is for one
    thread.

    Args:
        pool: where they are read. memory: bytes of blocks that one read may bring, and that keys may take which wait.

    Attributes:
        latest: what came of the hints for the batch that ended last.
    """

    def __init__(self, pool: Executor, memory: int) -> None:
        self._pool = pool
        self._most = max(1, memory // BLOCK_BYTES)
        self._room = memory // 8
        self._lock = threading.Lock()
        self._waiting: Words = np.empty(0, np.uint64)
        self._parts: Sequence[Part] = ()
        self.latest = Prefetches()
        self._reading = self._closed = False
        self._keys = self._dropped = 0
        self._seconds = 0.0

    def announce(self, hashes: Words, parts: Sequence[Part]) -> None:
        """Have blocks of parts in files read where they may have rows of some hashes."""
        filed = [part for part in parts if part.rows is None]
        if not filed:
            return
        with self._lock:
            waiting = np.union1d(self._waiting, hashes) if len(self._waiting) < self._room else self._waiting
            self._dropped += max(0, len(self._waiting) + len(hashes) - self._room)
            self._waiting = waiting[: self._room]
            self._parts = filed
            if self._reading or self._closed:
                return
            self._reading = True
        with suppress(RuntimeError):  # the slot ends
            self._pool.submit(self._read)

    def _read(self) -> None:
        while True:
            with self._lock:
                hashes, self._waiting, parts = self._waiting, np.empty(0, np.uint64), self._parts
                self._reading = bool(len(hashes)) and not self._closed
                if not self._reading:
                    self._parts = ()
                    return
            left, started = self._most, time.perf_counter()
            with suppress(MillpondError, OSError, RuntimeError, ValueError):  # whoever needs the rows is told
                for part in parts:
                    left -= part.bring(hashes, left)
            self._keys += len(hashes)
            self._seconds = max(self._seconds, time.perf_counter() - started)

    def over(self) -> None:
        """The batch is over: see what came of hints for it. Blocks do not tell which keys were asked for."""
        with self._lock:
            self.latest = Prefetches(self._keys, self._keys, self._dropped, self._seconds)
            self._keys = self._dropped = 0
            self._seconds = 0.0

    def close(self) -> None:
        """Read no further."""
        with self._lock:
            self._closed = True
            self._waiting = np.empty(0, np.uint64)

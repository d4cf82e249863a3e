"""Reading blocks of files ahead, for keys that are announced (Keyed Prefetching §IV-C)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress

import numpy as np

from millpond.files.formats.blocks import RUN_BLOCK
from millpond.layout import Words
from millpond.stores.ordered.parts import Part
from millpond.stores.runs.prefetcher import Prefetches

_log = logging.getLogger(__name__)


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
        self._most = max(1, memory // RUN_BLOCK)
        self._room = memory // 8
        self._lock = threading.Lock()
        self._waiting: list[Words] = []
        self._count = 0  # keys that wait, some of them twice
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
            if self._closed:
                return
            room = max(0, self._room - self._count)
            self._dropped += max(0, len(hashes) - room)
            self._waiting.append(hashes[:room])
            self._count += min(room, len(hashes))
            self._parts = filed
            if self._reading:
                return
            self._reading = True
        with suppress(RuntimeError):  # the slot ends
            self._pool.submit(self._read)

    def _read(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting, self._count, parts = self._waiting, [], 0, self._parts
                self._reading = bool(waiting) and not self._closed
                if not self._reading:
                    self._parts = ()
                    return
            left, started = self._most, time.perf_counter()
            hashes = np.unique(np.concatenate(waiting))
            try:
                for part in parts:
                    left -= part.bring(hashes, left)
            except Exception as error:  # if it matters, whoever needs the rows is told
                _log.debug("blocks were not read ahead: %s", error)
            else:
                with self._lock:
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
            self._waiting, self._count = [], 0

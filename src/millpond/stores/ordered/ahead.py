"""Reading blocks of files ahead, for keys that are announced (Keyed Prefetching §IV-C)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress

import numpy as np

from millpond.errors import MillpondError
from millpond.files.formats.blocks import BLOCK_BYTES
from millpond.layout import Words
from millpond.stores.ordered.parts import Part


class BlocksAhead:
    """Brings the blocks in which announced keys may be near: into the cache of blocks, or into the page cache.

    What is announced while blocks are read waits, and is the next read. `announce` is for one thread.

    Args:
        pool: where they are read. memory: bytes of blocks that one read may bring.
    """

    def __init__(self, pool: Executor, memory: int) -> None:
        self._pool = pool
        self._most = max(1, memory // BLOCK_BYTES)
        self._lock = threading.Lock()
        self._waiting: Words = np.empty(0, np.uint64)
        self._parts: Sequence[Part] = ()
        self._reading = self._closed = False
        self._keys = 0

    def announce(self, hashes: Words, parts: Sequence[Part]) -> None:
        """Have blocks of parts in files read where they may have rows of some hashes."""
        filed = [part for part in parts if part.rows is None]
        if not filed:
            return
        with self._lock:
            self._waiting = np.union1d(self._waiting, hashes)
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
            left = self._most
            with suppress(MillpondError, OSError):  # whoever needs the rows is told
                for part in parts:
                    left -= part.bring(hashes, left)
            self._keys += len(hashes)

    def taken(self) -> int:
        """Of how many keys blocks were read since this was last asked for."""
        keys, self._keys = self._keys, 0
        return keys

    def close(self) -> None:
        """Read no further."""
        with self._lock:
            self._closed = True
            self._waiting = np.empty(0, np.uint64)

"""Reading blocks of files ahead, for keys that are announced (Keyed Prefetching §IV-C)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress

import numpy as np

from millpond.files.formats.blocks import BLOCK_BYTES
from millpond.layout import Words
from millpond.stores.ordered.parts import Part

_log = logging.getLogger(__name__)


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
        self._waiting: list[Words] = []
        self._parts: Sequence[Part] = ()
        self._reading = self._closed = False
        self._keys = 0

    def announce(self, hashes: Words, parts: Sequence[Part]) -> None:
        """Have blocks of parts in files read where they may have rows of some hashes."""
        filed = [part for part in parts if part.rows is None]
        if not filed:
            return
        with self._lock:
            if self._closed:
                return
            self._waiting.append(hashes)
            self._parts = filed
            if self._reading:
                return
            self._reading = True
        with suppress(RuntimeError):  # the slot ends
            self._pool.submit(self._read)

    def _read(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting, parts = self._waiting, [], self._parts
                self._reading = bool(waiting) and not self._closed
                if not self._reading:
                    self._parts = ()
                    return
            left = self._most
            hashes = np.unique(np.concatenate(waiting))
            try:
                for part in parts if not self._closed else ():
                    left -= part.bring(hashes, left)
            except Exception as error:  # if it matters, whoever needs the rows is told
                _log.debug("blocks were not read ahead: %s", error)
            else:
                with self._lock:
                    self._keys += len(hashes)

    def taken(self) -> int:
        """Of how many keys blocks were read since this was last asked for."""
        with self._lock:
            keys, self._keys = self._keys, 0
            return keys

    def close(self) -> None:
        """Read no further."""
        with self._lock:
            self._closed = True
            self._waiting = []

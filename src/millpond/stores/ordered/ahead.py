"""Reading blocks of files ahead, for keys that are announced (Keyed Prefetching §IV-C)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import RUN_BLOCK
from millpond.layout import NEVER, Words
from millpond.stores.ordered.parts import BEGINNING, Part
from millpond.stores.runs.prefetcher import Prefetches

_log = logging.getLogger(__name__)


class Sought(NamedTuple):
    """Keys that will be asked for, and of which times: both bounds included, nothing if `lo` > `hi`."""

    hashes: Words
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]

    def some(self, chosen: slice | NDArray[np.bool_]) -> Sought:
        """Copies of some of them."""
        return Sought(self.hashes[chosen].copy(), self.lo[chosen].copy(), self.hi[chosen].copy())

    def after(self, time: int) -> Sought:
        """The same, without times up to one."""
        return self if time == BEGINNING else self._replace(lo=np.maximum(self.lo, time + 1))

    def within(self, part: Part) -> NDArray[np.bool_]:
        """Which of them a part may have rows of, going by its times."""
        near = (self.lo <= self.hi) & (self.lo <= part.newest) & (self.hi >= part.oldest)
        return near | (self.hi == NEVER) if part.timeless else near


_ROOM = 24
"""Bytes of a key that waits, with its times."""
_SIDE_BY_SIDE = 8
"""Parts of which blocks are brought at a time, where that means requests."""

Wanted = list[tuple[Part, NDArray[np.int64]]]
"""Parts in files, with numbers of their blocks."""


def blocks_near(sought: Sought, parts: Sequence[Part], most: int) -> Wanted:
    """Of parts, up to so many blocks in which there may be rows of some keys and times."""
    found: Wanted = []
    for part in parts:
        numbers = part.near(np.unique(sought.hashes[sought.within(part)]), most)
        if len(numbers):
            found.append((part, numbers))
            most -= len(numbers)
        if not most:
            break
    return found


def bring(wanted: Wanted) -> None:
    """Have blocks read: those of several parts side by side, where each waits for requests."""
    if len(wanted) > 1 and any(part.far for part, _ in wanted):
        with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(wanted)), "millpond-blocks") as pool:
            list(pool.map(lambda one: one[0].bring(one[1]), wanted))
        return
    for part, numbers in wanted:
        part.bring(numbers)


class BlocksAhead:
    """Brings the blocks in which announced keys may be near: into the cache of blocks, or into the page cache.

    A part all of whose times are others than those in which a key will be looked for is not read for it. What is
    announced while blocks are read waits, and is the next read, as far as there is room. `announce` is for one thread.

    Args:
        pool: where they are read. memory: bytes of blocks that one read may bring, and that keys may take which wait.

    Attributes:
        latest: what came of the hints for the batch that ended last.
    """

    def __init__(self, pool: Executor, memory: int) -> None:
        self._pool = pool
        self._most = max(1, memory // RUN_BLOCK)
        self._room = memory // _ROOM
        self._lock = threading.Lock()
        self._waiting: list[Sought] = []
        self._count = 0  # keys that wait, some of them twice
        self._parts: Sequence[Part] = ()
        self.latest = Prefetches()
        self._reading = self._closed = False
        self._keys = self._dropped = 0
        self._seconds = 0.0

    def announce(self, sought: Sought, parts: Sequence[Part]) -> None:
        """Have blocks of parts in files read where they may have rows of some keys and times."""
        filed = [part for part in parts if part.rows is None]
        near = np.zeros(len(sought.hashes), np.bool_)
        for part in filed:
            near |= sought.within(part)
        if not near.any():
            return
        sought = sought.some(near)
        count = len(sought.hashes)
        with self._lock:
            if self._closed:
                return
            room = max(0, self._room - self._count)
            self._dropped += max(0, count - room)
            self._waiting.append(sought if count <= room else sought.some(slice(room)))
            self._count += min(room, count)
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
            started = time.perf_counter()
            sought = Sought(*(np.concatenate(columns) for columns in zip(*waiting, strict=True)))
            try:
                bring(blocks_near(sought, parts, self._most))
            except Exception as error:  # if it matters, whoever needs the rows is told
                _log.debug("blocks were not read ahead: %s", error)
            else:
                with self._lock:
                    self._keys += len(np.unique(sought.hashes))
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

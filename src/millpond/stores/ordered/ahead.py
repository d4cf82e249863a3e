"""Prefetching of file blocks for hinted keys (Keyed Prefetching §IV-C)."""

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


class PrefetchKeys(NamedTuple):
    """Keys to be looked up, each with a time interval: both bounds included, empty if `lo` > `hi`."""

    hashes: Words
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]

    def some(self, chosen: slice | NDArray[np.bool_]) -> PrefetchKeys:
        """Copy the chosen keys."""
        return PrefetchKeys(self.hashes[chosen].copy(), self.lo[chosen].copy(), self.hi[chosen].copy())

    def after(self, time: int) -> PrefetchKeys:
        """Restrict the intervals to times later than `time`."""
        return self if time == BEGINNING else self._replace(lo=np.maximum(self.lo, time + 1))

    def within(self, part: Part) -> NDArray[np.bool_]:
        """Return a mask of the keys of which a part may have rows, judged by its times."""
        near = (self.lo <= self.hi) & (self.lo <= part.newest) & (self.hi >= part.oldest)
        return near | (self.hi == NEVER) if part.timeless else near


_ROOM = 24
"""Bytes of a waiting key with its times."""
_SIDE_BY_SIDE = 8
"""Parts whose blocks are requested concurrently, if they are remote."""

Wanted = list[tuple[Part, NDArray[np.int64]]]
"""Parts in files, each with block numbers."""


def blocks_near(sought: PrefetchKeys, parts: Sequence[Part], most: int) -> Wanted:
    """Find up to `most` blocks of parts that may hold rows of the keys within their times."""
    wanted: Wanted = []
    for part in parts:
        numbers = part.near(np.unique(sought.hashes[sought.within(part)]), most)
        if len(numbers):
            wanted.append((part, numbers))
            most -= len(numbers)
        if not most:
            break
    return wanted


def bring(wanted: Wanted) -> None:
    """Read blocks; those of several remote parts are requested concurrently."""
    if len(wanted) > 1 and any(part.far for part, _ in wanted):
        with ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(wanted)), "millpond-blocks") as pool:
            list(pool.map(lambda one: one[0].bring(one[1]), wanted))
        return
    for part, numbers in wanted:
        part.bring(numbers)


class BlockPrefetcher:
    """Reads the blocks that may hold hinted keys, into the block cache or the page cache.

    A part is not read for a key whose interval lies outside the part's times. Keys hinted during a read wait for the
    next one, as far as there is room. `prefetch` may be called from one thread only.

    Args:
        pool: runs the reads. memory: bytes of blocks per read, at most; waiting keys are limited to the same.

    Attributes:
        latest: prefetch figures of the last batch.
    """

    def __init__(self, pool: Executor, memory: int) -> None:
        self._pool = pool
        self._most = max(1, memory // RUN_BLOCK)
        self._room = memory // _ROOM
        self._lock = threading.Lock()
        self._waiting: list[PrefetchKeys] = []
        self._count = 0  # waiting keys, duplicates included
        self._parts: Sequence[Part] = ()
        self.latest = Prefetches()
        self._reading = self._closed = False
        self._keys = self._dropped = 0
        self._seconds = 0.0

    def prefetch(self, sought: PrefetchKeys, parts: Sequence[Part]) -> None:
        """Read the blocks of parts in files that may hold rows of the keys within their times."""
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
        with suppress(RuntimeError):  # the slot is shutting down
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
            sought = PrefetchKeys(*(np.concatenate(columns) for columns in zip(*waiting, strict=True)))
            try:
                bring(blocks_near(sought, parts, self._most))
            except Exception as error:  # best effort: a look-up of the rows reports the error
                _log.debug("blocks were not read ahead: %s", error)
            else:
                with self._lock:
                    self._keys += len(np.unique(sought.hashes))
                    self._seconds = max(self._seconds, time.perf_counter() - started)

    def over(self) -> None:
        """Close the batch's prefetch figures. Blocks do not show which keys were looked up, so all count as used."""
        with self._lock:
            self.latest = Prefetches(self._keys, self._keys, self._dropped, self._seconds)
            self._keys = self._dropped = 0
            self._seconds = 0.0

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            self._closed = True
            self._waiting, self._count = [], 0

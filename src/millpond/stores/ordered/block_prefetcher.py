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
from millpond.stores.runs.prefetcher import PrefetchFigures

_log = logging.getLogger(__name__)


class KeyIntervals(NamedTuple):
    """Keys to be looked up, each with a time interval: both bounds included, empty if `lo` > `hi`."""

    hashes: Words
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]

    def select(self, chosen: slice | NDArray[np.bool_]) -> KeyIntervals:
        """Copy the chosen keys."""
        return KeyIntervals(self.hashes[chosen].copy(), self.lo[chosen].copy(), self.hi[chosen].copy())

    def after(self, time: int) -> KeyIntervals:
        """Restrict the intervals to times later than `time`."""
        return self if time == BEGINNING else self._replace(lo=np.maximum(self.lo, time + 1))

    def may_match(self, part: Part) -> NDArray[np.bool_]:
        """Return a mask of the keys of which a part may have rows, judged by its times."""
        reachable = (self.lo <= self.hi) & (self.lo <= part.newest) & (self.hi >= part.oldest)
        return reachable | (self.hi == NEVER) if part.timeless else reachable


_BYTES_PER_WAITING_KEY = 24
"""Bytes of a waiting key with its times."""
_MAX_CONCURRENT_PARTS = 8
"""Parts whose blocks are requested concurrently, if they are remote."""

PartBlockNumbers = list[tuple[Part, NDArray[np.int64]]]
"""Parts in files, each with block numbers."""


def find_blocks(keys: KeyIntervals, parts: Sequence[Part], max_blocks: int) -> PartBlockNumbers:
    """Find up to `max_blocks` blocks of parts that may hold rows of the keys within their times."""
    wanted: PartBlockNumbers = []
    for part in parts:
        numbers = part.candidate_blocks(np.unique(keys.hashes[keys.may_match(part)]), max_blocks)
        if len(numbers):
            wanted.append((part, numbers))
            max_blocks -= len(numbers)
        if not max_blocks:
            break
    return wanted


def preload_blocks(wanted: PartBlockNumbers) -> None:
    """Read blocks; those of several remote parts are requested concurrently."""
    if len(wanted) > 1 and any(part.remote for part, _ in wanted):
        with ThreadPoolExecutor(min(_MAX_CONCURRENT_PARTS, len(wanted)), "millpond-blocks") as pool:
            list(pool.map(lambda part_blocks: part_blocks[0].preload_blocks(part_blocks[1]), wanted))
        return
    for part, numbers in wanted:
        part.preload_blocks(numbers)


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
        self._max_blocks = max(1, memory // RUN_BLOCK)
        self._max_waiting = memory // _BYTES_PER_WAITING_KEY
        self._lock = threading.Lock()
        self._waiting: list[KeyIntervals] = []
        self._waiting_count = 0  # waiting keys, duplicates included
        self._parts: Sequence[Part] = ()
        self.latest = PrefetchFigures()
        self._reading = self._closed = False
        self._read_keys = self._dropped = 0
        self._seconds = 0.0

    def prefetch(self, keys: KeyIntervals, parts: Sequence[Part]) -> None:
        """Read the blocks of parts in files that may hold rows of the keys within their times."""
        filed = [part for part in parts if part.rows is None]
        reachable = np.zeros(len(keys.hashes), np.bool_)
        for part in filed:
            reachable |= keys.may_match(part)
        if not reachable.any():
            return
        keys = keys.select(reachable)
        count = len(keys.hashes)
        with self._lock:
            if self._closed:
                return
            room = max(0, self._max_waiting - self._waiting_count)
            self._dropped += max(0, count - room)
            self._waiting.append(keys if count <= room else keys.select(slice(room)))
            self._waiting_count += min(room, count)
            # Only the newest parts matter: those of earlier hints may have been merged since.
            self._parts = filed
            if self._reading:
                return
            self._reading = True
        with suppress(RuntimeError):  # the slot is shutting down
            self._pool.submit(self._read)

    def _read(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting, self._waiting_count, parts = self._waiting, [], 0, self._parts
                self._reading = bool(waiting) and not self._closed
                if not self._reading:
                    # No read follows: release the parts, which may be merged and closed meanwhile.
                    self._parts = ()
                    return
            started = time.perf_counter()
            keys = KeyIntervals(*(np.concatenate(columns) for columns in zip(*waiting, strict=True)))
            try:
                preload_blocks(find_blocks(keys, parts, self._max_blocks))
            except Exception as error:  # best effort: a look-up of the rows reports the error
                _log.debug("blocks were not read ahead: %s", error)
            else:
                with self._lock:
                    self._read_keys += len(np.unique(keys.hashes))
                    self._seconds = max(self._seconds, time.perf_counter() - started)

    def end_batch(self) -> None:
        """Close the batch's prefetch figures. Blocks do not show which keys were looked up, so all count as used."""
        with self._lock:
            self.latest = PrefetchFigures(self._read_keys, self._read_keys, self._dropped, self._seconds)
            self._read_keys = self._dropped = 0
            self._seconds = 0.0

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            self._closed = True
            self._waiting, self._waiting_count = [], 0

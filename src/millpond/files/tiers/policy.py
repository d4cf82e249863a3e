"""Admission and eviction of local copies (Flink 2.0 §5.4), by the reads that a copy saves."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

ADMISSION_THRESHOLD = 2.0
"""Number of times that a file's length must be read within the window before it is copied."""

_WINDOW_SECONDS = 60.0
"""Length of the sliding window of reads, in seconds."""
_WINDOW_STEPS = 12
"""Number of steps into which the sliding window is divided."""


class CachePolicy(Protocol):
    """The policy that admits and evicts local copies, and records which copies exist. Not thread-safe.

    Attributes:
        bytes: total size of all copies.
    """

    bytes: int

    def read(self, name: str, lengths: float) -> None:
        """Record a local or remote read of a file; `lengths`: bytes read as a multiple of the file's length."""

    def touch(self, name: str) -> bool:
        """Return whether a file has a copy, and mark the copy as most recently used."""

    def should_copy_on_open(self, name: str, size: int) -> bool:
        """Return whether to copy a file that has just been opened, before it is read."""

    def should_copy(self, name: str, size: int) -> bool:
        """Return whether to copy a file that is read remotely; the copy costs one read of the whole file."""

    def admit(self, name: str, size: int, *, written: bool) -> list[str] | None:
        """Decide about a complete copy, and register it if it is admitted.

        Args:
            name: name of the file.
            size: size of the copy in bytes.
            written: whether the file is new, so that it has no history of reads.

        Returns:
            The copies to evict for it; None if it is not admitted.
        """

    def remove(self, name: str) -> None:
        """Remove a file's copy and its history: the file may be gone, too."""

    def clear(self) -> None:
        """Remove all copies, but keep the files' history of reads."""


class HistoryPolicy:
    """A policy with admission by read frequency and eviction by LRU.

    A file's *saving* is the number of bytes read of the file within the last minute, locally or remotely. A copy saves
    these remote reads. (Hits of the block cache do not count: they need no remote read.) A copy costs one read of the
    file's length. So a file is copied if its saving exceeds `threshold` times its length plus the savings of the copies
    to evict. Copies are evicted in LRU order.

    Therefore a cache that is too small for evenly read files keeps its copies. A single scan, which reads each file
    once, changes nothing.

    Copying a new file costs no read. Its saving per byte is assumed to be the average of the existing copies.

    Args:
        limit: largest size of all copies in bytes.
        threshold: reads of a file's length per minute that a copy must exceed.
        clock: returns seconds.
    """

    def __init__(
        self, limit: int, threshold: float = ADMISSION_THRESHOLD, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.threshold = threshold
        self.bytes = 0
        self._clock = clock
        self._copies: OrderedDict[str, int] = OrderedDict()
        self._reads: dict[str, deque[tuple[int, float]]] = {}
        self._cleared = self._step()

    def read(self, name: str, lengths: float) -> None:
        """See `CachePolicy.read`."""
        self.touch(name)
        step = self._step()
        reads = self._reads.setdefault(name, deque(maxlen=_WINDOW_STEPS + 1))
        if reads and reads[-1][0] == step:
            lengths += reads.pop()[1]
        reads.append((step, lengths))
        if step - self._cleared > _WINDOW_STEPS:
            self._cleared = step
            self._reads = {name: reads for name, reads in self._reads.items() if reads[-1][0] > step - _WINDOW_STEPS}

    def touch(self, name: str) -> bool:
        """See `CachePolicy.touch`."""
        if name not in self._copies:
            return False
        self._copies.move_to_end(name)
        return True

    def should_copy_on_open(self, name: str, size: int) -> bool:
        """See `CachePolicy.should_copy_on_open`: true if there is free room."""
        return self.bytes + size <= self.limit

    def should_copy(self, name: str, size: int) -> bool:
        """See `CachePolicy.should_copy`."""
        gain = self.frequency(name) - self.threshold
        if name in self._copies or gain <= 0:
            return False
        victims = self._victims(size)
        return victims is not None and gain * size > self._saving(victims)

    def admit(self, name: str, size: int, *, written: bool) -> list[str] | None:
        """See `CachePolicy.admit`."""
        self.remove_copy(name)
        victims = self._victims(size)
        if victims is None:
            return None
        if victims:
            lost_saving = self._saving(victims)
            saving = (self._mean_saving() if written else self.frequency(name)) * size
            if saving < lost_saving or (saving == lost_saving and not written):
                return None
        for victim in victims:
            self.remove_copy(victim)
        self._copies[name] = size
        self.bytes += size
        return victims

    def remove(self, name: str) -> None:
        """See `CachePolicy.remove`."""
        self.remove_copy(name)
        self._reads.pop(name, None)

    def clear(self) -> None:
        """See `CachePolicy.clear`."""
        self._copies.clear()
        self.bytes = 0

    def remove_copy(self, name: str) -> None:
        """Remove a file's copy, but keep its history of reads."""
        self.bytes -= self._copies.pop(name, 0)

    def frequency(self, name: str) -> float:
        """Return the bytes read of a file within the last minute, as a multiple of its length."""
        oldest = self._step() - _WINDOW_STEPS
        return math.fsum(lengths for step, lengths in self._reads.get(name, ()) if step > oldest)

    def _victims(self, size: int) -> list[str] | None:
        """Return the copies to evict for `size` bytes, in LRU order; None if `size` exceeds the limit."""
        if size > self.limit:
            return None
        victims = []
        excess = self.bytes + size - self.limit
        for name, held in self._copies.items():
            if excess <= 0:
                break
            victims.append(name)
            excess -= held
        return victims

    def _saving(self, names: list[str]) -> float:
        return math.fsum(self.frequency(name) * self._copies[name] for name in names)

    def _mean_saving(self) -> float:
        """Return the average saving of the copies per byte."""
        return self._saving(list(self._copies)) / self.bytes if self.bytes else 0.0

    def _step(self) -> int:
        return int(self._clock() * _WINDOW_STEPS / _WINDOW_SECONDS)

"""Which files have copies on the local disk: Flink 2.0 §5.4, with an account of what a copy saves."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Protocol

ADMISSION = 2.0
"""How often a file has to be read within the window to be copied."""

_WINDOW = 60.0
"""Seconds for which reads count."""
_STEPS = 12
"""Parts of the window by which it moves on."""


class CachePolicy(Protocol):
    """Decides what is copied and what goes, and keeps the account of what is there. Not thread-safe.

    Attributes:
        bytes: of all copies.
    """

    bytes: int

    def read(self, name: str, lengths: float) -> None:
        """Some of a file was read, from its copy or from afar, so many times its whole length."""

    def touch(self, name: str) -> bool:
        """Whether a file has a copy; then it counts as used just now."""

    def expects(self, name: str, size: int) -> bool:
        """Whether to copy a file that has just been opened, before anything of it is read."""

    def wants(self, name: str, size: int) -> bool:
        """Whether to copy a file that is read from afar, which takes reading the whole of it."""

    def admit(self, name: str, size: int, *, written: bool) -> list[str] | None:
        """Take in a copy that is at hand.

        Args:
            written: the file is new, so that nothing could be read of it.

        Returns:
            The copies that have to go for it; None if it is not to stay, and nothing goes.
        """

    def forget(self, name: str) -> None:
        """The copy of a file is gone, and so may be the file."""

    def clear(self) -> None:
        """All copies are gone; their files are still read."""


class HistoryPolicy:
    """In by how often a file is read, out by how long it has not been.

    A file's *saving* is what its copy saves in a minute: how many bytes were read of it within the last one, from the
    copy or from afar. (What the cache of blocks answers was not read from afar, and would not be saved.) To copy a file
    costs its length. So a file is copied if it saves more than `threshold` times that on top of what those copies save
    which would have to go, the least recently used ones first. A cache that is too small for what is read evenly
    therefore keeps what it has, and a single scan, which reads each file once, changes nothing.

    A new file is at hand, and costs nothing; it is taken to save as much for its length as the copies do on average.

    Args:
        limit: bytes of copies, at most.
        threshold: lengths of a file.
        clock: seconds.
    """

    def __init__(self, limit: int, threshold: float = ADMISSION, clock: Callable[[], float] = time.monotonic) -> None:
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
        reads = self._reads.setdefault(name, deque(maxlen=_STEPS + 1))
        if reads and reads[-1][0] == step:
            lengths += reads.pop()[1]
        reads.append((step, lengths))
        if step - self._cleared > _STEPS:
            self._cleared = step
            self._reads = {name: reads for name, reads in self._reads.items() if reads[-1][0] > step - _STEPS}

    def touch(self, name: str) -> bool:
        """See `CachePolicy.touch`."""
        if name not in self._copies:
            return False
        self._copies.move_to_end(name)
        return True

    def expects(self, name: str, size: int) -> bool:
        """See `CachePolicy.expects`: if there is room."""
        return self.bytes + size <= self.limit

    def wants(self, name: str, size: int) -> bool:
        """See `CachePolicy.wants`."""
        gain = self.frequency(name) - self.threshold
        if name in self._copies or gain <= 0:
            return False
        victims = self._victims(size)
        return victims is not None and gain * size > self._saving(victims)

    def admit(self, name: str, size: int, *, written: bool) -> list[str] | None:
        """See `CachePolicy.admit`."""
        self.forget_copy(name)
        victims = self._victims(size)
        if victims is None:
            return None
        if victims:
            lost = self._saving(victims)
            mine = (self._mean() if written else self.frequency(name)) * size
            if mine < lost or (mine == lost and not written):
                return None
        for victim in victims:
            self.forget_copy(victim)
        self._copies[name] = size
        self.bytes += size
        return victims

    def forget(self, name: str) -> None:
        """See `CachePolicy.forget`."""
        self.forget_copy(name)
        self._reads.pop(name, None)

    def clear(self) -> None:
        """See `CachePolicy.clear`."""
        self._copies.clear()
        self.bytes = 0

    def forget_copy(self, name: str) -> None:
        """The copy of a file is gone; the file is still read."""
        self.bytes -= self._copies.pop(name, 0)

    def frequency(self, name: str) -> float:
        """How often a file was read within the last minute, in lengths of it."""
        oldest = self._step() - _STEPS
        return math.fsum(lengths for step, lengths in self._reads.get(name, ()) if step > oldest)

    def _victims(self, size: int) -> list[str] | None:
        """Those that have to go for so many bytes; None if nothing would make room."""
        if size > self.limit:
            return None
        victims = []
        left = self.bytes + size - self.limit
        for name, held in self._copies.items():
            if left <= 0:
                break
            victims.append(name)
            left -= held
        return victims

    def _saving(self, names: list[str]) -> float:
        return math.fsum(self.frequency(name) * self._copies[name] for name in names)

    def _mean(self) -> float:
        """How often copies are read on average, in lengths of them."""
        return self._saving(list(self._copies)) / self.bytes if self.bytes else 0.0

    def _step(self) -> int:
        return int(self._clock() * _STEPS / _WINDOW)

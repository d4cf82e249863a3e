"""Memory that readers of remote files share for what is on its way to them."""

from __future__ import annotations

import threading

_LEAST = 12 << 20
"""Bytes that may always be on their way: at 23 ms a request a store gives no more than 43 times this in a second."""
_STEPS = 4
"""Steps that have room at the same time."""
_LARGEST_STEP = 4 << 20
"""Bytes that a step should take at most, however much there is room for."""


class Allowance:
    """So many bytes that may be on their way at a time, whoever reads. Thread-safe.

    Args:
        limit: bytes, but `_LEAST` at least. Each reader may have one step of its own on top, or none would get
            anywhere.

    Attributes:
        step: bytes that one step of a reader should take at most.
        used: bytes that are taken.
    """

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, _LEAST)
        self.step = min(max(self.limit // _STEPS, 1), _LARGEST_STEP)
        self.used = 0
        self._lock = threading.Lock()

    def take(self, size: int, *, anyway: bool = False) -> bool:
        """Take some bytes if they are there, or anyway; whether they were taken."""
        with self._lock:
            taken = anyway or self.used + size <= self.limit
            if taken:
                self.used += size
            return taken

    def give(self, size: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self.used -= size

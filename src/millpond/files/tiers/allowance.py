"""The memory budget that readers of remote files share for requests in flight."""

from __future__ import annotations

import threading

_LEAST = 12 << 20
"""Smallest budget in bytes. At 23 ms a request, it allows 43 times this per second."""
_STEPS = 4
"""Number of steps that fit the budget at the same time."""
_LARGEST_STEP = 4 << 20
"""Largest size of a step in bytes, however large the budget is."""


class Allowance:
    """A budget of bytes in flight, shared by all readers. Thread-safe.

    Args:
        limit: the budget in bytes, at least `_LEAST`. Each reader may exceed it by one step of its own, so that every
            reader makes progress.

    Attributes:
        step: largest size of one step of a reader, in bytes.
        used: bytes in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, _LEAST)
        self.step = min(max(self.limit // _STEPS, 1), _LARGEST_STEP)
        self.used = 0
        self._lock = threading.Lock()

    def take(self, size: int, *, anyway: bool = False) -> bool:
        """Reserve bytes if the budget allows it, or unconditionally with `anyway`; return whether they are reserved."""
        with self._lock:
            taken = anyway or self.used + size <= self.limit
            if taken:
                self.used += size
            return taken

    def give(self, size: int) -> None:
        """Return reserved bytes to the budget."""
        with self._lock:
            self.used -= size

"""The memory budget that readers of remote files share for requests in flight."""

from __future__ import annotations

import threading

_MIN_BYTES = 12 << 20
"""Smallest budget in bytes. At 23 ms a request, it allows 43 times this per second."""
_STEPS_IN_FLIGHT = 4
"""Number of steps that fit the budget at the same time."""
_MAX_STEP_BYTES = 4 << 20
"""Largest size of a step in bytes, however large the budget is."""


class ReadBudget:
    """A budget of bytes in flight, shared by all readers. Thread-safe.

    Args:
        limit: the budget in bytes, at least `_MIN_BYTES`. Each reader may exceed it by one step of its own, so that
            every reader makes progress.

    Attributes:
        step: largest size of one step of a reader, in bytes.
        used: bytes in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = max(limit, _MIN_BYTES)
        self.step = min(max(self.limit // _STEPS_IN_FLIGHT, 1), _MAX_STEP_BYTES)
        self.used = 0
        self._lock = threading.Lock()

    def reserve(self, size: int, *, force: bool = False) -> bool:
        """Reserve bytes if the budget allows it, or unconditionally with `force`; return whether they are reserved."""
        with self._lock:
            reserved = force or self.used + size <= self.limit
            if reserved:
                self.used += size
            return reserved

    def release(self, size: int) -> None:
        """Return reserved bytes to the budget."""
        with self._lock:
            self.used -= size

"""Throttling of background work on files, so that batches get the processor."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from threading import Event
from typing import TypeVar

from millpond.errors import TransientError

T = TypeVar("T")


class Pace:
    """Throttles work to a share of the time.

    Args:
        share: share of one core, between 0 and 1.
    """

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self._stop = Event()
        self._full_speed = Event()

    def set_full_speed(self, enabled: bool) -> None:
        """Switch full speed on or off; it is on when merging has fallen behind."""
        if enabled:
            self._full_speed.set()
        else:
            self._full_speed.clear()

    def stop(self) -> None:
        """Stop the work at its next piece."""
        self._stop.set()

    def throttle(self, pieces: Iterable[T]) -> Iterator[T]:
        """Yield the pieces, pausing in proportion to the time that each took to make and to use.

        Raises:
            TransientError: the work was stopped.
        """
        started = time.perf_counter()
        for piece in pieces:
            yield piece
            spent = time.perf_counter() - started
            pause = 0.0 if self._full_speed.is_set() else spent * (1 - self.share) / self.share
            if self._stop.wait(pause) if pause > 0 else self._stop.is_set():
                raise TransientError("Background work on files was stopped.", action="It is done again when needed.")
            started = time.perf_counter()

"""Merging at a pace that leaves the processor to the batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from threading import Event
from typing import TypeVar

from millpond.errors import TransientError

T = TypeVar("T")


class Pace:
    """Lets work go on for a share of the time only.

    Args:
        share: of one core, between 0 and 1.
    """

    def __init__(self, share: float = 0.5) -> None:
        self.share = share
        self._stop = Event()
        self._hurry = Event()

    def hurry(self, yes: bool) -> None:
        """Work at full speed from now on, or no longer: merging has fallen behind."""
        if yes:
            self._hurry.set()
        else:
            self._hurry.clear()

    def stop(self) -> None:
        """End the work at its next piece."""
        self._stop.set()

    def over(self, pieces: Iterable[T]) -> Iterator[T]:
        """The pieces, with pauses after those that took time to make and to use.

        Raises:
            TransientError: the work was stopped.
        """
        begun = time.perf_counter()
        for piece in pieces:
            yield piece
            spent = time.perf_counter() - begun
            pause = 0.0 if self._hurry.is_set() else spent * (1 - self.share) / self.share
            if self._stop.wait(pause) if pause > 0 else self._stop.is_set():
                raise TransientError("A merge of runs was stopped.", action="It is done again when needed.")
            begun = time.perf_counter()

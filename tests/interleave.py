"""Two or more pieces of work that touch the same folders, interleaved system call by system call, as a schedule says.

Each piece runs in a thread of its own that stops before every call that others could see; nothing depends on timing.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

_STEPS = ("mkdir", "open", "rename", "replace", "rmdir", "unlink", "scandir", "listdir", "lstat", "close")

Schedule = tuple[int, int, int]
"""Who begins, after how many steps it is interrupted, and after how many of the other's it goes on to its end."""


def schedules(steps: int, most: int = 250) -> Iterator[Schedule]:
    """Interruptions of one of two pieces by the other, and back, of pieces with up to `steps` steps.

    Args:
        steps: of a piece. most: how many schedules; if there are more, every n-th of them, n odd.
    """
    count = 2 * steps * steps
    return itertools.islice(
        itertools.product((0, 1), range(steps), range(1, steps + 1)), 0, None, -(-count // most) | 1
    )


class Interleaved:
    """Runs pieces of work by schedules, with the system calls patched that are steps.

    Args:
        patch: undoes the patches at the end of the test.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        for name in _STEPS:
            patch.setattr(os, name, self._stepped(getattr(os, name)))
        self._flock = fcntl.flock
        patch.setattr(fcntl, "flock", self._lock)

    def run(self, schedule: Schedule, pieces: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run two pieces of work and return their results; raises the error of either."""
        first, before, between = schedule
        actors = [_Actor(piece, self._here) for piece in pieces]
        one, other = actors[first], actors[1 - first]
        for actor in [one] * before + [other] * between:
            actor.go()
        while not (one.done and other.done):  # each to its end, but for locks that the other holds
            for actor in (one, other):
                while not actor.done and not actor.waits:
                    actor.go()
                actor.go()
        for actor in actors:
            actor.thread.join()
            if actor.error is not None:
                raise actor.error
        return [actor.result for actor in actors]

    def _stepped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            actor = getattr(self._here, "actor", None)
            if actor is not None:
                actor.stop()
            return call(*args, **kwargs)

        return step

    def _lock(self, file: int, how: int) -> None:
        """As `fcntl.flock`, but who waits gives the turn to others."""
        actor = getattr(self._here, "actor", None)
        if actor is None:
            return self._flock(file, how)
        while True:
            actor.stop()
            actor.waits = False
            try:
                return self._flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
                actor.waits = True


class _Actor:
    """One piece of work, in a thread that goes on only when it is its turn."""

    def __init__(self, piece: Callable[[], Any], here: threading.local) -> None:
        self._turn, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._here = here
        self._piece = piece
        self.done = self.waits = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def go(self) -> None:
        """Take one step, if there is one left."""
        if not self.done:
            self._turn.release()
            self._stopped.acquire()

    def stop(self) -> None:
        """Wait for the next turn; called in the thread itself."""
        self._stopped.release()
        self._turn.acquire()

    def _run(self) -> None:
        self._turn.acquire()
        self._here.actor = self
        try:
            self.result = self._piece()
        except BaseException as error:
            self.error = error
        finally:
            self._here.actor = None
            self.done = True
            self._stopped.release()

"""Pieces of work on the same folders, interleaved system call by system call by a schedule.

Each piece runs in a thread of its own, which stops before every call with a visible effect. Nothing depends on timing.
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
"""Number of the piece that begins, its steps until it is interrupted, and the steps of the other until it continues."""


def schedules(steps: int, most: int = 250) -> Iterator[Schedule]:
    """Return schedules by which one of two pieces is interrupted by the other, which is then interrupted in turn.

    Args:
        steps: of a piece, at most.
        most: number of schedules; if there are more, only every n-th is returned, n odd.
    """
    count = 2 * steps * steps
    return itertools.islice(
        itertools.product((0, 1), range(steps), range(1, steps + 1)), 0, None, -(-count // most) | 1
    )


class Interleaved:
    """Runs pieces of work by schedules; a step is a system call that is patched here.

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
        """Run two pieces of work.

        Returns:
            Their results.

        Raises:
            BaseException: the error of either.
        """
        first, before, between = schedule
        actors = [_Actor(piece, self._here) for piece in pieces]
        one, other = actors[first], actors[1 - first]
        for actor in [one] * before + [other] * between:
            actor.go()
        while not (one.done and other.done):  # each to its end, or to a lock that the other holds
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
        """Lock as `fcntl.flock` does, but run the other piece while this one waits."""
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
    """One piece of work, in a thread that takes a step only in its turn."""

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
        """Let the thread take one step, if there is one left."""
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

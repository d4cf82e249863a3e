"""Threads that a test moves: what is submitted is done when the test says, or when somebody waits for it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any


class Later(Executor):
    """Does some things at once and keeps others for `step`, in the same thread, as `choice` has it.

    What is no `Exception` passes through: the process that did it is gone.
    """

    def __init__(self, choice: random.Random | None = None) -> None:
        self._choice = choice
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Awaited(self)
        self._tasks.append((future, lambda: fn(*args, **kwargs)))
        if self._choice is None or self._choice.random() < 0.5:
            self.finish()
        return future

    def step(self) -> bool:
        """Do the next task; False when there is none."""
        if not self._tasks:
            return False
        future, task = self._tasks.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
        return True

    def finish(self) -> None:
        """Do all tasks."""
        while self.step():
            pass

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if wait and not cancel_futures:
            self.finish()


class Awaited(Future[Any]):
    """A task that is done at the latest when its result is asked for."""

    def __init__(self, owner: Later) -> None:
        super().__init__()
        self._owner = owner

    def result(self, timeout: float | None = None) -> Any:
        while not self.done() and self._owner.step():
            pass
        return super().result(0)


def at_once(*_: object, **__: object) -> Later:
    """In the place of a pool of threads."""
    return Later()


def wait_for(futures: Iterable[Future[Any]]) -> None:
    """In the place of `concurrent.futures.wait`."""
    for future in futures:
        if isinstance(future, Awaited):
            while not future.done() and future._owner.step():
                pass

"""Lock of a partition: attempts at its batches take turns, and the newest batch always gets its turn."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millpond.errors import TransientError


@dataclass(eq=False)
class Attempt:
    """One attempt at a batch.

    Attributes:
        batch: the batch.
        number: Spark's task attempt id.
        abandon: cuts the attempt off from its input, so that it fails and releases the lock.
        fed: whether all its input has arrived, so that it no longer depends on another process.
    """

    batch: int
    number: int
    abandon: Callable[[], None]
    fed: bool = False


class AttemptLock:
    """Lock that one attempt at a time holds to write.

    Args:
        patience: seconds to wait for the input of an earlier attempt at the same batch before it is cut off.
        over: called when the lock is closed and its last holder has released it.

    Attributes:
        closed: whether the lock is closed: no attempt can take it any more.
    """

    def __init__(self, patience: float, over: Callable[[], None] = lambda: None) -> None:
        self._patience = patience
        self._over = over
        self._changed = threading.Condition()
        self._current: Attempt | None = None
        self._coming = 0  # number of waiting attempts
        self.closed = False

    def close(self, patience: float = 5.0) -> None:
        """Refuse all later attempts, cut off the holder, and wait `patience` seconds for its release."""
        with self._changed:
            self.closed = True
            if self._current is not None:
                self._current.abandon()
            free = self._changed.wait_for(lambda: self._current is None, patience)
            self._changed.notify_all()
        if free:
            self._over()

    @contextlib.contextmanager
    def taken(self, attempt: Attempt) -> Iterator[None]:
        """Hold the lock.

        Raises:
            TransientError: a later batch is already being written, the holder does not release the lock, or the lock is
                closed.
        """
        self._take(attempt)
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock briefly if it is free and no attempt waits for it; yield whether it is held."""
        with self._changed:
            free = self._current is None and not self._coming and not self.closed
            if free:
                self._current = Attempt(-1, -1, lambda: None, fed=True)
        try:
            yield free
        finally:
            if free:
                self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._current = None
            closed = self.closed
            self._changed.notify_all()
        if closed:
            self._over()

    def _take(self, attempt: Attempt) -> None:
        with self._changed:
            self._coming += 1
            try:
                self._wait(attempt)
            finally:
                self._coming -= 1
            self._current = attempt

    def _wait(self, attempt: Attempt) -> None:
        deadline = time.monotonic() + self._patience
        cut_off: Attempt | None = None
        while (current := self._current) is not None:
            if current.batch > attempt.batch:
                raise TransientError(f"Batch {attempt.batch} was overtaken by batch {current.batch}.")
            # With all its input, the holder ends by itself: wait for it, and start the timeout again afterwards.
            if current.batch == attempt.batch and current.fed:
                self._changed.wait()
                deadline = time.monotonic() + self._patience
                continue
            # Spark starts a batch only after the previous one, so an attempt at an earlier batch is abandoned.
            expired = time.monotonic() >= deadline
            if cut_off is not current and (expired or current.batch < attempt.batch):
                cut_off = current
                current.abandon()
                deadline = time.monotonic() + self._patience
            elif expired:
                raise TransientError(f"Attempt {current.number} at batch {current.batch} does not end.")
            self._changed.wait(deadline - time.monotonic())
        if self.closed:
            raise stopped()


def stopped() -> TransientError:
    """Return the error for an attempt that starts or continues after the lock is closed."""
    return TransientError("The slot has released the partition: its query has stopped.")

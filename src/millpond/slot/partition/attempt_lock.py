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
        cancel: cuts the attempt off from its input, so that it fails and releases the lock.
        waiting_since: `time.monotonic()` at which it began to wait for its next input; None while it does not wait for
            input, for example while it opens the state.
    """

    batch: int
    number: int
    cancel: Callable[[], None]
    waiting_since: float | None = None


class AttemptLock:
    """Lock that one attempt at a time holds to write.

    Args:
        input_timeout: seconds to wait for the next input of an earlier attempt at the same batch before it is cut off.
        on_closed: called when the lock is closed and its last holder has released it.

    Attributes:
        closed: whether the lock is closed: no attempt can take it any more.
    """

    def __init__(self, input_timeout: float, on_closed: Callable[[], None] = lambda: None) -> None:
        self._input_timeout = input_timeout
        self._on_closed = on_closed
        self._changed = threading.Condition()
        self._current: Attempt | None = None
        self._waiting = 0  # number of waiting attempts
        self.closed = False

    def close(self, release_timeout: float = 5.0) -> None:
        """Refuse all later attempts, cut off the holder, and wait `release_timeout` seconds for its release."""
        with self._changed:
            self.closed = True
            if self._current is not None:
                self._current.cancel()
            free = self._changed.wait_for(lambda: self._current is None, release_timeout)
            self._changed.notify_all()
        if free:  # else the holder calls it when it releases the lock
            self._on_closed()

    @contextlib.contextmanager
    def hold(self, attempt: Attempt) -> Iterator[None]:
        """Hold the lock.

        Raises:
            TransientError: a later batch is already being written, the holder does not release the lock, or the lock is
                closed.
        """
        self._acquire(attempt)
        try:
            yield
        finally:
            self._release()

    @contextlib.contextmanager
    def try_hold(self, batch: int = -1) -> Iterator[bool]:
        """Hold the lock if it is free and no attempt waits for it; yield whether it is held.

        Args:
            batch: the batch that the holder counts as. Attempts at this batch wait without a limit. Attempts at an
                earlier batch are refused as overtaken, attempts at a later one wait for the timeout. −1 is earlier than
                any batch.
        """
        with self._changed:
            free = self._current is None and not self._waiting and not self.closed
            if free:
                self._current = Attempt(batch, -1, lambda: None)
        try:
            yield free
        finally:
            if free:
                self._release()

    def _release(self) -> None:
        with self._changed:
            self._current = None
            closed = self.closed
            self._changed.notify_all()
        if closed:
            self._on_closed()

    def _acquire(self, attempt: Attempt) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._wait_for_holder(attempt)
            finally:
                self._waiting -= 1
            self._current = attempt

    def _wait_for_holder(self, attempt: Attempt) -> None:
        deadline = time.monotonic() + self._input_timeout
        cut_off: Attempt | None = None
        while (current := self._current) is not None:
            if current.batch > attempt.batch:
                raise TransientError(f"Batch {attempt.batch} was overtaken by batch {current.batch}.")
            now = time.monotonic()
            # A holder at the same batch is cut off only after it has waited for one input as long as the timeout.
            if current.batch == attempt.batch:
                deadline = max(deadline, (current.waiting_since or now) + self._input_timeout)
            # Spark starts a batch only after the previous one, so an attempt at an earlier batch is abandoned.
            expired = now >= deadline
            if cut_off is not current and (expired or current.batch < attempt.batch):
                cut_off = current
                current.cancel()
                deadline = time.monotonic() + self._input_timeout
            elif expired:
                raise TransientError(f"Attempt {current.number} at batch {current.batch} does not end.")
            self._changed.wait(deadline - time.monotonic())
        if self.closed:
            raise query_stopped_error()


def query_stopped_error() -> TransientError:
    """Return the error for an attempt that starts or continues after the lock is closed."""
    return TransientError("The slot has released the partition: its query has stopped.")

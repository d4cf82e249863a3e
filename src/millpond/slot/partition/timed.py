"""Measurement of the CPU time of background work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TimedExecutor(Executor):
    """Executor that measures the CPU time of the calls submitted through it, once each has ended.

    Args:
        executor: shared executor that runs each call in one thread.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self.seconds = 0.0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        return self._executor.submit(self._timed, partial(fn, *args, **kwargs))

    def _timed(self, call: Callable[[], T]) -> T:
        begun = time.thread_time()
        try:
            return call()
        finally:
            with self._lock:
                self.seconds += time.thread_time() - begun

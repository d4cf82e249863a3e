"""The `StreamingQuery` that a start returns: Spark's own, with short errors and a clean end on Ctrl-C."""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from millpond.plan.catalyst.stopping import stop_at_exit

_PLAN = "\n\nLogical Plan:\n"
"""Separator in the text of Spark's error. The rewritten plan follows, which does not help the user."""

_STOP_SECONDS = 3
"""Seconds for which a program that exits waits for a running batch."""

_T = TypeVar("_T")
_running: list[RunningQuery] = []


class RunningQuery(StreamingQuery):  # type: ignore[misc]
    """A query that Millpond has started."""

    @classmethod
    def of(cls, query: StreamingQuery) -> RunningQuery:
        """Wrap a query, so that it is stopped when the program exits."""
        _running[:] = [other for other in _running if other.isActive]
        running = cls(query._jsq)
        _running.append(running)
        return running

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        """Wait for the end of the query, as `StreamingQuery.awaitTermination` does."""
        with _without_plan():
            waited: bool | None = _interruptible(lambda: StreamingQuery.awaitTermination(self, timeout))
            return waited

    def processAllAvailable(self) -> None:
        """Wait until all available data is processed, as `StreamingQuery.processAllAvailable` does."""
        with _without_plan():
            _interruptible(lambda: StreamingQuery.processAllAvailable(self))

    def exception(self) -> StreamingQueryException | None:
        """Return the error that ended the query, as `StreamingQuery.exception` does."""
        error = super().exception()
        return None if error is None else _shortened(error)


@contextmanager
def _without_plan() -> Iterator[None]:
    try:
        yield
    except StreamingQueryException as error:
        _shortened(error)
        raise


def _shortened(error: Any) -> Any:
    error._desc = error._desc.partition(_PLAN)[0]
    return error


def _interruptible(wait: Callable[[], _T]) -> _T:
    """Call a blocking function of Spark so that Ctrl-C ends only the wait.

    PySpark's SIGINT handler cancels all jobs by a second call on the connection that waits here. Both calls then fail
    with tracebacks. So the call runs in another thread, and Python's own handler replaces PySpark's meanwhile.
    """
    handler = signal.getsignal(signal.SIGINT)
    of_spark = getattr(handler, "__module__", None) == SparkContext.__module__
    if not of_spark or threading.current_thread() is not threading.main_thread():
        return wait()
    outcome: Future[_T] = Future()

    def call() -> None:
        try:
            outcome.set_result(wait())
        except BaseException as error:
            outcome.set_exception(error)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=call, name="millpond-waiting", daemon=True).start()
        return outcome.result()
    finally:
        signal.signal(signal.SIGINT, handler)


@atexit.register
def _stop_running() -> None:
    """Stop the queries before the program exits.

    The JVM exits with the program that started it. If queries still run then, it logs hundreds of lines about their
    failed batches. A program that does not own the JVM does not stop its queries.
    """
    gateway = SparkContext._gateway
    jvm = getattr(gateway, "proc", None)
    if jvm is None or jvm.poll() is not None or SparkContext._active_spark_context is None:
        return
    for query in _running:
        with suppress(Exception, KeyboardInterrupt):
            if query.isActive:
                stop_at_exit(query, _STOP_SECONDS)

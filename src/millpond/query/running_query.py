"""The `StreamingQuery` that a start returns: Spark's own, with readable errors, which ends quietly on Ctrl-C."""

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
"""In the text of Spark's error: the plan of the query as Millpond has rewritten it follows, of no use to the user."""

_STOP_SECONDS = 3
"""How long a program that ends waits for a batch that runs."""

_T = TypeVar("_T")
_running: list[RunningQuery] = []


class RunningQuery(StreamingQuery):  # type: ignore[misc]
    """A query that Millpond has started."""

    @classmethod
    def of(cls, query: StreamingQuery) -> RunningQuery:
        """The same query, which is stopped when the program ends."""
        _running[:] = [one for one in _running if one.isActive]
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
        """Return the error that has ended the query, as `StreamingQuery.exception` does."""
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
    """Call a function of Spark's that blocks, so that Ctrl-C ends the wait and nothing else.

    PySpark's handler of SIGINT cancels all jobs by a second call on the connection that waits here, which fails with
    tracebacks of both. So the call is made in another thread, and Python's own handler replaces PySpark's meanwhile.
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
    """Stop the queries before the program ends.

    The JVM ends with the program that has started it. If queries still run then, it logs hundreds of lines on how
    their batches fail. A program that somebody else's JVM has started leaves them alone.
    """
    gateway = SparkContext._gateway
    jvm = getattr(gateway, "proc", None)
    if jvm is None or jvm.poll() is not None or SparkContext._active_spark_context is None:
        return
    for query in _running:
        with suppress(Exception, KeyboardInterrupt):
            if query.isActive:
                stop_at_exit(query, _STOP_SECONDS)

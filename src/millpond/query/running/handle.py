"""The `StreamingQuery` that a start returns: Spark's own, with short errors and a clean end on Ctrl-C."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError
from millpond.plan.catalyst.stopping import stop_at_exit

_PLAN = "\n\nLogical Plan:\n"
"""Separator in the text of Spark's error. The rewritten plan follows, which does not help the user."""

_STOP_SECONDS = 3
"""Seconds for which a program that exits waits for a running batch."""

_KEPT_PROGRESS = 100
"""Batches of earlier runs whose progress is kept: as many as Spark keeps of a run by default."""

_SHORTEST_WAIT_SECONDS = 0.001
"""Spark refuses a wait of zero."""

_SILENT_SECONDS = 5.0
"""Seconds for which `stop` waits for a start under way before it says so."""

log = logging.getLogger("millpond")

_T = TypeVar("_T")
_running: list[RunningQuery] = []


class RunningQuery(StreamingQuery):  # type: ignore[misc]
    """A query that Millpond has started. It stays the same object if the query is started again after a lost host.

    Args:
        java: Spark's query.
        supervised: whether another run may follow this one, until `end` is called.
    """

    def __init__(self, java: Any, *, supervised: bool = False) -> None:
        super().__init__(java)
        self._jsq: Any  # changes with each run
        self._changed = threading.Condition()
        self._over = not supervised
        self._failure: StreamingQueryException | None = None
        self._earlier_progress: list[Any] = []
        self.stopping = threading.Event()  # set once the user asks for the end of the query
        """Whether the user has asked for the end of the query."""

    @classmethod
    def of(cls, query: StreamingQuery, *, supervised: bool = False) -> RunningQuery:
        """Wrap a query, so that it is stopped when the program exits."""
        _running[:] = [other for other in _running if _is_active(other)]
        running = cls(query._jsq, supervised=supervised)
        _running.append(running)
        return running

    def continue_as(self, query: StreamingQuery) -> None:
        """Go on with the next run of the query."""
        earlier = [*self._earlier_progress, *StreamingQuery(self._jsq).recentProgress]
        with self._changed:
            self._earlier_progress = earlier[-_KEPT_PROGRESS:]
            self._jsq = query._jsq
            self._changed.notify_all()

    def end(self, failure: MillpondError | None = None) -> None:
        """Record that no other run follows, and why if another was due."""
        with self._changed:
            self._over = True
            if failure is not None:  # in the form in which users expect the errors of a query
                self._failure = StreamingQueryException(str(failure))
                self._failure.__cause__ = failure
            self._changed.notify_all()

    @property
    def isActive(self) -> bool:
        """Whether the query runs, or is being started again."""
        return not self._over or bool(StreamingQuery(self._jsq).isActive)

    @property
    def recentProgress(self) -> list[Any]:
        """The progress of the last batches, also of earlier runs behind this object."""
        return [*self._earlier_progress, *StreamingQuery(self._jsq).recentProgress]

    @property
    def lastProgress(self) -> Any:
        """The progress of the last batch; None before the first one."""
        last = StreamingQuery(self._jsq).lastProgress
        return self._earlier_progress[-1] if last is None and self._earlier_progress else last

    def awaitTermination(self, timeout: int | None = None) -> bool | None:
        """Wait for the end of the query, as `StreamingQuery.awaitTermination` does.

        Raises:
            StreamingQueryException: the query has failed, or could not be started again after a lost host.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with _without_plan():
            return _interruptible(lambda: self._await(StreamingQuery.awaitTermination, timeout, deadline))

    def processAllAvailable(self) -> None:
        """Wait until all available data is processed, as `StreamingQuery.processAllAvailable` does."""

        def process(query: StreamingQuery, _: float | None) -> None:
            query.processAllAvailable()

        with _without_plan():
            _interruptible(lambda: self._await(process, None, None))

    def _await(
        self, wait: Callable[[StreamingQuery, Any], bool | None], timeout: float | None, deadline: float | None
    ) -> bool | None:
        """Wait for one run after the other, until one ends after which no other follows."""
        while True:
            java, error = self._jsq, None
            try:
                result = wait(StreamingQuery(java), timeout)
            except StreamingQueryException as failure:
                result, error = None, failure
            # A run that goes on has no successor: the time is up, or all available data is processed.
            if error is None and (result is False or StreamingQuery(java).isActive):
                return result
            with self._changed:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._changed.wait_for(partial(self._successor_is_known, java), left):
                    return False
                if self._jsq is java:
                    break
            timeout = None if deadline is None else max(_SHORTEST_WAIT_SECONDS, deadline - time.monotonic())
        if self._failure is not None:
            raise self._failure
        if error is not None:
            raise error
        return result

    def _successor_is_known(self, java: Any) -> bool:
        """Return whether another run has followed this one, or none will."""
        return self._over or self._jsq is not java

    def stop(self) -> None:
        """Stop the query, as `StreamingQuery.stop` does, and let no other run follow."""
        self.stopping.set()
        StreamingQuery(self._jsq).stop()
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, _SILENT_SECONDS):
                log.warning(
                    "query %s is checked, or started again, after a lost host: stop() waits until that has ended, and "
                    "then stops it",
                    self.id,
                )
                self._changed.wait_for(lambda: self._over)

    def exception(self) -> StreamingQueryException | None:
        """Return the error that ended the query, as `StreamingQuery.exception` does."""
        if not self._over or self._failure is not None:
            return self._failure
        error = StreamingQuery(self._jsq).exception()
        return None if error is None else _shortened(error)


@contextmanager
def _without_plan() -> Iterator[None]:
    try:
        yield
    except StreamingQueryException as error:
        _shortened(error)
        raise


def _shortened(error: Any) -> Any:
    if hasattr(error, "_desc"):  # the error comes from Spark's JVM
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


def _is_active(query: RunningQuery) -> bool:
    try:
        return query.isActive
    except Py4JError:  # the JVM of an earlier SparkContext has ended
        return False


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
            if _is_active(query):
                stop_at_exit(StreamingQuery(query._jsq), _STOP_SECONDS)

"""Threads that accompany a running query: a step at intervals, and an action at the query's end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("millpond")

AtEnd = Callable[[Exception | None], None]
"""Action at the end of a query. Its argument is the error that ended the wait: the query or a step has failed, or the
JVM is gone. It is None after a stop."""


def beside(
    query: StreamingQuery,
    name: str,
    step: Callable[[], None],
    every: float,
    at_end: AtEnd = lambda error: None,
    *,
    first: Callable[[], None] = lambda: None,
) -> threading.Thread:
    """Return a thread that repeats a step until the query ends. The caller starts it.

    Args:
        query: the running query.
        name: the thread's name.
        step: the step; an error in it ends the repetition.
        every: seconds before each step. The end of the query is noticed at once.
        at_end: action after the last step.
        first: action at once, also if the query has ended by then; an error in it is like one in a step.
    """

    def repeat() -> None:
        first()
        while not query.awaitTermination(every):
            step()

    return _thread(name, repeat, at_end)


def after(query: StreamingQuery, name: str, at_end: AtEnd) -> threading.Thread:
    """Return a thread that waits for the end of the query, then acts. The caller starts it.

    Args:
        query: the running query.
        name: the thread's name.
        at_end: the action.
    """
    return _thread(name, query.awaitTermination, at_end)


def _thread(name: str, wait: Callable[[], object], at_end: AtEnd) -> threading.Thread:
    def run() -> None:
        error: Exception | None = None
        try:
            wait()
        except Exception as failure:  # the query or a step failed, or the JVM is gone; the query's error is reported
            log.debug("%s: the query is not accompanied any more: %s", name, failure)
            error = failure
        at_end(error)

    return threading.Thread(target=run, name=name, daemon=True)

"""Warnings of commits that fail while no batch waits for them: between batches, and after a stop."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError
from millpond.query.running.companion import beside
from millpond.slot.process.client import query_status
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import QueryStatus
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

POLL_SECONDS = 10.0
_WORKER_GONE = "Python worker exited unexpectedly"
_WATCH_AFTER_STOP_SECONDS = 20.0


def watch_commits(query: StreamingQuery, task: OperatorTask) -> None:
    """Check commits every ten seconds, in a thread that ends soon after the query.

    During a batch, slots report failed commits to the batch itself. Only slots on the driver's host are asked.

    Args:
        query: the running query.
        task: any operator of the query.
    """
    label = f"{query.name} ({task.query})" if query.name else task.query

    def check() -> None:
        if not query.status["isTriggerActive"]:
            _log_failed_commits(label, task, "between batches")

    def at_end(error: Exception | None) -> None:
        if error is None:
            _watch_last_commit(label, task)
        elif _WORKER_GONE in str(error):
            _log_lost_workers(task)

    beside(query, "millpond-commits", check, POLL_SECONDS, at_end).start()


def _watch_last_commit(query: str, task: OperatorTask) -> None:
    """Log if the last commit fails: a stop does not wait for it, and no batch is left to report it."""
    deadline = time.monotonic() + _WATCH_AFTER_STOP_SECONDS
    when = "after its end, and its last batch would run once more"
    while time.monotonic() < deadline and not _log_failed_commits(query, task, when):
        time.sleep(1.0)


def _log_lost_workers(task: OperatorTask) -> None:
    """Log where a Python worker died: Spark does not know the place in the user's code."""
    with suppress(MillpondError):
        for call in _status(task).lost_calls:
            log.warning("the Python worker died while it ran code of yours: %s; the state is not harmed", call)


def _log_failed_commits(query: str, task: OperatorTask, when: str) -> bool:
    """Log failed commits; return whether there were any, or slots did not answer."""
    try:
        failures = _status(task).commit_failures
    except MillpondError as error:  # the next caller replaces a slot that does not answer
        log.debug("slots were not asked for commits that fail: %s", error)
        return True
    for failure in failures:
        log.warning("commits of query %s fail %s: %s", query, when, failure)
    return bool(failures)


def _status(task: OperatorTask) -> QueryStatus:
    return query_status(SlotDirectory.of(task), task.key, task.settings.silence_timeout)

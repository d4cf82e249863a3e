"""Tells of commits that fail while no batch waits for them: between batches, and after a stop."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import lost_calls, troubles

log = logging.getLogger("millpond")

LOOK_SECONDS = 10.0
_WORKER_GONE = "Python worker exited unexpectedly"
_AFTER_STOP_SECONDS = 20.0


def watch_commits(query: StreamingQuery, task: PipeTask) -> None:
    """Look every ten seconds, in a thread that ends soon after the query.

    Batches that wait for a commit are told of it by their slots; those on other hosts than the driver's are not asked.

    Args:
        query: the running query. task: any pipe task of it.
    """
    threading.Thread(target=_watch, args=(query, task), name="millpond-commits", daemon=True).start()


def _watch(query: StreamingQuery, task: PipeTask) -> None:
    try:
        told = f"{query.name} ({task.query})" if query.name else task.query
        while not query.awaitTermination(LOOK_SECONDS):
            if not query.status["isTriggerActive"]:
                _tell(told, task, "between batches")
    except Exception as error:  # the query failed, or the JVM is gone; either is reported elsewhere
        log.debug("commits are not watched any more: %s", error)
        if _WORKER_GONE in str(error):
            _tell_lost(task)
        return
    deadline, when = time.monotonic() + _AFTER_STOP_SECONDS, "after its end, and its last batch would run once more"
    while time.monotonic() < deadline and not _tell(told, task, when):
        time.sleep(1.0)


def _tell_lost(task: PipeTask) -> None:
    """Say where a Python worker was that died: Spark does not know."""
    with suppress(MillpondError):
        for one in lost_calls(task):
            log.warning("the Python worker died while it ran code of yours: %s; the state is not harmed", one)


def _tell(query: str, task: PipeTask, when: str) -> bool:
    """Whether there was something to tell."""
    try:
        said = troubles(task)
    except MillpondError as error:  # a slot that does not answer is replaced by whoever needs it
        log.debug("slots were not asked for commits that fail: %s", error)
        return True
    for one in said:
        log.warning("commits of query %s fail %s: %s", query, when, one)
    return bool(said)

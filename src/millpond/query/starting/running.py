"""The runs of queries on this host: noted for those who look from outside (`millpond top`), and seen to their end."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from pyspark import SparkContext
from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import FencedError, MillpondError, SettingError, TransientError
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import DRAIN, drain, troubles
from millpond.slot.process.identity import Process, owner
from millpond.slot.process.lifecycle import POLL, SlotDirectory
from millpond.slot.process.queries import RunningNote, canonical, forget_query, note_query

log = logging.getLogger("millpond")

_TRY = 5.0
"""Seconds for which the slots are kept busy with the end of a run at a time: it may be started again meanwhile."""

_PAUSE = 0.5


@dataclass(frozen=True)
class _Run:
    """A run that this process has started, and the thread that waits for its end."""

    query: StreamingQuery
    task: PipeTask
    watcher: threading.Thread


_runs: dict[str, _Run] = {}
"""By `PipeTask.run`, until what they have left pending is committed."""

_applications: set[str] = set()
"""Those of which the end is waited for."""


def watch_run(query: StreamingQuery, task: PipeTask) -> None:
    """Note that a query runs; when it ends, have its slots commit what is left and give their memory to other queries.

    Args:
        query: the running query. task: any pipe task of it.
    """
    directory, user = SlotDirectory.of(task), owner(task.jvm)
    try:
        directory.enter(user)
        note_query(directory, RunningNote(task.key, task.run, task.location, user))
    except (OSError, SettingError, TransientError) as error:
        log.debug("that the query runs was not noted: %s", error)
    watcher = threading.Thread(target=_watch, args=(query, directory, task), name="millpond-running", daemon=True)
    _runs[task.run] = _Run(query, task, watcher)
    watcher.start()


def _watch(query: StreamingQuery, directory: SlotDirectory, task: PipeTask) -> None:
    try:
        query.awaitTermination()
    except Exception as error:  # the query failed, or the JVM is gone; either is reported elsewhere
        log.debug("the query has ended: %s", error)
    try:
        while not let_go(task, _TRY):
            time.sleep(_PAUSE)
    finally:
        _runs.pop(task.run, None)
        with suppress(OSError):
            forget_query(directory, task.key, task.run)


def let_go(task: PipeTask, timeout: float = DRAIN) -> bool:
    """Have the slots of this host commit what is left of a run that has ended, or will not begin, and let go of it.

    Args:
        task: any pipe task of the run.
        timeout: seconds to wait for the store.

    Returns:
        Whether they hold nothing of it any more.
    """
    try:
        drain(task, timeout, ended=True)
    except FencedError:
        return True
    except (MillpondError, OSError) as error:
        log.debug("what a run has left is not durable yet: %s", error)
        return False
    return True


def await_commits(location: str) -> None:
    """Wait until what runs that have ended have left is durable, if this process has started them.

    Args:
        location: URL of their state.

    Raises:
        TransientError: it is not, in the time for which a batch would wait for it.
    """
    for run in list(_runs.values()):
        if canonical(run.task.location) == canonical(location) and not run.query.isActive:
            timeout = run.task.settings.commit_timeout
            run.watcher.join(timeout)
            if run.watcher.is_alive():
                why = "".join(f" ({trouble})" for trouble in troubles(run.task))
                raise TransientError(
                    f"The last batches of the query, which has ended, are not durable after {timeout:.0f} s{why}.",
                    action="Read the state again when the store can be reached, or an older version of it.",
                    query=run.task.query,
                    file=location,
                )


def end_with(context: SparkContext, task: PipeTask) -> None:
    """Have the slots of this host end with the Spark application, which its JVM may outlive.

    Args:
        context: the application's. task: any pipe task.
    """
    if task.application not in _applications:
        _applications.add(task.application)
        directory = SlotDirectory.of(task)
        arguments = context, directory, owner(task.jvm)
        threading.Thread(target=_end_with, args=arguments, name="millpond-ending", daemon=True).start()


def _end_with(context: SparkContext, directory: SlotDirectory, user: Process) -> None:
    while context._jsc is not None:  # it is not asked, as it may go at any time
        time.sleep(POLL)
    with suppress(OSError):
        directory.leave(user)

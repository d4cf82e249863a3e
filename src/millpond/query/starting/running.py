"""The runs of queries on this host: noted for those who look from outside (`millpond top`), and seen to their end."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass

from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError, SettingError
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import drain
from millpond.slot.process.identity import Process
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.queries import RunningNote, canonical, forget_query, note_query

log = logging.getLogger("millpond")


@dataclass(frozen=True)
class _Run:
    """A run that this process has started, and the thread that waits for its end."""

    query: StreamingQuery
    location: str
    watcher: threading.Thread


_runs: dict[str, _Run] = {}
"""By `PipeTask.run`, until what they have left pending is committed."""


def watch_run(query: StreamingQuery, task: PipeTask, user: Process) -> None:
    """Note that a query runs; when it ends, have its slots commit what is left and give their memory to other queries.

    Args:
        query: the running query. task: any pipe task of it.
        user: the application's process.
    """
    directory = SlotDirectory.of(task)
    try:
        directory.enter(user)
        note_query(directory, RunningNote(task.key, task.run, task.location, user))
    except (OSError, SettingError) as error:
        log.debug("that the query runs was not noted: %s", error)
    watcher = threading.Thread(target=_watch, args=(query, directory, task), name="millpond-running", daemon=True)
    _runs[task.run] = _Run(query, task.location, watcher)
    watcher.start()


def _watch(query: StreamingQuery, directory: SlotDirectory, task: PipeTask) -> None:
    try:
        query.awaitTermination()
    except Exception as error:  # the query failed, or the JVM is gone; either is reported elsewhere
        log.debug("the query has ended: %s", error)
    try:
        drain(task, ended=True)
    except (MillpondError, OSError) as error:
        log.debug("what the query has left is committed when it is started again: %s", error)
    finally:
        _runs.pop(task.run, None)
        with suppress(OSError):
            forget_query(directory, task.key, task.run)


def await_commits(location: str) -> None:
    """Wait until runs that this process has started, and that have ended, are committed as far as they can be.

    Args:
        location: URL of their state.
    """
    for run in list(_runs.values()):
        if canonical(run.location) == canonical(location) and not run.query.isActive:
            run.watcher.join()

"""Notes on this host that a query runs, for those who look from outside (`millpond top`)."""

from __future__ import annotations

import logging
import threading

from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import SettingError
from millpond.slot.batch.task import PipeTask
from millpond.slot.process.identity import Process
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.queries import RunningNote, forget_query, note_query

log = logging.getLogger("millpond")


def note_while_running(query: StreamingQuery, task: PipeTask, user: Process) -> None:
    """Note that a query runs; a thread removes the note when it has ended. What cannot be noted is not missed.

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
        return
    threading.Thread(target=_forget, args=(query, directory, task), name="millpond-running", daemon=True).start()


def _forget(query: StreamingQuery, directory: SlotDirectory, task: PipeTask) -> None:
    try:
        query.awaitTermination()
    except Exception as error:  # the query failed, or the JVM is gone; either is reported elsewhere
        log.debug("the query has ended: %s", error)
    forget_query(directory, task.key, task.run)

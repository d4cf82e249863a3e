"""The runs of queries on this host: recorded for `millpond top`, and watched until their last commit."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from pyspark import SparkContext
from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import FencedError, MillpondError, SettingError, TransientError
from millpond.files.locations.opening import same_place
from millpond.query.running.companion import after
from millpond.slot.process.client import DRAIN_SECONDS, drain, query_status
from millpond.slot.process.identity import Process, owner
from millpond.slot.process.lifecycle import POLL_SECONDS, SlotDirectory
from millpond.slot.process.queries import QueryRecord, record_query, remove_query
from millpond.tasks.block_references import delete_generations
from millpond.tasks.operator_task import OperatorTask

log = logging.getLogger("millpond")

_RELEASE_TIMEOUT_SECONDS = 5.0
"""Seconds of one try to end a run in the slots: short, since the query may be started again meanwhile."""

_RELEASE_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class _Execution:
    """An execution of a query that this process has started, and the thread that waits for its end."""

    query: StreamingQuery
    task: OperatorTask
    watcher: threading.Thread


_executions: dict[str, _Execution] = {}
"""Executions by `OperatorTask.run`, until their pending commits are durable."""

_applications: set[str] = set()
"""Applications with a thread that waits for their end."""


def watch_run(query: StreamingQuery, task: OperatorTask) -> None:
    """Record that a query runs; after its end, make its slots finish their commits and release their memory.

    Args:
        query: the running query.
        task: any operator of the query.
    """
    directory, user = SlotDirectory.of(task), owner(task.jvm)
    try:
        directory.register(user)
        record_query(directory, QueryRecord(task.key, task.run, task.location, user))
    except (OSError, SettingError, TransientError) as error:
        log.debug("that the query runs was not noted: %s", error)
    watcher = after(query, "millpond-running", lambda error: _finish(directory, task))
    _executions[task.run] = _Execution(query, task, watcher)
    watcher.start()


def _finish(directory: SlotDirectory, task: OperatorTask) -> None:
    """Release a run that has ended, once its commits are durable, and remove its record."""
    try:
        # The store may be away: the slots try until the commits are durable or the run is fenced.
        while not release(task, _RELEASE_TIMEOUT_SECONDS):
            time.sleep(_RELEASE_PAUSE_SECONDS)
    finally:
        _executions.pop(task.run, None)
        with suppress(OSError):
            remove_query(directory, task.key, task.run)


def release(task: OperatorTask, timeout: float = DRAIN_SECONDS) -> bool:
    """Make the slots of this host finish the commits of a run that has ended or will not begin, and release it.

    Then remove the rows that its tasks have exchanged.

    Args:
        task: any operator of the run.
        timeout: seconds to wait for the store.

    Returns:
        Whether the slots have released the run.
    """
    try:
        # A newer run has taken over: what this run has left must not become durable any more.
        with suppress(FencedError):
            drain(task, timeout, ended=True)
    except (MillpondError, OSError) as error:
        log.debug("what a run has left is not durable yet: %s", error)
        return False
    delete_generations(SlotDirectory.of(task).path, task, up_to=task.generation)
    return True


def await_commits(location: str) -> None:
    """Wait until pending commits of ended runs are durable, for runs that this process has started.

    Args:
        location: URL of their state.

    Raises:
        TransientError: the commits are not durable within the commit timeout of a batch.
    """
    for execution in list(_executions.values()):
        task = execution.task
        if same_place(task.location, location) and not execution.query.isActive:
            timeout = task.settings.commit_timeout
            execution.watcher.join(timeout)
            if execution.watcher.is_alive():
                status = query_status(SlotDirectory.of(task), task.key, task.settings.silence_timeout)
                why = "".join(f" ({failure})" for failure in status.commit_failures)
                raise TransientError(
                    f"The last batches of the query, which has ended, are not durable after {timeout:.0f} s{why}.",
                    action="Read the state again when the store can be reached, or an older version of it.",
                    query=task.query,
                    file=location,
                )


def end_slots_with_application(context: SparkContext, task: OperatorTask) -> None:
    """Make the slots of this host end with the Spark application; its JVM may live longer.

    Args:
        context: the Spark context of the application.
        task: any operator of a query.
    """
    if task.application not in _applications:
        _applications.add(task.application)
        directory = SlotDirectory.of(task)
        arguments = context, directory, owner(task.jvm)
        threading.Thread(target=_await_application_end, args=arguments, name="millpond-ending", daemon=True).start()


def _await_application_end(context: SparkContext, directory: SlotDirectory, user: Process) -> None:
    while context._jsc is not None:  # no call into the JVM, which may end at any time
        time.sleep(POLL_SECONDS)
    with suppress(OSError):
        directory.unregister(user)

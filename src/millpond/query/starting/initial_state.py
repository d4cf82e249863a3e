"""Initial state of processors: written before the first batch, removed once that batch is committed.

While the query runs, a thread removes it. If the run ends before that, the next start does.
"""

from __future__ import annotations

import logging
import threading

import msgspec
from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError
from millpond.files.backends.filesystem import FileSystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decision.decision import Decision
from millpond.plan.exchange.initial_state import initial_state
from millpond.plan.exchange.workers import map_in_arrow, named_function
from millpond.plan.reading.processor import InitialReading, ProcessorReading
from millpond.query.logs.query_logs import QueryLogs
from millpond.tasks.initial_state import Portion, delete_earlier_initial_state, delete_initial_state, write_list
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.initial_state import WRITTEN, InitialWrite

log = logging.getLogger("millpond")

_SMALL_BATCHES = {"spark.sql.execution.arrow.maxRecordsPerBatch": "4096"}
"""Rows of one Arrow batch. Without a limit in bytes, their strings have to fit a column of at most 2 GB."""

_POLL_SECONDS = 5.0
"""Seconds between two looks whether the first batch is committed."""


def write_initial(
    catalyst: Catalyst, decision: Decision, task: OperatorTask, files: FileSystem, session_settings: dict[str, str]
) -> OperatorTask:
    """Write the initial state of processors, for a run that starts with the query's first batch.

    Args:
        catalyst: of the user's session.
        decision: the decision about the query.
        task: an operator of the run, whose generation is claimed.
        files: the location's `millpond/` folder.
        session_settings: the session settings with which the query runs.

    Returns:
        The task for a run that reads the initial state.
    """
    initials = [
        (operator.index, operator.title, first)
        for operator in decision.on_millpond
        if (first := _initial(operator.reading)) is not None
    ]
    if not initials:
        return task
    delete_earlier_initial_state(files, task.generation)  # of interrupted starts: their runs are fenced
    # File names carry the generation, so that files of two starts never mix.
    task = msgspec.structs.replace(task, initial=task.generation)
    for index, title, reading in initials:
        assert index is not None
        operator_task = msgspec.structs.replace(task, operator=index)
        write = named_function(InitialWrite(operator_task), f"initial state of {title}", 1)
        frame = map_in_arrow(initial_state(catalyst, reading, task.partitions), write, WRITTEN)
        written = catalyst.in_own_session(frame, session_settings | _SMALL_BATCHES).collect()
        write_list(files, operator_task, [Portion(*row) for row in written])
    return task


def _initial(reading: object) -> InitialReading | None:
    return reading.initial if isinstance(reading, ProcessorReading) else None


def remove_initial_when_committed(
    query: StreamingQuery, task: OperatorTask, files: FileSystem, query_logs: QueryLogs
) -> None:
    """Remove the initial state in a thread once the first batch is committed, if the query runs until then.

    Args:
        query: the running query.
        task: any operator of the query.
        files: the location's `millpond/` folder.
        query_logs: Spark's logs, which show whether the batch is committed.
    """
    if task.initial:
        arguments = (query, task, files, query_logs)
        threading.Thread(target=_remove_when_committed, args=arguments, name="millpond-initial", daemon=True).start()


def _remove_when_committed(query: StreamingQuery, task: OperatorTask, files: FileSystem, query_logs: QueryLogs) -> None:
    ended = False
    while True:
        try:
            if query_logs.last_committed >= 0:
                delete_initial_state(files, task.initial)
                return
        except MillpondError as error:  # tried again while the query runs
            log.debug("the initial state was not removed: %s", error)
        if ended:
            return
        try:
            ended = query.awaitTermination(_POLL_SECONDS)
        except Exception:  # the query failed, which is reported elsewhere, or the JVM is gone
            ended = True


def remove_left_initial(files: FileSystem, generation: int) -> None:
    """Remove the initial state that earlier runs have left, in a start after the query's first batch.

    The start has claimed its generation: the earlier runs are fenced, and a later start does not run the first batch
    again. On an error of the store, the files stay until the next start.

    Args:
        files: the location's `millpond/` folder.
        generation: of the start.
    """
    try:
        delete_earlier_initial_state(files, generation)
    except MillpondError as error:
        log.debug("the initial state of earlier runs was not removed: %s", error)

"""The initial state of processors: written before the first batch, removed when that is committed."""

from __future__ import annotations

import logging
import threading

import msgspec
from pyspark.sql.streaming.query import StreamingQuery

from millpond.errors import MillpondError
from millpond.files.backends.filesystem import FileSystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.initial import initial_state
from millpond.plan.reading.decision import Decision
from millpond.plan.reading.processor import InitialReading, ProcessorReading
from millpond.plan.workers import map_in_arrow, named
from millpond.query.ledger.ledger import Ledger
from millpond.slot.batch.initial import Portion, forget, write_list
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.initial import WRITTEN, InitialWrite

log = logging.getLogger("millpond")

_FEW_ROWS = {"spark.sql.execution.arrow.maxRecordsPerBatch": "4096"}
"""Rows of one Arrow batch: without a limit of bytes, 2 GB of a column have to hold their strings."""

_LOOK_SECONDS = 5.0
"""How often is looked whether the first batch is committed."""


def write_initial(
    catalyst: Catalyst, decision: Decision, task: PipeTask, files: FileSystem, around: dict[str, str]
) -> PipeTask:
    """Write what the operators begin with, for a run whose first batch is the query's first.

    Args:
        catalyst: of the user's session. decision: the query. task: of the run, whose generation is claimed.
        files: the location's `millpond/` folder. around: session settings under which the query runs.

    Returns:
        The task of a run that reads it.
    """
    begun = [(one.index, one.title, first) for one in decision.ours if (first := _initial(one.reading)) is not None]
    if not begun:
        return task
    forget(files)  # what starts have left that did not get so far: their runs are fenced
    task = msgspec.structs.replace(task, initial=task.generation)
    for index, title, reading in begun:
        assert index is not None
        own = msgspec.structs.replace(task, operator=index)
        write = named(InitialWrite(own), f"initial state of {title}", 1)
        frame = map_in_arrow(initial_state(catalyst, reading, task.partitions), write, WRITTEN)
        written = catalyst.in_own_session(frame, around | _FEW_ROWS).collect()
        write_list(files, own, [Portion(*row) for row in written])
    return task


def _initial(reading: object) -> InitialReading | None:
    return reading.initial if isinstance(reading, ProcessorReading) else None


def forget_initial(query: StreamingQuery, task: PipeTask, files: FileSystem, ledger: Ledger) -> None:
    """Remove what a run has begun with, in a thread, once its first batch is committed; else the next start will.

    Args:
        query: the running query. task: any of its tasks.
        files: the location's `millpond/` folder. ledger: tells what is committed.
    """
    if task.initial:
        arguments = (query, task, files, ledger)
        threading.Thread(target=_forget, args=arguments, name="millpond-initial", daemon=True).start()


def _forget(query: StreamingQuery, task: PipeTask, files: FileSystem, ledger: Ledger) -> None:
    ended = False
    try:
        while ledger.last("commits") < 0:
            if ended:
                return
            try:
                ended = query.awaitTermination(_LOOK_SECONDS)
            except Exception:  # the query failed, which is reported elsewhere, or the JVM is gone
                ended = True
        forget(files, task.initial)
    except MillpondError as error:
        log.debug("the initial state was not removed: %s", error)

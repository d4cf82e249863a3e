"""A thread beside a query that sends prefetch hints for the batch after the planned one, while slots ask for them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import on_disk
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.session import copied_session
from millpond.plan.decision.decision import Decision
from millpond.plan.exchange.workers import map_in_arrow
from millpond.plan.lookahead.source import fed_by_source, key_hashes, prefetch_sources, source_of
from millpond.query.logs.query_logs import QueryLogs
from millpond.query.lookahead.sources import UpcomingRows, upcoming_rows
from millpond.slot.prefetch.switch import requested_hints
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.tasks.offset_log import LogEntry
from millpond.tasks.operator_task import Lookahead, OperatorTask
from millpond.worker.hints import SourceHints

log = logging.getLogger("millpond")

_MIN_PAUSE_SECONDS = 0.05
_IDLE_SECONDS = 1.0
"""Shortest time between two looks at the source, and time between two looks whether slots ask for hints."""
_PAUSE_PER_READ = 1.0
"""Pause after a look, as a multiple of the look's own time: looks must leave the cores to the query."""
_MAX_PAUSE_SECONDS = 60.0
"""Longest pause in seconds after failed looks; each pause is twice the one before. A broker may be away for a while."""


def lookaheads(decision: Decision, task: OperatorTask) -> list[tuple[Lookahead, ...]]:
    """Return the lookaheads that may send hints for each operator, in the order of the plan.

    The source may send hints only if the offset log is on a disk: the thread lists the log repeatedly to find planned
    batches, and an object store charges for that.

    Args:
        decision: the decision about the query.
        task: any operator of the query; without `lookaheads` in it, no hints are sent.
    """
    known = prefetch_sources(decision) if task.lookaheads else {}
    left_out = () if on_disk(task.offsets) else ("source",)
    return [
        tuple(name for name in known.get(operator, ()) if name not in left_out)
        for operator in range(len(decision.specs))
    ]


def start_source_lookahead(
    query: StreamingQuery,
    spark: SparkSession,
    decision: Decision,
    tasks: Sequence[OperatorTask],
    checkpoint: FileSystem,
    settings: Mapping[str, str],
) -> None:
    """Send hints in a thread that ends with the query, if the next rows of its source can be read.

    Args:
        query: the running query.
        spark: its session.
        decision: the decision about it.
        tasks: its operators.
        checkpoint: its checkpoint.
        settings: the session settings with which it is planned.
    """
    source = source_of(decision)
    ahead = None if source is None else upcoming_rows(source, checkpoint)
    if ahead is not None and any("source" in task.lookaheads for task in tasks):
        runner = _Runner(query, spark, decision, tasks, QueryLogs(checkpoint), settings, ahead)
        threading.Thread(target=runner.run, name="millpond-look-ahead", daemon=True).start()


class _Runner:
    def __init__(
        self,
        query: StreamingQuery,
        spark: SparkSession,
        decision: Decision,
        tasks: Sequence[OperatorTask],
        query_logs: QueryLogs,
        settings: Mapping[str, str],
        ahead: UpcomingRows,
    ) -> None:
        self._query = query
        self._spark = spark
        self._fed = fed_by_source(decision)
        self._tasks = tasks
        self._logs = query_logs
        self._settings = settings
        self._ahead = ahead
        self._directory = SlotDirectory.of(tasks[0]).path
        self._batch = -1
        self._offset: str | None = None
        self._session: Catalyst | None = None

    def run(self) -> None:
        """Send hints until the query ends."""
        with suppress(PySparkException, Py4JError):  # the error of the query is reported to its waiters
            self._watch()

    def _watch(self) -> None:
        pause = _IDLE_SECONDS
        while not self._query.awaitTermination(pause):
            began = time.monotonic()
            tasks_wanting_hints = [task for task in self._tasks if self._wants_hints(task)]
            try:
                if tasks_wanting_hints:
                    self._send_hints(tasks_wanting_hints)
            except Exception as error:  # best effort: an error of a source costs only hints
                log.debug("prefetch hints were not sent: %s", error)
                pause = min(_MAX_PAUSE_SECONDS, 2 * pause)
            else:
                pause = (
                    max(_MIN_PAUSE_SECONDS, _PAUSE_PER_READ * (time.monotonic() - began))
                    if tasks_wanting_hints
                    else _IDLE_SECONDS
                )

    def _wants_hints(self, task: OperatorTask) -> bool:
        return any("source" in lookaheads for lookaheads in requested_hints(self._directory, task).values())

    def _send_hints(self, tasks_wanting_hints: Sequence[OperatorTask]) -> None:
        batch = self._logs.last_planned
        if batch != self._batch:
            entry = self._logs.read("offsets", batch) if batch >= 0 else None
            self._batch, self._offset = batch, None if entry is None else _only_offset(entry)
        if self._offset is None:
            return
        if self._session is None:
            # A session of its own: the rows are read with the query's settings, and the user's session does not change.
            self._session = Catalyst(copied_session(self._spark, self._settings))
        rows = self._ahead.after(self._session.spark, self._offset)
        for task in tasks_wanting_hints:
            if rows is not None and task.operator in self._fed:
                hashes = key_hashes(self._session, self._fed[task.operator], rows)
                prefetch = SourceHints(task, batch + 1)
                map_in_arrow(hashes, prefetch, "nothing int").write.format("noop").mode("append").save()


def _only_offset(entry: bytes) -> str | None:
    """Return the end offset of a planned batch, if the query has one source."""
    offsets = LogEntry.parse(entry).offsets
    if len(offsets) != 1:
        return None
    try:
        json.loads(offsets[0])
    except ValueError:
        return None
    return offsets[0]

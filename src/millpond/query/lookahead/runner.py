"""Runs beside a query: announces the keys of the batch after the one that is planned, where slots ask for that."""

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

from millpond.files.backends.filesystem import FileSystem, on_disk
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.lookahead.source import announced, fed_by_source, key_hashes, source_of
from millpond.plan.reading.decision import Decision
from millpond.plan.workers import map_in_arrow
from millpond.query.ledger.ledger import Ledger
from millpond.query.lookahead.sources import Upcoming, upcoming
from millpond.slot.batch.task import Lookahead, PipeTask
from millpond.slot.pipe.hints import KeysAhead
from millpond.slot.prefetch.switch import wanted
from millpond.slot.process.lifecycle import SlotDirectory

log = logging.getLogger("millpond")

_LOOK_SECONDS = 0.05
_REST_SECONDS = 1.0
"""How often is looked what has come, at most, and whether hints are asked for."""
_SHARE = 1.0
"""Rest after a look, in times as long as it took: looking is to leave the cores to the query."""
_LONGEST_REST = 60.0
"""Seconds between looks that fail, at most: each rest is twice the one before. A broker may be away, and come back."""


def lookaheads(decision: Decision, task: PipeTask) -> list[tuple[Lookahead, ...]]:
    """Who may announce keys of each operator, in the order of the plan.

    Args:
        decision: about the query. task: any of its pipe tasks; without `lookaheads` nobody may. The source
            only if the offset log is on a disk: who looks for planned batches lists it again and again, which a store
            charges for.
    """
    known = announced(decision) if task.lookaheads else {}
    left_out = () if on_disk(task.offsets) else ("source",)
    return [tuple(one for one in known.get(at, ()) if one not in left_out) for at in range(len(decision.specs))]


def look_ahead(
    query: StreamingQuery,
    spark: SparkSession,
    decision: Decision,
    tasks: Sequence[PipeTask],
    checkpoint: FileSystem,
    settings: Mapping[str, str],
) -> None:
    """Announce keys in a thread that ends with the query, if there is anything to announce.

    Args:
        query: the running query. spark: its session. decision: about it. tasks: its pipe tasks.
        checkpoint: of it. settings: under which it is planned.
    """
    source = source_of(decision)
    ahead = None if source is None else upcoming(source, checkpoint)
    if ahead is not None and any("source" in task.lookaheads for task in tasks):
        runner = _Runner(query, spark, decision, tasks, Ledger(checkpoint), settings, ahead)
        threading.Thread(target=runner.run, name="millpond-look-ahead", daemon=True).start()


class _Runner:
    def __init__(
        self,
        query: StreamingQuery,
        spark: SparkSession,
        decision: Decision,
        tasks: Sequence[PipeTask],
        ledger: Ledger,
        settings: Mapping[str, str],
        ahead: Upcoming,
    ) -> None:
        self._query = query
        self._spark = spark
        self._fed = fed_by_source(decision)
        self._tasks = tasks
        self._ledger = ledger
        self._settings = settings
        self._ahead = ahead
        self._directory = SlotDirectory.of(tasks[0]).path
        self._batch = -1
        self._offset: str | None = None
        self._session: Catalyst | None = None

    def run(self) -> None:
        """Until the query ends."""
        with suppress(PySparkException, Py4JError):  # what the query ended with is told to who waits for it
            self._watch()

    def _watch(self) -> None:
        rest = _REST_SECONDS
        while not self._query.awaitTermination(rest):
            began = time.monotonic()
            asked = [task for task in self._tasks if self._asked(task)]
            try:
                if asked:
                    self._look(asked)
            except Exception as error:  # whatever a source has come up with costs hints, and nothing else
                log.debug("keys were not announced: %s", error)
                rest = min(_LONGEST_REST, 2 * rest)
            else:
                rest = max(_LOOK_SECONDS, _SHARE * (time.monotonic() - began)) if asked else _REST_SECONDS

    def _asked(self, task: PipeTask) -> bool:
        return any("source" in lookaheads for lookaheads in wanted(self._directory, task).values())

    def _look(self, asked: Sequence[PipeTask]) -> None:
        batch = self._ledger.last("offsets")
        if batch != self._batch:
            entry = self._ledger.read("offsets", batch) if batch >= 0 else None
            self._batch, self._offset = batch, None if entry is None else _only_offset(entry)
        if self._offset is None:
            return
        if self._session is None:
            copy = SparkSession(self._spark.sparkContext, self._spark._jsparkSession.cloneSession())
            for name, value in self._settings.items():
                copy.conf.set(name, value)
            self._session = Catalyst(copy)
        rows = self._ahead.after(self._session.spark, self._offset)
        for task in asked:
            if rows is not None and task.operator in self._fed:
                hashes = key_hashes(self._session, self._fed[task.operator], rows)
                announce = KeysAhead(task, batch + 1)
                map_in_arrow(hashes, announce, "nothing int").write.format("noop").mode("append").save()


def _only_offset(entry: bytes) -> str | None:
    """The offset of the one source up to which a planned batch reads."""
    lines = entry.decode().splitlines()[2:]
    if len(lines) != 1:
        return None
    try:
        json.loads(lines[0])
    except ValueError:
        return None
    return lines[0]

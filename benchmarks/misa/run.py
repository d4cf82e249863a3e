"""Process of an engine: `python -m benchmarks.misa.run SETTINGS.json OBSERVED.json` runs one query and observes it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.misa.arrivals import FILES, files, rows_of
from benchmarks.misa.deadline import Deadline, Gate
from benchmarks.misa.engines import session, writer
from benchmarks.misa.queries import QUERIES
from benchmarks.misa.result import Batch, Observed
from benchmarks.misa.settings import Settings
from benchmarks.prefetch.arrivals import Arrivals
from benchmarks.prefetch.latency import read_by
from millpond.errors import UnsupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

HUNG_SECONDS = 600.0
"""An engine that ends no batch for so long has hung, or cannot run the query at this rate."""
_LATE = 2.0
"""A run ends after this multiple of the seconds in which its records come, even if some are still to be read."""
_KEPT_BATCHES = 3
"""Last batches whose files stay in the source; it has fewer to list without the others."""


def names_of(progress: Mapping[str, Any], checkpoint: Path) -> list[str]:
    """Return the names of the files that a batch has read.

    The source's log numbers only batches with files, and the query also runs batches without, which close windows.
    """
    source = progress["sources"][0]
    before, last = (-1 if source[at] is None else source[at]["logOffset"] for at in ("startOffset", "endOffset"))
    return [name for entry in range(before + 1, last + 1) for name in read_by(checkpoint, entry)]


def batch_of(progress: Mapping[str, Any], names: Sequence[str], at: Mapping[str, float], settings: Settings) -> Batch:
    """Make a batch's figures from its progress.

    Args:
        names: files that it read. at: when files came, in seconds since the epoch.
    """
    start = datetime.fromisoformat(progress["timestamp"]).timestamp()
    took = progress["durationMs"]
    rows = np.array([rows_of(name) for name in names])
    end = start + took["triggerExecution"] / 1000
    late = 1000 * (end - np.array([at[name] for name in names]))
    figures = progress.get("observedMetrics", {}).get("millpond", {})
    commit, durable, read = None, None, None
    if settings.on_millpond:
        commit, durable = figures.get("commit_lag_ms"), figures.get("commit_ms")
    else:
        operators = progress["stateOperators"]
        # Spark adds up over tasks, of which as many run side by side as there are cores.
        commit = sum(one["commitTimeMs"] for one in operators) / settings.cores
        gets = [one["customMetrics"]["rocksdbGetLatency"] for one in operators if "customMetrics" in one]
        read = sum(gets) / settings.cores
    return Batch(
        number=progress["batchId"],
        start=start,
        ms=took["triggerExecution"],
        rows=int(rows.sum()),
        row_ms=round(float(np.average(late, weights=rows)), 1) if settings.rate else None,
        row_max_ms=round(float(late.max()), 1) if settings.rate else None,
        log_ms=took.get("walCommit", 0) + took.get("commitOffsets", 0),
        commit_ms=commit,
        durable_ms=durable,
        read_ms=read,
    )


class Observer:
    """Reads the progress of a query's batches that had files.

    Attributes:
        batches: all so far. files: how many they have read.
    """

    def __init__(self, query: StreamingQuery, checkpoint: Path, arrivals: Arrivals, settings: Settings) -> None:
        self._query = query
        self._checkpoint = checkpoint
        self._arrivals = arrivals
        self._settings = settings
        self._last = -1
        self._seen = ""
        self._kept: deque[list[str]] = deque(maxlen=_KEPT_BATCHES)
        self.batches: list[Batch] = []
        self.files = 0

    def look(self) -> list[Batch]:
        """Return the batches that have ended since the last look.

        Raises:
            StreamingQueryException: the query has failed.
        """
        if (failure := self._query.exception()) is not None:
            raise failure
        before, latest = len(self.batches), self._query.lastProgress
        if latest is None or latest.timestamp == self._seen:
            return []
        self._seen = latest.timestamp
        for progress in (json.loads(one.json) for one in self._query.recentProgress):
            number = progress["batchId"]
            # Files count, not rows: Spark counts none where a filter skips a whole file.
            if number > self._last and (names := names_of(progress, self._checkpoint)):
                self._last = number
                self.files += len(names)
                self._arrivals.forget(self._kept[0] if len(self._kept) == _KEPT_BATCHES else [])
                self._kept.append(names)
                self.batches.append(batch_of(progress, names, self._arrivals.at, self._settings))
        return self.batches[before:]


class Cutter:
    """Releases files that wait outside the source, one batch at a time."""

    def __init__(self, settings: Settings, arrivals: Arrivals, waiting: Path, source: Path) -> None:
        self._deadline = Deadline(settings.trigger, round(settings.trigger * settings.event_rate))
        self._arrivals = arrivals
        self._gate = Gate(waiting, source)
        self._files = 0

    def look(self, ended: Sequence[Batch], batches: int) -> None:
        """Release the next batch if it is due.

        Args:
            ended: batches that have ended since the last look. batches: how many have ended so far.
        """
        for batch in ended:
            if batch.number:  # a JVM's first batch says nothing of the others
                self._deadline.learn(batch.rows, batch.ms / 1000)
        if batches < self._gate.released:
            return
        waiting = list(self._arrivals.at.items())[self._files :]
        waited = time.time() - waiting[0][1] if waiting else 0.0
        names = [name for name, _ in waiting]
        if due := self._deadline.due([rows_of(name) for name in names], waited):
            self._gate.release(names[:due])
            self._files += due


def run(settings: Settings, work: Path) -> Observed:
    """Run a query until it is measured, in a session of its own; all that it writes is below `work`."""
    from pyspark.errors import AnalysisException, StreamingQueryException

    spark = session(settings, work)
    try:
        return observe(spark, settings, work)
    except (AnalysisException, UnsupportedError) as refusal:
        return Observed(version=spark.version, refused=str(refusal).splitlines()[0])
    except StreamingQueryException as failure:
        # Spark looks for state, which rules out asynchronous progress, in the first batch only.
        if settings.engine != "spark-async" or "async progress tracking" not in str(failure):
            raise
        return Observed(version=spark.version, refused=str(failure).splitlines()[0])
    finally:
        spark.stop()


def observe(spark: SparkSession, settings: Settings, work: Path) -> Observed:
    """Run a query in a session until it is measured."""
    query, cut = QUERIES[settings.query], settings.engine == "spark-deadline"
    made = files(Path(settings.events), settings.query, settings.event_rate, settings.seconds, settings.seed)
    source, waiting, checkpoint = work / "source", work / "waiting", work / "checkpoint"
    source.mkdir()
    waiting.mkdir()
    files_per_batch = 0 if settings.rate or cut else max(1, settings.rows_per_batch * FILES // settings.event_rate)
    frame = query.over(query.records(spark, f"{source}/*" if cut else str(source), files_per_batch))
    arrivals = Arrivals(waiting if cut else source)
    cutter = Cutter(settings, arrivals, waiting, source) if cut else None
    # The clock starts after a batch of one file, so that a JVM's slow first batch leaves no queue behind.
    first = made[:1] if settings.rate else made
    for file in first:
        arrivals.put(file)
    running = writer(frame, query.mode, settings, checkpoint).start()
    observer = Observer(running, checkpoint, arrivals, settings)

    def look() -> bool:
        time.sleep(0.02 if cut else 0.1)
        ended = observer.look()
        if cutter is not None:
            cutter.look(ended, len(observer.batches))
        return bool(ended)

    started = time.time()
    while not look() and time.time() < started + HUNG_SECONDS:
        pass
    started = latest = time.time()
    with arrivals.clocked(made[len(first) :], 1 / FILES):
        while len(observer.batches) < settings.warmup + settings.batches and observer.files < len(made):
            now = time.time()
            latest = now if look() else latest
            if now > latest + HUNG_SECONDS or (settings.rate and now > started + _LATE * settings.seconds):
                break
    running.stop()
    rows = sum(rows_of(file.name) for file in made)
    return Observed(
        version=spark.version, batches=observer.batches, arrived=rows / settings.seconds if settings.rate else 0.0
    )


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    asked = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(run(asked, Path(sys.argv[2]).parent)))

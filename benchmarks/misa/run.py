"""Process of an engine: `python -m benchmarks.misa.run SETTINGS.json OBSERVED.json` runs one query and observes it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from benchmarks.engines.s3 import bucket
from benchmarks.measuring.timing import batch_end, batch_start, source_files
from benchmarks.misa.deadline import Deadline, Gate
from benchmarks.misa.engines import session, writer
from benchmarks.misa.queries import QUERIES
from benchmarks.misa.result import Batch, Observed
from benchmarks.misa.settings import HUNG_SECONDS, LATE, Settings
from benchmarks.misa.stream_files import FILES, files, rows_of
from benchmarks.workloads.arrivals import Arrivals
from millpond.errors import UnsupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

_KEPT_BATCHES = 3
"""The source keeps the files of this number of last batches; without earlier files it has fewer to list."""


def names_of(progress: Mapping[str, Any], read: Callable[[int], list[str]]) -> list[str]:
    """Return the names of the files that a batch has read.

    Args:
        read: returns the names of an entry of the source's log.

    The source's log numbers only batches with files. The query also runs batches without files, which close windows.
    """
    source = progress["sources"][0]
    offsets = (source[name] for name in ("startOffset", "endOffset"))
    before, last = (-1 if offset is None else offset["logOffset"] for offset in offsets)
    return [name for entry in range(before + 1, last + 1) for name in read(entry)]


def batch_of(
    progress: Mapping[str, Any], names: Sequence[str], times: Mapping[str, float], settings: Settings
) -> Batch:
    """Make a batch's figures from its progress.

    Args:
        names: files that it read. times: when each file came, in seconds since the epoch.
    """
    durations = progress["durationMs"]
    rows = np.array([rows_of(name) for name in names])
    latencies = 1000 * (batch_end(progress) - np.array([times[name] for name in names]))
    figures = progress.get("observedMetrics", {}).get("millpond", {})
    commit, durable, read = None, None, None
    if settings.on_millpond:
        commit, durable = figures.get("commit_wait_ms"), figures.get("commit_ms")
    else:
        operators = progress["stateOperators"]
        # Spark's times are sums over tasks, and one task runs on each core at a time.
        commit = sum(operator["commitTimeMs"] for operator in operators) / settings.cores
        gets = [o["customMetrics"]["rocksdbGetLatency"] for o in operators if "customMetrics" in o]
        read = sum(gets) / settings.cores
    return Batch(
        number=progress["batchId"],
        start=batch_start(progress),
        ms=durations["triggerExecution"],
        rows=int(rows.sum()),
        row_mean_ms=round(float(np.average(latencies, weights=rows)), 1) if settings.rate else None,
        row_max_ms=round(float(latencies.max()), 1) if settings.rate else None,
        log_ms=durations.get("walCommit", 0) + durations.get("commitOffsets", 0),
        commit_ms=commit,
        durable_ms=durable,
        read_ms=read,
    )


class SourceLog:
    """The source's log in a checkpoint, wherever Spark can read it."""

    def __init__(self, spark: SparkSession, checkpoint: str) -> None:
        assert spark._jvm is not None
        self._jvm = spark._jvm
        self._folder = f"{checkpoint}/sources/0"
        self._files = self._path("").getFileSystem(spark._jsc.hadoopConfiguration())

    def __call__(self, name: str) -> str | None:
        """Return an entry's text, or None where no entry has this name."""
        path = self._path(f"/{name}")
        if not self._files.exists(path):
            return None
        stream = self._files.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def _path(self, below: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._folder}{below}")


class Observer:
    """Reads the progress of a query's batches that had files.

    Attributes:
        batches: all batches so far. files: number of files that they have read.
    """

    def __init__(
        self, query: StreamingQuery, read: Callable[[int], list[str]], arrivals: Arrivals, settings: Settings
    ) -> None:
        self._query = query
        self._read = read
        self._arrivals = arrivals
        self._settings = settings
        self._next = 0  # the lowest number of a batch whose progress is still to come
        self._seen = ""
        self._kept: deque[list[str]] = deque(maxlen=_KEPT_BATCHES)
        self.batches: list[Batch] = []
        self.files = 0

    def new_batches(self) -> list[Batch]:
        """Return the batches that have ended since the last call.

        Raises:
            StreamingQueryException: the query has failed.
        """
        if (failure := self._query.exception()) is not None:
            raise failure
        before, latest = len(self.batches), self._query.lastProgress
        if latest is None or latest.timestamp == self._seen:
            return []
        self._seen = latest.timestamp
        last = json.loads(latest.json)
        if last["batchId"] <= self._next:
            self._add(last)
        else:
            # More than one batch has ended. All progress is fetched only then: there is more of it with each batch.
            for progress in self._query.recentProgress:
                self._add(json.loads(progress.json))
        return self.batches[before:]

    def _add(self, progress: Mapping[str, Any]) -> None:
        """Add a batch, unless it was added before, is still to run, or has read no files."""
        number = progress["batchId"]
        # Idle progress has the number of the next batch, and adds nothing.
        if number < self._next or "addBatch" not in progress["durationMs"]:
            return
        self._next = number + 1
        # Files count, not rows: Spark counts none where a filter skips a whole file.
        if names := names_of(progress, self._read):
            self.files += len(names)
            self._arrivals.remove(self._kept[0] if len(self._kept) == _KEPT_BATCHES else [])
            self._kept.append(names)
            self.batches.append(batch_of(progress, names, self._arrivals.times, self._settings))


class Cutter:
    """Releases files that wait outside the source, one batch at a time."""

    def __init__(self, settings: Settings, arrivals: Arrivals, waiting: Path, source: Path) -> None:
        self._deadline = Deadline(settings.trigger, round(settings.trigger * settings.event_rate))
        self._arrivals = arrivals
        self._gate = Gate(waiting, source)
        self._files = 0

    def release_if_due(self, ended: Sequence[Batch], batches: int) -> None:
        """Release the next batch if it is due.

        Args:
            ended: batches that have ended since the last call. batches: how many have ended so far.
        """
        for batch in ended:
            if batch.number:  # the first batch is slow, because the JVM is cold
                self._deadline.learn(batch.rows, batch.ms / 1000)
        if batches < self._gate.released:
            return
        waiting = list(self._arrivals.times.items())[self._files :]
        waited = time.time() - waiting[0][1] if waiting else 0.0
        names = [name for name, _ in waiting]
        if due := self._deadline.due([rows_of(name) for name in names], waited):
            self._gate.release(names[:due])
            self._files += due


def await_batch(batch_ended: Callable[[], bool], settings: Settings) -> None:
    """Wait until the first batch has ended.

    Args:
        batch_ended: returns whether a batch has ended since the last call; called again and again.

    Raises:
        TimeoutError: no batch has ended within `HUNG_SECONDS`.
    """
    started = time.monotonic()
    while not batch_ended():
        if time.monotonic() > started + HUNG_SECONDS:
            raise TimeoutError(
                f"{settings.engine} has ended no batch of {settings.query} within {HUNG_SECONDS:.0f} seconds of the"
                " query's start; choose a lower --rates, or fewer --rows-per-batch"
            )


def run(settings: Settings, work: Path) -> Observed:
    """Run a query until it is measured, in a session of its own; it writes files only below `work`."""
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
    stream = files(Path(settings.events), settings.query, settings.event_rate, settings.seconds, settings.seed)
    source, waiting = work / "source", work / "waiting"
    checkpoint = bucket("s3a", work.name) if settings.s3 else str(work / "checkpoint")
    source.mkdir()
    waiting.mkdir()
    files_per_batch = 0 if settings.rate or cut else max(1, settings.rows_per_batch * FILES // settings.event_rate)
    frame = query.over(query.records(spark, f"{source}/*" if cut else str(source), files_per_batch))
    arrivals = Arrivals(waiting if cut else source)
    cutter = Cutter(settings, arrivals, waiting, source) if cut else None
    # The clock starts after a batch of one file, so that the cold JVM's first batch leaves no queue behind. Without
    # a rate all files are there before the start.
    initial = stream[:1] if settings.rate else stream
    for file in initial:
        arrivals.put(file)
    running = writer(frame, query.mode, settings, checkpoint).start()
    observer = Observer(running, partial(source_files, SourceLog(spark, checkpoint)), arrivals, settings)

    def step() -> bool:
        """Wait shortly, release the next batch if it is due, and return whether a batch has ended."""
        time.sleep(0.02 if cut else 0.1)
        ended = observer.new_batches()
        if cutter is not None:
            cutter.release_if_due(ended, len(observer.batches))
        return bool(ended)

    await_batch(step, settings)
    started = latest = time.time()
    with arrivals.clocked(stream[len(initial) :], 1 / FILES):
        while len(observer.batches) < settings.warmup + settings.batches and observer.files < len(stream):
            now = time.time()
            latest = now if step() else latest
            if now > latest + HUNG_SECONDS or (settings.rate and now > started + LATE * settings.seconds):
                break
    running.stop()
    return Observed(version=spark.version, batches=observer.batches)


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run_settings = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Settings)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(run(run_settings, Path(sys.argv[2]).parent)))

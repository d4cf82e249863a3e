"""Compactions elsewhere of a query that is changed, and of one that is forked while they are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

import millpond
from millpond.checkpoint.compaction.requests import Request
from millpond.checkpoint.forks.parents import open_state
from millpond.compactor.worker import Worker
from millpond.files.backends.filesystem import FileSystem
from millpond.files.refs import RunRef
from millpond.query.checkpoints.orphans import orphans_of
from millpond.stores.jobs import Job as Compaction
from millpond.stores.runs.pace import Pace
from tests.query.test_evolution import Job, agg, check
from tests.slot.test_state_command import state

__all__ = ["state"]

KEYS = 150_000


@pytest.fixture
def session(spark: SparkSession, own_slots: None) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    session.conf.set("spark.millpond.onChangedState", "evolve")
    session.conf.set("spark.millpond.compaction", "remote")
    session.conf.set("spark.millpond.slot.memory", "16m")
    session.conf.set("spark.millpond.slots", "1")
    return session


class Noting(Worker):
    """Notes what it is asked for, and waits until it may go on."""

    def __init__(self, *locations: FileSystem) -> None:
        super().__init__(locations)
        self.jobs: list[Compaction] = []
        self.may = threading.Event()
        self.may.set()

    def _run_job(self, files: FileSystem, request: Request, pace: Pace) -> list[RunRef]:
        self.jobs.append(msgspec.msgpack.decode(request.job, type=Compaction))
        self.may.wait()
        return super()._run_job(files, request, pace)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self.may.set()
            self.stop.set()
            thread.join()


class Files(Job):
    """Reads one file a batch."""

    def stream(self) -> DataFrame:
        rows = self.session.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return rows.parquet(f"{self.folder}/in/part=*")

    def start(self, df: DataFrame, checkpoint: str = "checkpoint", **trigger: Any) -> Any:
        writer = millpond.writeStream(df).outputMode("update").format("noop")
        writer = writer.option("checkpointLocation", f"{self.folder}/{checkpoint}")
        return (writer.trigger(**trigger) if trigger else writer).start()

    def some(self, number: int) -> None:
        for _ in range(number):
            begin = 100_000 * self.parts
            self.put(begin, begin + 100_000, keys=KEYS)

    def held(self, checkpoint: str = "checkpoint") -> list[tuple[Any, ...]]:
        return [tuple(row) for row in millpond.read_state(self.session, f"{self.folder}/{checkpoint}").collect()]


def told(query: Any, name: str) -> int:
    """A figure, added up over the batches of a query."""
    rows = [one.observedMetrics["millpond"] for one in query.recentProgress if "millpond" in one.observedMetrics]
    return sum(row[name] for row in rows)


def test_files_from_before_a_change_are_compacted_elsewhere(session: SparkSession, tmp_path: Path) -> None:
    job = Files(session, tmp_path)
    job.some(3)
    births = dict.fromkeys(("n", "low"), 0)
    job.start(agg(job.stream(), ["n", "low"]), availableNow=True).awaitTermination()
    births["sum"] = job.parts
    job.some(5)
    worker = Noting(open_state(f"{tmp_path}/checkpoint"))
    with worker.running():
        query = job.start(agg(job.stream(), ["sum", "low", "n"]), availableNow=True)
        query.awaitTermination()
    assert any(one.earlier for one in worker.jobs)
    assert told(query, "remote_compactions") > 0
    assert told(query, "local_compactions") == 0
    check(job, ["sum", "low", "n"], births, job.held())


def test_a_fork_while_compactions_are_under_way(
    session: SparkSession, tmp_path: Path, state: Callable[..., tuple]
) -> None:
    job = Files(session, tmp_path)
    names = ["n", "sum"]
    job.some(1)
    query = job.start(agg(job.stream(), names))
    try:
        query.processAllAvailable()
        worker = Noting(open_state(f"{tmp_path}/checkpoint"))
        worker.may.clear()
        with worker.running():
            while not worker.jobs:
                job.some(1)
                query.processAllAvailable()
            code, lines = state("fork", tmp_path / "checkpoint", tmp_path / "fork")
            assert code == 0, lines
            worker.may.set()
            while not told(query, "remote_compactions"):
                job.some(1)
                query.processAllAvailable()
    finally:
        query.stop()
    other = Noting(open_state(f"{tmp_path}/fork"))
    for name in ("checkpoint", "fork"):  # the fork needs files that the original has done with
        _collect(f"{tmp_path}/{name}")
    job.some(3)
    with other.running():
        fork = job.start(agg(job.stream(), names), "fork", availableNow=True)
        fork.awaitTermination()
    assert told(fork, "remote_compactions") > 0
    job.start(agg(job.stream(), names), availableNow=True).awaitTermination()
    for name in ("checkpoint", "fork"):
        _collect(f"{tmp_path}/{name}")
        code, lines = state("verify", tmp_path / name)
        assert code == 0, lines
        check(job, names, dict.fromkeys(names, 0), job.held(name))


def _collect(checkpoint: str) -> None:
    """Remove files as `millpond state gc` does in some hours."""
    files, orphans = orphans_of(checkpoint, now=time.time() + 4 * 3600)
    assert not orphans.missing
    orphans.remove(files)
    assert not orphans_of(checkpoint)[1].missing

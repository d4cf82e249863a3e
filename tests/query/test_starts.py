"""Starts and stops of real queries: in mid-batch, over and over, and on checkpoints with odd names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import millpond
from millpond.checkpoint import generation
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.generation import Restart
from millpond.errors import FencedError, StateIncompatibleError
from millpond.query.launch import Launch
from millpond.query.running.runs import await_commits
from millpond.query.starting import start as starting
from millpond.slot.process.client import drain, open_partitions
from millpond.tasks.operator_task import OperatorTask
from tests.query.test_recovery import Job

STARTS = 12


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    return spark.newSession()


def test_stopped_in_mid_batch_again_and_again(session: SparkSession, tmp_path: Path) -> None:
    """Each time with another number of slots, as on a host with other cores: the rows of each batch are right."""
    job = Job(session, tmp_path)
    counts = job.stream().groupBy("key").agg(F.count("*"), F.sum("amount"))
    for start in range(STARTS):
        job.write([start % 3, 7, 7])
        session.conf.set("spark.millpond.slots", str(1 + start % 3))
        entered = threading.Event()

        def keep(batch: DataFrame, number: int, entered: threading.Event = entered) -> None:
            entered.set()
            job.emitted[number] = {tuple(row) for row in batch.collect()}

        writer = millpond.writeStream(counts).outputMode("update").foreachBatch(keep)
        query = writer.option("checkpointLocation", str(job.checkpoint)).start()
        while query.isActive and not entered.wait(0.1):
            pass
        if start % 4 == 3:
            query.processAllAvailable()
        query.stop()
        assert query.exception() is None
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(STARTS)}


def test_state_is_opened_while_spark_plans(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the slots, at the version that the first batch reads; where there is no state, nothing is."""
    asked: list[int] = []

    def opened(tasks: list[OperatorTask], version: int) -> None:
        asked.append(version)
        open_partitions(tasks, version)

    monkeypatch.setattr(starting, "open_partitions", opened)
    job = Job(session, tmp_path)
    for _ in range(3):
        job.write([1, 2])
        job.aggregate()
    assert asked == [1, 2]
    assert job.emitted == {batch: job.expected(batch) for batch in range(3)}


def test_a_start_that_fails_leaves_nothing_in_the_slots(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[OperatorTask] = []

    def opened(tasks: list[OperatorTask], version: int) -> None:
        begun.append(tasks[0])
        open_partitions(tasks, version)
        for thread in threading.enumerate():
            if thread.name == "millpond-open":
                thread.join(60)

    job = Job(session, tmp_path)
    job.write([1, 2])
    job.aggregate()
    monkeypatch.setattr(starting, "open_partitions", opened)
    rows = job.stream().groupBy("key").agg(F.count("*"), F.sum("amount"))
    writer: Any = millpond.writeStream(rows).outputMode("update").format("nosuchformat")
    writer.option("checkpointLocation", str(job.checkpoint))
    with pytest.raises(Py4JJavaError, match="nosuchformat"):
        writer.start()
    assert len(begun) == 1
    assert drain(begun[0]) == {}
    job.aggregate()
    assert job.emitted == {0: job.expected(0)}


@pytest.mark.parametrize("wrong", ["format", "mode", "name", "query"])
def test_a_start_that_is_refused_leaves_the_running_query_alone(
    session: SparkSession, tmp_path: Path, wrong: str
) -> None:
    def write(rows: DataFrame, **named: str) -> StreamingQuery:
        options = {"format": "noop", "queryName": "one"} | named
        writer: Any = millpond.writeStream(rows).outputMode("update").format(options["format"])
        writer.queryName(options["queryName"]).option("checkpointLocation", str(job.checkpoint))
        return writer.start(str(job.sink))

    job = Job(session, tmp_path)
    job.write([1])
    counts = job.stream().groupBy("key").count()
    other_rows = job.stream().groupBy("amount").count()
    named = {"name": {"queryName": "other"}, "format": {"queryName": "two", "format": "none"}}
    named["mode"] = {"queryName": "two", "format": "parquet"}
    named["query"] = {"queryName": "two"}
    first = write(counts)
    other: Any = millpond.writeStream(counts).outputMode("update").format("noop").queryName("other")
    second = other.option("checkpointLocation", str(tmp_path / "other")).start()
    try:
        first.processAllAvailable()
        with pytest.raises((Py4JJavaError, AnalysisException, IllegalArgumentException, StateIncompatibleError)):
            write(other_rows if wrong == "query" else counts, **named[wrong])
        assert first.isActive
        job.write([2])
        first.processAllAvailable()
        assert first.lastProgress["batchId"] >= 1
        third = write(counts, queryName="three")  # takes over, as with Spark
        assert not first.isActive
        third.stop()
    finally:
        first.stop()
        second.stop()


@pytest.mark.parametrize("meanwhile", ["_first_task", "drain", "_rewritten"])
def test_a_restart_does_not_take_the_query_back_from_a_newer_start(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Another application claims the query while it is started again after a lost host, before or after its claim."""
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "supervise", lambda launch: (launches.append(launch), launch.run())[1])
    job = Job(session, tmp_path)
    job.write([1, 2])
    job.aggregate()
    await_commits(f"file:{job.checkpoint}")
    (launch,) = launches
    own, restart = launch.tasks[0].generation, Restart(1, "state_lost", ("b",))
    files = open_state(str(job.checkpoint))
    owner = starting if hasattr(starting, meanwhile) else starting._Startup
    original = getattr(owner, meanwhile)
    newer: list[int] = []

    def after_a_newer_start(*arguments: Any, **named: Any) -> Any:
        if not newer:
            newer.append(generation.claim(files, run="newer", partitions=2, minimum=own + 1).number)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, meanwhile, after_a_newer_start)
    stopped: list[Any] = []
    monkeypatch.setattr(starting, "stop_active_run", lambda *arguments: stopped.append(arguments))
    with pytest.raises(FencedError, match="A newer run of the query has taken over"):
        launch.run(restart, own)
    assert bool(stopped) == (meanwhile != "_first_task")
    generation.check_fence(files, newer[0])  # raises nothing: the newer run goes on
    monkeypatch.undo()
    job.write([2])
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(2)}


def test_slots_end_with_the_application_that_its_jvm_outlives(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
import millpond
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.sql.shuffle.partitions", 1).getOrCreate()
rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load().groupBy("value").count()
writer = millpond.writeStream(rows).outputMode("update").format("noop")
query = writer.option("checkpointLocation", {str(tmp_path / "checkpoint")!r}).start()
while query.lastProgress is None:
    time.sleep(0.1)
places = lambda: list(Path({str(tmp_path)!r}).glob("millpond-*/*/slot-0.pid"))
assert len(places()) == 1, places()
spark.stop()
deadline = time.monotonic() + 60
while places() and time.monotonic() < deadline:
    time.sleep(0.1)
print("left", places())
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240)
    assert "left []" in done.stdout, done.stderr


NAMES = ["ünïcode 名", "a%20b+c#d", "trailing/", "(x)[y]{z}=1,2;'"]


@pytest.mark.parametrize("name", [*NAMES, "relative", "symlink"])
def test_a_checkpoint_may_have_any_name(session: SparkSession, tmp_path: Path, name: str) -> None:
    """As Spark reads it: state lies beside Spark's logs, and the next start finds both."""
    job = Job(session, tmp_path)
    checkpoint = f"{tmp_path}/{name}"
    if name == "relative":
        checkpoint = os.path.relpath(checkpoint)
    if name == "symlink":
        (tmp_path / "target").mkdir()
        Path(checkpoint).symlink_to(tmp_path / "target")
    shown: dict[int, list[tuple[int, int]]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        shown[number] = [tuple(row) for row in batch.collect()]

    for _ in range(2):
        job.write([1])
        writer = millpond.writeStream(job.stream().groupBy("key").count()).outputMode("update").foreachBatch(keep)
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
    assert shown == {0: [(1, 1)], 1: [(1, 2)]}
    (state,) = tmp_path.rglob("query.json")
    assert (state.parent.parent / "offsets" / "1").exists()

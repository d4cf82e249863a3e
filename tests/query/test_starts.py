"""Starts and stops of real queries: in mid-batch, over and over, and on checkpoints with odd names."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.query.starting import start as starting
from millpond.slot.batch.task import PipeTask
from millpond.slot.pipe.client import open_ahead
from millpond.slot.process.identity import Process
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

    def opened(tasks: list[PipeTask], version: int, user: Process) -> None:
        asked.append(version)
        open_ahead(tasks, version, user)

    monkeypatch.setattr(starting, "open_ahead", opened)
    job = Job(session, tmp_path)
    for _ in range(3):
        job.write([1, 2])
        job.aggregate()
    assert asked == [1, 2]
    assert job.emitted == {batch: job.expected(batch) for batch in range(3)}


NAMES = ["ünïcode 名", "a%20b+c#d", "trailing/", "(x)[y]{z}=1,2;'"]


@pytest.mark.parametrize("name", [*NAMES, "relative", "symlink"])
def test_a_checkpoint_may_have_any_name(session: SparkSession, tmp_path: Path, name: str) -> None:
    """As Spark reads it: state lies beside Spark's ledger, and the next start finds both."""
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

"""Processors that fail, die, hoard or sleep: the error says where, and once they are mended all rows are as Spark's."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import millpond
from millpond.query.starting import tasks
from millpond.tasks.operator_task import SlotSettings
from tests.differential.data import write
from tests.differential.harness import Batches, assert_equal, on_millpond, run, stream
from tests.differential.processors.checks import DDL, ROCKSDB, script
from tests.differential.processors.wrongs import Wrong

TABLES = [
    script(("a", "x", 1), ("b", "x", 1), ("c", "y", 2)),
    script(("a", "y", 3), ("b", "y", 4), ("b", "x", 4), ("d", "x", 5)),
    script(("b", "z", 70), ("a", "z", 71), ("e", "z", 71)),
    script(("b", "z", 80)),
]
SPARKS: dict[bool, Batches] = {}
PANDAS = {"init": True, "rows": False, "middle": True, "timer": False, "close": True}
DIES = ("is gone", "crashes")


def query(df: DataFrame, processor: Wrong) -> DataFrame:
    groups = df.withWatermark("ts", "1 second").groupBy("k")
    call = groups.transformWithStateInPandas if processor.pandas else groups.transformWithState
    return call(processor, "k string, said string", "update", "eventTime")


def session_of(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    session.conf.set("spark.millpond.onUnsupported", "error")
    return session


def go(session: SparkSession, folder: Path, processor: Wrong, found: Batches, ours: bool = True) -> None:
    df = query(stream(session, folder / "in", DDL), processor)
    run(df, "update", folder / ("ours" if ours else "spark"), ours=ours, into=found)


def mend(spark: SparkSession, folder: Path, broken: Wrong) -> str:
    """Run two batches, the last of which fails, then the mended query; its rows have to be Spark's. The error."""
    mended = Wrong(broken.where, broken.what, broken.pandas, mended=True)
    for number, table in enumerate(TABLES):
        write(folder / "in", number, table)
    session = session_of(spark)
    found: Batches = {}
    on_millpond(query(stream(session, folder / "in", DDL), broken), "update")
    with pytest.raises(StreamingQueryException) as raised:
        go(session, folder, broken, found)
    assert sorted(found) == [0]
    session.conf.set("spark.millpond.partitions", "3")
    go(session, folder, mended, found)
    assert_equal(found, sparks(spark, folder, mended))
    return str(raised.value)


def sparks(spark: SparkSession, folder: Path, mended: Wrong) -> Batches:
    """Spark's rows of all batches."""
    if mended.pandas not in SPARKS:
        SPARKS[mended.pandas] = {}
        go(session_of(spark), folder, mended, SPARKS[mended.pandas], ours=False)
    return SPARKS[mended.pandas]


@pytest.mark.parametrize("where", PANDAS)
def test_errors(spark: SparkSession, tmp_path: Path, where: str) -> None:
    """An error in each function: it has its own type, and says of which operator, batch and key it is."""
    error = mend(spark, tmp_path, Wrong(where, "fails", PANDAS[where]))
    assert re.search(r"(?m)^ValueError: wrong", error)
    assert "in _fails" in error
    place = r"Millpond for operator 0 \(transformWithState(InPandas)? by k\), partition \d+, batch 1"
    key = {"init": "", "close": ""}.get(where, r", key (\('b',\)|Row\(k='b'\))")
    assert re.search(rf"{place}{key}\. The state is not harmed", error), error


@pytest.mark.parametrize(("what", "pandas"), [("is gone", True), ("kills its slot", False)])
def test_deaths_in_every_batch(spark: SparkSession, tmp_path: Path, what: str, pandas: bool) -> None:
    """The first attempt at each task ends with its worker, or with the slot: the next one does it all again."""
    for number, table in enumerate(TABLES):
        write(tmp_path / "in", number, table)
    found: Batches = {}
    go(session_of(spark), tmp_path, Wrong("middle", what, pandas, once=True), found)
    assert_equal(found, sparks(spark, tmp_path, Wrong("middle", what, pandas, mended=True)))


@pytest.mark.parametrize("what", ["exits", "is gone", "crashes", "hoards"])
def test_ends_of_the_worker(spark: SparkSession, tmp_path: Path, what: str) -> None:
    """An end of Spark's Python worker leaves slot and state as they are."""
    error = mend(spark, tmp_path, Wrong("middle", what, pandas=what == "hoards"))
    said = {"exits": "SystemExit: 3", "hoards": "MemoryError"}.get(what, r"(?i)python worker exited unexpectedly")
    assert re.search(said, error), error
    if what not in DIES:
        assert re.search(r"batch 1, key \('b',\)", error), error


def test_a_long_sleep(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's code may take longer than slots, attempts and commits may be silent.

    They may be so for long enough that a machine with too much to do is not taken for a slot that hangs.
    """
    short = partial(SlotSettings, silence_timeout=10.0, attempt_timeout=10.0, open_timeout=10.0, commit_timeout=12.0)
    monkeypatch.setattr(tasks, "SlotSettings", short)
    for number, table in enumerate(TABLES):
        write(tmp_path / "in", number, table)
    found: Batches = {}
    began = time.monotonic()
    go(session_of(spark), tmp_path, Wrong("middle", "sleeps"), found)
    assert time.monotonic() - began > 14
    assert_equal(found, sparks(spark, tmp_path, Wrong("middle", "sleeps", mended=True)))


@pytest.mark.parametrize(("where", "pandas"), [("rows", True), ("endless", False)])
def test_a_stop(spark: SparkSession, tmp_path: Path, where: str, pandas: bool) -> None:
    """A query is stopped while the user's code sleeps, or gives out rows without an end."""
    for number, table in enumerate(TABLES):
        write(tmp_path / "in", number, table)
    session = session_of(spark)
    broken = Wrong(where, "sleeps on", pandas)
    running = (
        millpond.writeStream(query(stream(session, tmp_path / "in", DDL), broken))
        .outputMode("update")
        .option("checkpointLocation", str(tmp_path / "ours"))
        .foreachBatch(lambda batch, number: batch.collect())
        .start()
    )
    until = time.monotonic() + 120
    while not (tmp_path / "ours" / "offsets" / "1").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(2)
    assert running.isActive
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < 120  # the user's code sleeps for longer, or goes on for ever
    assert not (tmp_path / "ours" / "commits" / "1").exists()
    mended = Wrong(where, "sleeps on", pandas, mended=True)
    found: Batches = {}
    go(session, tmp_path, mended, found)
    expected = sparks(spark, tmp_path, mended)
    assert_equal(found, {number: rows for number, rows in expected.items() if number})

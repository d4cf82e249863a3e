"""Timeouts of processing time that are over for certain, or certainly not."""

from __future__ import annotations

import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import millpond
from tests.differential.data import write
from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script
from tests.differential.harness import on_millpond, stream
from tests.differential.processors.checks import DDL, ONCE, Query, Turn, compare, script, spoken

PROCESSING = "ProcessingTimeTimeout"
HOUR = 3_600_000


def timed(due: str) -> Query:
    query = grouped(Script(due), timeout=PROCESSING)

    def waiting(df: DataFrame) -> DataFrame:
        time.sleep(0.05)  # what lives for a millisecond is over in the next run
        return query(df)

    return waiting


def test_timeouts(spark: SparkSession, tmp_path: Path) -> None:
    first = script(
        ("soon", "state.update((1,)), state.setTimeoutDuration(1)"),
        ("late", f"state.update((2,)), state.setTimeoutDuration({HOUR})"),
        ("moved", f"state.update((3,)), state.setTimeoutDuration(1), state.setTimeoutDuration({HOUR})"),
        ("lost", "state.update((4,)), state.setTimeoutDuration(1)"),
        ("left", "state.update((5,)), state.setTimeoutDuration(1)"),
        ("removed", "state.remove(), state.setTimeoutDuration(1.5)"),
        ("number", "state.setTimeoutDuration(True)"),
        ("wrapped", "state.setTimeoutDuration(2**63)"),
    )
    second = script(("lost", "state.update((40,))"), ("left", "state.getOption"), ("late", "state.getOption"))
    third = script(("late", "state.getOption"), ("soon", "state.getOption"))
    due = "state.getOption, state.getCurrentProcessingTimeMs() > 10**12, state.hasTimedOut"
    found = compare(spark, tmp_path, [Turn(timed(due), [table], trigger=ONCE) for table in (first, second, third)])
    assert len(spoken(found, "soon")[1]) == 1
    assert spoken(found, "lost")[1:] == [["None"], []]
    assert [len(said) for said in spoken(found, "left")] == [1, 2, 1]
    assert spoken(found, "late")[2] == ["(2,)"]


def test_batches_without_rows(spark: SparkSession, tmp_path: Path) -> None:
    """There is always another batch, so that a key times out although no row comes."""
    write(tmp_path / "in", 0, script(("a", "state.update((1,)), state.setTimeoutDuration(1)")))
    found: dict[int, list[tuple[object, ...]]] = {}

    def keep(batch: DataFrame, number: int) -> None:
        found[number] = [tuple(row) for row in batch.collect()]

    df = timed("state.getOption, state.remove()")(stream(spark.newSession(), tmp_path / "in", DDL))
    on_millpond(df, "update")
    writer = millpond.writeStream(df).outputMode("update").option("checkpointLocation", str(tmp_path / "ours"))
    query = writer.foreachBatch(keep).start()
    try:
        deadline = time.monotonic() + 120
        while len(found) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert query.exception() is None
    finally:
        query.stop()
    rows = [row for _, batch in sorted(found.items()) for row in batch]
    assert rows == [("a", 0, "(None, None)"), ("a", -1, "['k', 'n', 'ts', 'do'], 0: ((1,), None)")]
    assert len(found) >= 4

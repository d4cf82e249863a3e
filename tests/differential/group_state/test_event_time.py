"""Timeouts of event time: what is late, what times out when, batches without rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script
from tests.differential.processors.checks import Turn, compare, script, spoken

EVENT = "EventTimeTimeout"


@pytest.mark.parametrize("mode", ["update", "append"])
def test_timeouts(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Set, moved, lost, kept where the function does nothing, in data's batch, in batches without rows, at restarts."""
    due = "watermark(), state.getOption, state.hasTimedOut, state.oldTimeoutTimestamp"
    first = script(
        ("moved", "state.update((1,)), until(5), until(30)", 20),
        ("due", "state.update((2,)), until(5)", 1),
        ("at", "state.update((3,)), until(10)", 2),
        ("before", "state.update((4,)), until(9.999)", 2),
        ("lost", "state.update((5,)), until(12)", 3),
        ("left", "state.update((6,)), until(12)", 3),
        ("again", "state.update((7,)), until(14)", 3),
        ("removed", "state.update((8,)), state.remove(), until(11)", 3),
        ("only", "until(11), state.exists", 3),
        ("kept", "state.update((9,)), until(10**6)", 3),
        ("now", "watermark(), until(0), state.getCurrentWatermarkMs()", 4),
    )
    second = script(
        ("moved", "state.getOption", 25),
        ("lost", "state.update((50,)), watermark()", 24),
        ("again", "until(100), state.getOption", 24),
        ("late", "state.update((1,))", 9),
        ("at the watermark", "state.update((1,))", 10),
        ("fresh", "until(14), until(15), until(16), watermark()", 11),
        ("early", "until(9)", 26),
        (None, "state.update((0,)), until(20)", 26),
    )
    third = script(("removed", "state.getOption, until(60)", 70), ("kept", "state.getOption", 71))
    query = grouped(Script(due), mode=mode, timeout=EVENT, delay="10 seconds")
    turns = [Turn(query, [first], mode=mode), Turn(query, [second, third], mode=mode)]
    found = compare(spark, tmp_path, turns)
    everything = "['k', 'n', 'ts', 'do'], 0: "
    assert spoken(found, "due")[:2] == [["(None, None)"], [f"{everything}(10.0, (2,), True, -1)"]]
    assert spoken(found, "at")[1] == []
    assert spoken(found, "late") == [[]] * len(found)


DONE = {
    "nothing": "state.getOption",
    "updates": "state.update((2,)), watermark()",
    "removes": "state.remove(), watermark()",
    "sets": "until(watermark() + 5), state.getOption",
    "moves and updates": "state.update((state.get[0] + 1,)), until(watermark() + 5)",
    "removes and sets": "state.remove(), until(watermark() + 5)",
}


@pytest.mark.parametrize("done", DONE)
def test_in_a_timeout(spark: SparkSession, tmp_path: Path, done: str) -> None:
    """Do each of `DONE` in a timeout; a key that does nothing times out again."""
    first = script(*((f"k{n}", f"state.update(({n},)), until({n})", 10) for n in range(20)))
    later = [script(("clock", "watermark()", at)) for at in (20, 40, 60)]
    last = script(*((f"k{n}", "state.getOption", 80) for n in range(20)))
    query = grouped(Script(DONE[done]), timeout=EVENT, delay="0 seconds")
    found = compare(spark, tmp_path, [Turn(query, [first, *later[:2]]), Turn(query, [later[2], last])])
    times = sum(bool(said) for said in spoken(found, "k1"))
    assert (times > 3) == (done not in ("updates", "removes"))


@pytest.mark.parametrize("timeout", ["NoTimeout", "ProcessingTimeTimeout"])
def test_nothing_is_late_without_timeouts_of_event_time(spark: SparkSession, tmp_path: Path, timeout: str) -> None:
    """Functions see the watermark, but it makes no row late and starts no batch without rows."""
    tables = [
        script(("a", "watermark(), state.update((1,))", 100)),
        script(("b", "watermark(), state.update((2,))", 50), ("c", "watermark()", 1)),
        script(("b", "watermark(), state.getOption", 200)),
    ]
    query = grouped(Script(), timeout=timeout, delay="10 seconds")
    trigger = {"once": True} if timeout == "ProcessingTimeTimeout" else {"availableNow": True}
    turns = [Turn(query, [table], trigger=trigger) for table in tables]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "b")[1] == ["(90.0, None)"]


def test_windows_as_event_time(spark: SparkSession, tmp_path: Path) -> None:
    """The event time is that of a window, which is a part of the key; rows are late by its end."""
    query = grouped(Script("watermark(), state.getOption"), timeout=EVENT, by=("k", "ts"))

    def windowed(df):  # type: ignore[no-untyped-def]
        marked = df.withWatermark("ts", "5 seconds")
        return query(marked.select("k", "n", F.window("ts", "10 seconds").alias("ts"), "do"))

    first = script(("a", "state.update((1,)), until(20)", 3), ("a", "state.update((2,)), until(25)", 33))
    second = script(("a", "state.getOption", 4), ("b", "until(40), key", 29), ("b", "key", 38))
    compare(spark, tmp_path, [Turn(windowed, [first, second])])


def test_below_and_above(spark: SparkSession, tmp_path: Path) -> None:
    """Over rows without duplicates; what comes out is worked on further."""
    query = grouped(Script("state.getOption"), timeout=EVENT, mode="append")

    def whole(df):  # type: ignore[no-untyped-def]
        rows = df.withWatermark("ts", "5 seconds").dropDuplicates(["k", "ts"])
        return query(rows).where("n <> 1").select(F.upper("said").alias("said"), "k")

    first = script(("a", "until(20)", 3), ("b", "until(25)", 33), ("a", "state.exists", 3), ("c", "until(29)", 40))
    second = script(("a", "state.getOption", 70), ("c", "state.exists", 70))
    compare(spark, tmp_path, [Turn(whole, [first], mode="append"), Turn(whole, [second], mode="append")])

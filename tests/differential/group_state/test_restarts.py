"""Restarts with another query, and reading the state."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond
from millpond.errors import StateIncompatibleError
from tests.differential.data import write
from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script
from tests.differential.harness import run, stream
from tests.differential.processors.checks import DDL, ONCE, Query, Turn, compare, script, spoken
from tests.differential.processors.processors import START_MS

FIRST = grouped(Script("'first', state.getOption"), timeout="EventTimeTimeout", delay="10 seconds")
SCHEMA = "STATE_STORE_(VALUE|KEY)_SCHEMA_NOT_COMPATIBLE"
BEFORE = script(("a", "state.update((1,)), until(10**6)", 20), ("b", "state.update((2,)), until(15)", 20))
AFTER = script(("a", "state.getOption", 30), ("b", "state.getOption", 30), ("c", "state.exists", 30))

REFUSED: dict[str, tuple[Query, str]] = {
    "no timeouts": (
        grouped(Script(), delay="10 seconds"),
        "the query has no timeouts; its checkpoint has timeouts of event time",
    ),
    "another type": (
        grouped(Script(), state="n bigint", timeout="EventTimeTimeout", delay="10 seconds"),
        "the query has its state of struct<n:bigint>; its checkpoint of struct<n:int>",
    ),
    "more fields": (
        grouped(Script(), state="n int, m int", timeout="EventTimeTimeout", delay="10 seconds"),
        "the query has its state of struct<n:int,m:int>; its checkpoint of struct<n:int>",
    ),
    "another key": (
        grouped(Script(), timeout="EventTimeTimeout", delay="10 seconds", by=("k", "n")),
        "the query groups by",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_refused(spark: SparkSession, tmp_path: Path, change: str) -> None:
    query, ours = REFUSED[change]
    fails = Turn(query, [AFTER], fails=SCHEMA, fails_ours=ours)
    found = compare(spark, tmp_path, [Turn(FIRST, [BEFORE]), fails, Turn(FIRST, [])])
    assert spoken(found, "a")[1:] == [[], ["(1,)"], []][: len(found) - 1]


FOLLOWED: dict[str, Query] = {
    "function": grouped(Script("'another'"), timeout="EventTimeTimeout", delay="10 seconds"),
    "delay": grouped(Script(), timeout="EventTimeTimeout", delay="1 second"),
    "names": grouped(Script(), state="m int", timeout="EventTimeTimeout", delay="10 seconds"),
    "output": grouped(
        Script(), shown="said string, k string, n bigint", timeout="EventTimeTimeout", delay="10 seconds"
    ),
}


@pytest.mark.parametrize("change", FOLLOWED)
def test_what_is_followed(spark: SparkSession, tmp_path: Path, change: str) -> None:
    """Another function, watermark, name, output."""
    compare(spark, tmp_path, [Turn(FIRST, [BEFORE]), Turn(FOLLOWED[change], [AFTER])])


def test_another_clock(spark: SparkSession, tmp_path: Path) -> None:
    """Spark takes timeouts of event time for ones of processing time; Millpond does not."""
    place = tmp_path / "ours"
    write(tmp_path / "in", 0, BEFORE)
    run(FIRST(stream(spark, tmp_path / "in", DDL)), "update", place, ours=True, into={})
    query = grouped(Script(), timeout="ProcessingTimeTimeout", delay="10 seconds")
    with pytest.raises(StateIncompatibleError, match="the query has timeouts of processing time; its checkpoint"):
        run(query(stream(spark, tmp_path / "in", DDL)), "update", place, ours=True, into={}, trigger=ONCE)


def test_output_mode(spark: SparkSession, tmp_path: Path) -> None:
    first, second = (grouped(Script(), mode=mode) for mode in ("update", "append"))
    turns = [Turn(first, [BEFORE.slice(0, 0), script(("a", "state.update((1,))"))])]
    turns.append(Turn(second, [script(("a", "state.getOption"))], mode="append"))
    compare(spark, tmp_path, turns)


def test_reading(spark: SparkSession, tmp_path: Path) -> None:
    """The state as a table: what there is of a key, and when it times out."""
    rows = script(("a", "state.update((1,)), until(50)", 9), ("b", "state.update((2,))"), ("c", "until(60)"))
    compare(spark, tmp_path, [Turn(FIRST, [rows])])
    read = millpond.read_state(spark, str(tmp_path / "ours"))
    assert read.columns == ["k", "groupState", "timeoutTimestamp"]
    assert sorted(map(tuple, read.collect())) == [
        ("a", (1,), START_MS + 50_000),
        ("b", (2,), None),
        ("c", None, START_MS + 60_000),
    ]
    df = FIRST(stream(spark, tmp_path / "in", DDL))
    (operator,) = millpond.explain(df, "update", as_dict=True)["operators"]
    assert operator["title"] == "applyInPandasWithState by k"
    assert operator["functions"] == ["state: struct<n:int>, timeouts of event time"]

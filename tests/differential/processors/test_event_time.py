"""Event time: timers, late rows, the watermark that processors see, batches without rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script as GroupScript
from tests.differential.processors.checks import APIS, ONCE, Query, Turn, compare, script, spoken, transformed, values
from tests.differential.processors.processors import START_MS, Script, Variables

NOW = f"(times.getCurrentWatermarkInMs() - {START_MS}) / 1000"


def timed(
    api: str, due: str, delay: str = "10 seconds", mode: str = "update", variables: Variables | None = None
) -> Query:
    def query(df: DataFrame) -> DataFrame:
        processor = Script(variables or {}, due=due).using(api)
        return transformed(df.withWatermark("ts", delay), processor, mode, "eventTime")

    return query


@pytest.mark.parametrize("api", APIS)
def test_timers(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Registered, twice, deleted, listed; due in the same batch, later, in a batch without rows, after a restart."""
    due = f"v.get(), timers(), {NOW}, times.getCurrentProcessingTimeInMs() > 10**12, v.update((at,))"
    first = script(
        ("a", "timers(), register(5), register(15), register(5), timers()", 20),
        ("a", "delete(99), register(30), delete(30), timers()", 1),
        ("b", "register(-1), register(0), register(3.5), v.update((0.0,))", 0),
        ("c", f"{NOW}, times.getCurrentProcessingTimeInMs() > 10**12", 3),
        ("d", "[register(n) for n in (100, 12, 50, 11, 12.001, -5)]", 4),
        ("never", "register(10**8), register(200), delete(200)", 4),
        *(("none", f"handle.registerTimer({at})", 4) for at in ("'soon'", "None", "1.5", "2**63", "True")),
    )
    second = script(
        ("a", "timers(), v.get(), register(1), timers()", 25),
        ("e", f"register(14), register(15), register(15.001), {NOW}", 25),
        ("d", "delete(50), timers()", 24),
    )
    third = script(("c", "timers(), register(40), delete(40)", 200), ("never", "timers()", 210))
    query = timed(api, due, variables={"v": ("Value", "x double")})
    found = compare(spark, tmp_path, [Turn(query, [first]), Turn(query, [second, third])])
    assert [len(rows) for rows in found.values()] == [12, 5, 4, 8, 2]
    assert spoken(found, "none")[0][::3] == [
        "TypeError: 'str' object cannot be interpreted as an integer",
        "ValueError: Value out of range: 9223372036854775808",
    ]
    assert spoken(found, "b")[1] == [
        "due -1: ((0.0,), [-1.0, 0.0, 3.5], 10.0, True, None)",
        "due 0: ((-1.0,), [0.0, 3.5], 10.0, True, None)",
        "due 3.5: ((0.0,), [3.5], 10.0, True, None)",
    ]
    assert spoken(found, "e")[2:] == [
        ["(None, None, None, 10.0)"],
        [
            "due 14: (None, [14.0, 15.0, 15.001], 15.0, True, None)",
            "due 15: ((14.0,), [15.0, 15.001], 15.0, True, None)",
        ],
        ["due 15.001: ((15.0,), [15.001], 200.0, True, None)"],
    ]
    assert spoken(found, "never")[3] == ["[100000000.0]"]


def test_timers_of_timers(spark: SparkSession, tmp_path: Path) -> None:
    """Timers are registered and deleted while timers are due: the due ones are those of before."""
    due = f"timers(), register(at), register(at + 1), register(at + 1000), delete(8), delete(at + 0.5), timers(), {NOW}"
    first = script(("a", "[register(n) for n in (5, 8, 5.5)]", 20), ("b", "register(6), register(8)", 20))
    second = script(("c", "register(9), register(10), register(11)", 24))
    third = script(("c", "timers()", 27), ("a", "timers()", 29), ("b", "timers()", 29))
    query = timed("rows", due)
    found = compare(spark, tmp_path, [Turn(query, [first, second]), Turn(query, [third])])
    assert spoken(found, "b")[1:3] == [
        [
            "due 6: ([6.0, 8.0], None, None, None, None, None, [6.0, 7.0, 1006.0], 10.0)",
            "due 8: ([7.0, 1006.0], None, None, None, None, None, [7.0, 9.0, 1006.0, 1008.0], 10.0)",
        ],
        [
            "due 7: ([7.0, 9.0, 1006.0, 1008.0], None, None, None, None, None, "
            "[7.0, 9.0, 1006.0, 1007.0, 1008.0], 14.0)",
            "due 9: ([9.0, 1006.0, 1007.0, 1008.0], None, None, None, None, None, "
            "[9.0, 10.0, 1006.0, 1007.0, 1008.0, 1009.0], 14.0)",
        ],
    ]
    fired = [[said.split(":")[0] for said in some] for some in spoken(found, "a")]
    assert [sorted(some) for some in fired[1:3]] == [["due 5", "due 5.5", "due 8"], ["due 6.5", "due 9"]]


def test_late_rows(spark: SparkSession, tmp_path: Path) -> None:
    """They are dropped with event time only, by the watermark of the batch before; other modes tell it or -1."""
    tables = [
        script(("a", "1", 0), ("b", "1", 100)),
        script(("a", "2", 90), ("b", "3", 89), ("b", NOW, 100)),
        script(("a", "4", 300), ("c", "5", 91), ("b", "6", 90), ("b", "7", 90.001), ("d", "8", 0)),
    ]
    found = {}
    for time in ("eventTime", "none", "processingTime"):

        def query(df: DataFrame, time: str = time) -> DataFrame:
            return transformed(df.withWatermark("ts", "10 seconds"), Script({}), time=time)

        each = [Turn(query, [table], trigger=ONCE) for table in tables]
        found[time] = compare(spark, tmp_path / time, each if time == "processingTime" else [Turn(query, tables)])
    none = f"{(-1 - START_MS) / 1000}"
    kept = [("a", 0, "4"), ("b", 2, "6"), ("b", 3, "7"), ("c", 1, "5"), ("d", 4, "8")]
    assert values(found["none"])[1:3] == [[("a", 0, "2"), ("b", 1, "3"), ("b", 2, none)], kept]
    assert values(found["processingTime"])[1:3] == [[("a", 0, "2"), ("b", 1, "3"), ("b", 2, "90.0")], kept]
    assert values(found["eventTime"])[1:3] == [
        [("a", 0, "2"), ("b", 1, "3"), ("b", 2, "90.0")],
        [("a", 0, "4"), ("b", 3, "7"), ("c", 1, "5")],
    ]


def test_append_mode(spark: SparkSession, tmp_path: Path) -> None:
    query = timed("rows", "at", "0 seconds", "append")
    tables = [script(("a", "register(10), register(1000)", 0)), script(("b", "1", 20)), script(("b", "2", 30))]
    found = compare(spark, tmp_path, [Turn(query, tables[:2], mode="append"), Turn(query, tables[2:], mode="append")])
    assert values(found) == [
        [("a", 0, "(None, None)")],
        [("b", 0, "1")],
        [("a", -1, "due 10: 10.0")],
        [("b", 0, "2")],
        [],
    ]


def test_no_watermark(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Script({}), time="eventTime")

    do = "handle.registerTimer(0), handle.registerTimer(-7), len(timers()), times.getCurrentWatermarkInMs()"
    found = compare(spark, tmp_path, [Turn(query, [script(("a", do))])])
    assert sorted(spoken(found, "a")[0]) == [
        "(None, None, 2, 0)",
        f"due: {-START_MS / 1000}",
        f"due: {(-7 - START_MS) / 1000}",
    ]


@pytest.mark.parametrize("below", ["processor", "group state", "other branch"])
def test_no_watermark_passes(spark: SparkSession, tmp_path: Path, below: str) -> None:
    """The query has a watermark, which does not reach the processor: it sees 0, and its timers are never due."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", "10 seconds")
        if below == "processor":
            frame = transformed(marked, Script({}), time="processingTime")
        elif below == "group state":
            frame = grouped(GroupScript())(marked)
        else:
            frame = df
        do = F.lit("register(5), timers(), times.getCurrentWatermarkInMs()").alias("do")
        above = transformed(frame.select("k", "n", do), Script({}), time="eventTime")
        return above.union(marked.select("k", "n", F.lit("marked"))) if below == "other branch" else above

    tables = [script(("a", "1", second)) for second in (20, 100, 200)]
    batches = compare(spark, tmp_path, [Turn(query, [table], trigger=ONCE) for table in tables])
    spoken_texts = [text for texts in spoken(batches, "a") for text in texts if text != "marked"]
    assert spoken_texts == ["(None, [5.0], 0)"] * 3


def test_a_derived_time_and_one_partition(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame) -> DataFrame:
        times = df.select("k", "n", "do", F.col("ts").alias("at")).withWatermark("at", "1 second")
        chosen = times.filter("k != 'x'").select("k", F.lower("do").alias("do"), "n", "at")
        return transformed(chosen, Script({"v": ("Value", "n int")}, due="at, v.get()"), time="eventTime")

    tables = [
        script(("a", "REGISTER(3), V.UPDATE((1,))", 1), ("x", "1/0", 90), ("b", "V.UPDATE((ROW.N,)), REGISTER(2)", 2)),
        script(("b", "ROW.AT.YEAR, V.GET()", 4), ("a", "V.GET()", 0)),
        script(("b", "V.GET()", 9)),
    ]
    conf = {"spark.sql.shuffle.partitions": "1"}
    tables[0] = tables[0].set_column(3, "do", [[one.lower() for one in tables[0]["do"].to_pylist()]])
    found = compare(spark, tmp_path, [Turn(query, tables, conf=conf)])
    assert values(found) == [
        [("a", 0, "(None, None)"), ("b", 2, "(None, None)")],
        [("a", 1, "(1,)"), ("b", 0, "(2024, (2,))")],
        [("a", -1, "due 3: (3.0, (1,))"), ("b", -1, "due 2: (2.0, (2,))"), ("b", 0, "(2,)")],
        [],
    ]

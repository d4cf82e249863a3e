"""State that a query begins with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from tests.differential.processors.checks import APIS, ONCE, Query, Turn, compare, script, spoken, transformed, values
from tests.differential.processors.processors import Script, Strict, Variables

ENGINE = "millpond"
"""Which engine runs processors with initial state."""

VARIABLES: Variables = {"v": ("Value", "n int"), "l": ("List", "n int"), "m": ("Map", "k string", "n int")}
BEGIN = "(v.update((row.x,)), l.appendValue((row.x,)), m.updateValue((row.s,), (row.x,)))"
OF_A = "[(1,), (3,), (5,)], [(('one',), (5,)), (('three',), (3,))]"
TOLD = "v.get(), l.get(), m.iterator()"


ROWS = [("a", 1, "one"), ("b", 2, "two"), ("a", 3, "three"), ("c", 4, None), ("a", 5, "one"), (None, 6, "none")]


def began(
    api: str,
    first: str,
    time: str = "none",
    due: str = "at",
    variables: Variables = VARIABLES,
    rows: Sequence[tuple[str | None, int, str | None]] = ROWS,
    kind: type[Script] = Script,
) -> Query:
    def query(df: DataFrame) -> DataFrame:
        state = df.sparkSession.createDataFrame(rows, "k string, x int, s string").orderBy("x").coalesce(1)
        processor = kind(variables, first=first, due=due).using(api)
        marked = df.withWatermark("ts", "1 second")
        return transformed(marked, processor, "update", time, initialState=state.groupBy("k"))

    return query


@pytest.mark.parametrize("api", APIS)
def test_first_batch_only(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Keys with several rows, keys without rows of the stream, and rows without initial state; not after a restart."""
    first = script(("a", TOLD), ("z", TOLD), ("a", "v.update((9,))"))
    query = began(api, BEGIN)
    second, third = (script(*((key, TOLD) for key in ("a", "b", "c", "z"))) for _ in range(2))
    found = compare(spark, tmp_path, [Turn(query, [first, second]), Turn(query, [third])], ours_on=ENGINE)
    assert spoken(found, "a") == [[f"((5,), {OF_A})", "None"], [f"((9,), {OF_A})"], [f"((9,), {OF_A})"]]
    assert spoken(found, "b")[:2] == [[], ["((2,), [(2,)], [(('two',), (2,))])"]]
    assert spoken(found, "c")[2] == ["((4,), [(4,)], [((None,), (4,))])"]
    assert spoken(found, "z") == [["(None, [], [])"]] * 3


@pytest.mark.parametrize("api", APIS)
def test_timers(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Timers that initial state registers, due in the first batch and later."""
    query = began(api, f"{BEGIN}, register(row.x), handle.registerTimer(0)", "eventTime", due=f"at, {TOLD}")
    tables = [script(("a", "timers()", 3)), script(("b", "timers()", 3)), script(("a", "timers()", 10))]
    found = compare(spark, tmp_path, [Turn(query, tables)], ours_on=ENGINE)
    assert [row[0] for row in values(found)[0] if row[1] < 0] == ["None", "a", "b", "c"]
    assert spoken(found, "a")[:3] == [
        ["[-1714564800.0, 1.0, 3.0, 5.0]", f"due: (-1714564800.0, (5,), {OF_A})"],
        [f"due 1: (1.0, (5,), {OF_A})"],
        ["[3.0, 5.0]"],
    ]
    assert [row[2].split(":")[0] for row in values(found)[3]] == ["due 6", "due 3", "due 5", "due 4"]


def test_grouping_columns_that_do_not_stand_together(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame) -> DataFrame:
        rows = [(1, "a", 0, "b"), (2, "a", 1, "b")]
        state = df.sparkSession.createDataFrame(rows, "x int, k string, s int, k2 string")
        columns = df.selectExpr("'b' as k2", "n", "do", "k")
        script = Script({"v": ("List", "n int")}, first="v.appendValue((row.x,)), key, row")
        return transformed(columns, script, by=["k2", "k"], initialState=state.groupBy("k2", "k"))

    table = script(("a", "v.get(), key, list(row.asDict())"), ("c", "v.get()"))
    found = compare(spark, tmp_path, [Turn(query, [table])], ours_on=ENGINE)
    assert values(found) == [
        [("b|a", 0, "([(1,), (2,)], ('b', 'a'), ['k2', 'n', 'do', 'k'])"), ("b|c", 1, "[]")],
    ]


@pytest.mark.parametrize("api", APIS)
def test_a_first_batch_that_fails(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """It begins again, in other partitions, with the initial state that the mended query has, and once only."""
    told = f"{TOLD}, 1 / (v.get()[0] - 3)"
    tables = [script(("a", told), ("z", "v.update((1,))")), script(("b", TOLD), ("a", TOLD), ("z", TOLD))]
    rows = [("a", 7, "seven"), ("d", 8, "eight")]
    turns = [
        Turn(began(api, BEGIN, rows=ROWS[:3], kind=Strict), tables[:1], fails="(?m)^ZeroDivisionError"),
        Turn(began(api, BEGIN, rows=rows, kind=Strict), tables[1:]),
        Turn(began(api, "1 / 0", kind=Strict), [script(("d", TOLD), ("e", TOLD))]),
    ]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "a")[:2] == [
        ["((7,), [(7,)], [(('seven',), (7,))], 0.25)"],
        ["((7,), [(7,)], [(('seven',), (7,))])"],
    ]
    assert spoken(found, "b")[1] == ["(None, [], [])"]
    assert [spoken(found, key)[2] for key in "de"] == [["((8,), [(8,)], [(('eight',), (8,))])"], ["(None, [], [])"]]


def test_of_another_shape(spark: SparkSession, tmp_path: Path) -> None:
    """Columns in another order, under other and odd names, nested; keys that are null and NaN; no rows."""

    def query(empty: bool) -> Query:
        def build(df: DataFrame) -> DataFrame:
            rows: list[Any] = [
                ([1], float("nan"), {"a": 1}, "b", 1),
                ([2], 0.0, {"b": 2}, "a", 2),
                (None, None, None, None, 3),
                ([4], 9.0, {}, "a", 4),
            ]
            ddl = "l array<int>, `the number` double, m map<string, int>, count string, __hash int"
            state = df.sparkSession.createDataFrame(rows, ddl).where("`__hash` > 9" if empty else "true")
            number = F.when(F.col("n") == 1, float("nan")).when(F.col("n") == 2, None).otherwise(0.0)
            columns = df.select("k", number.alias("f"), "do", "n")
            processor = Script({"v": ("Value", "said string")}, first="v.update((str((key, row)),))")
            return transformed(columns, processor, by=["f", "k"], initialState=state.groupBy("the number", "count"))

        return build

    table = script(("a", "v.get(), key"), ("b", "v.get(), key"), (None, "v.get(), key"), ("b", "v.get(), key"))
    found = compare(spark, tmp_path, [Turn(query(empty=False), [table, script(("a", "v.get()"))])])
    seen = " Row(l=[1], the number=nan, m=[('a', 1)], count='b', __hash=1))"
    assert f"((\"((nan, 'b'),{seen}\",), (nan, 'b'))" in [row[2] for row in found[0]]
    assert [row[2] != "None" for row in found[1]] == [True]
    compare(spark, tmp_path / "empty", [Turn(query(empty=True), [table])])


def test_stream(spark: SparkSession, tmp_path: Path) -> None:
    """An initial state that is a stream itself stays on Spark, which takes what the first batch has of it."""

    def query(df: DataFrame) -> DataFrame:
        processor = Script({"v": ("List", "n int")}, first="v.appendValue((row.n,))")
        return transformed(df, processor, initialState=df.select("k", "n").groupBy("k"))

    tables = [script(("a", "v.get()")), script(("b", "v.get()"), ("a", "v.get()"))]
    found = compare(spark, tmp_path, [Turn(query, tables)], ours_on="spark")
    assert spoken(found, "a") == [["[(0,)]"], ["[(0,)]"]]


def test_lives(spark: SparkSession, tmp_path: Path) -> None:
    """By the clock: a time to live, and timers that are due at once."""
    lives: Variables = {"v": ("Value", "n int", 1), "l": ("List", "n int", 10_000_000), "m": VARIABLES["m"]}
    first = f"{BEGIN}, handle.registerTimer(times.getCurrentProcessingTimeInMs())"
    query = began("rows", first, "processingTime", due=TOLD, variables=lives)
    turns = [Turn(query, [script(("a", TOLD))], trigger=ONCE), Turn(query, [script(("b", TOLD))], trigger=ONCE)]
    found = compare(spark, tmp_path, turns)
    assert spoken(found, "b") == [["due: ((2,), [(2,)], [(('two',), (2,))])"], ["(None, [(2,)], [(('two',), (2,))])"]]


def test_read_back(spark: SparkSession, tmp_path: Path) -> None:
    """A query begins with what another one has left."""

    def query(df: DataFrame, left_by: Path | None = None) -> DataFrame:
        marked = df.withWatermark("ts", "1 second")
        processor = Script({"v": ("Value", "n int")}, first="v.update((row.v['n'] * 10,))")
        if left_by is not None:
            state = millpond.read_state(df.sparkSession, str(left_by / "ours"), variable="v")
        else:
            rows = spark.createDataFrame([("a", 1), ("b", 2)], "k string, n int")
            state = rows.select("k", F.struct("n").alias("v"))
        return transformed(marked, processor, initialState=state.groupBy("k"))

    one = tmp_path / "one"
    compare(spark, one, [Turn(query, [script(("a", "v.get()"))])])
    again = partial(query, left_by=one)
    found = compare(spark, tmp_path / "two", [Turn(again, [script(("a", "v.get()"), ("b", "v.get()"))])])
    assert [spoken(found, key)[0] for key in "ab"] == [["(100,)"], ["(200,)"]]

"""State that a query begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.processors.checks import APIS, Query, Turn, compare, script, spoken, transformed, values
from tests.differential.processors.processors import Script, Variables

ENGINE = "millpond"
"""Which engine runs processors with initial state."""

VARIABLES: Variables = {"v": ("Value", "n int"), "l": ("List", "n int"), "m": ("Map", "k string", "n int")}
BEGIN = "(v.update((row.x,)), l.appendValue((row.x,)), m.updateValue((row.s,), (row.x,)))"
OF_A = "[(1,), (3,), (5,)], [(('one',), (5,)), (('three',), (3,))]"
TOLD = "v.get(), l.get(), m.iterator()"


def began(api: str, first: str, time: str = "none", initial: str = "", due: str = "at") -> Query:
    def query(df: DataFrame) -> DataFrame:
        rows = [("a", 1, "one"), ("b", 2, "two"), ("a", 3, "three"), ("c", 4, None), ("a", 5, "one"), (None, 6, "none")]
        state = df.sparkSession.createDataFrame(rows, "k string, x int, s string").orderBy("x").coalesce(1)
        processor = Script(VARIABLES, first=first, due=due).using(api)
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


def test_timers_and_places(spark: SparkSession, tmp_path: Path) -> None:
    """Timers that initial state registers, due in the first batch and later; grouping columns in another order."""
    query = began("rows", f"{BEGIN}, register(row.x), handle.registerTimer(0)", "eventTime", due=f"at, {TOLD}")
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

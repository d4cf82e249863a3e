"""Expressions that fail for rows which a condition excludes: in ANSI mode, Spark does not evaluate them for these."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.data import write
from tests.differential.harness import Batches, Query, compare, run, stream

DDL = "side int, k int, s string, t timestamp, v int"
SCHEMA = pa.schema(
    [
        ("side", pa.int32()),
        ("k", pa.int32()),
        ("s", pa.string()),
        ("t", pa.timestamp("us", tz="UTC")),
        ("v", pa.int32()),
    ]
)
START = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)


def rows(given: Iterable[tuple[Any, ...]]) -> pa.Table:
    """Rows of the stream, from tuples of side, key, text, seconds after the start, and number."""
    made = [(side, k, s, START + dt.timedelta(seconds=second), v) for side, k, s, second, v in given]
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in made], SCHEMA)


def aggregated(minute: int) -> pa.Table:
    """Rows of two keys: some would divide by zero, some have a text that is no number."""
    values = [(1, "7", 0), (1, "x", 5), (1, None, None), (1, "", 5), (2, "12", 0), (2, "1e3", 3), (2, "12", -4)]
    return rows((0, k, s, 60 * minute + number, v) for number, (k, s, v) in enumerate(values))


def sql(text: str) -> Query:
    """A query in ANSI mode over the view `events`, or over `marked_events`, which has a watermark."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", "true")
        df.createOrReplaceTempView("events")
        df.withWatermark("t", "30 seconds").createOrReplaceTempView("marked_events")
        return session.sql(text)

    return query


GUARDED = "sum(100 / v) filter (where v <> 0) a, sum(cast(s as int)) filter (where s rlike '^[0-9]+$') b, count(*) n"
AGGREGATES = {
    "update": f"select k, {GUARDED} from events group by k",
    "append": f"select window(t, '1 minute') w, k, {GUARDED} from marked_events group by window(t, '1 minute'), k",
}


@pytest.mark.parametrize("combine", ["on", "off"])
@pytest.mark.parametrize("mode", AGGREGATES)
def test_arguments_of_functions_with_a_filter(spark: SparkSession, tmp_path: Path, mode: str, combine: str) -> None:
    tables = [aggregated(minute) for minute in (0, 2, 10)]
    found = compare(spark, tmp_path, sql(AGGREGATES[mode]), mode, [tables[:2], tables[2:]], ddl=DDL, combine=combine)
    assert any(found.values())


def test_distinct_arguments_with_a_filter(spark: SparkSession, tmp_path: Path) -> None:
    """Spark refuses such functions on streams."""
    write(
        tmp_path / "in",
        0,
        rows([(0, 1, "7", 0, 0), (0, 1, "07", 0, 5), (0, 1, "x", 0, 5), (0, 1, None, 0, None), (0, 2, "y", 0, 0)]),
    )
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    query = sql(
        "select k, sum(distinct 100 div v) filter (where v <> 0) a,"
        " count(distinct cast(s as int)) filter (where s rlike '^[0-9]+$') b from events group by k"
    )
    found: Batches = {}
    run(query(stream(session, tmp_path / "in", DDL), session), "update", tmp_path / "ours", ours=True, into=found)
    assert sorted(found[0]) == [(1, 20, 1), (2, None, 0)]


def joined(condition: str) -> Query:
    """A left outer join of the view `l` with the view `r`, whose times are equal, in ANSI mode."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", "true")
        for number, name in enumerate("lr"):
            side = df.withWatermark("t", "30 seconds").where(f"side = {number}")
            side.selectExpr(*(f"{column} as {name}{column}" for column in "kstv")).createOrReplaceTempView(name)
        return session.sql(f"select lk, ls, lv, rk, rv from l left join r on lt = rt and {condition}")

    return query


JOINS = {
    "an operand": "lk = rk and lv <> 0 and 10 / lv > rv",
    "conditions on one side": "lk = rk and lv <> 0 and 10 / lv > 2",
    "a computed key": "lower(ls) = lower(rs) and lv <> 0 and 10 / lv > 2",
    "an operand and a computed key": "lower(ls) = lower(rs) and lv <> 0 and 10 / lv > rv",
}


@pytest.mark.parametrize("name", JOINS)
def test_conditions_of_outer_joins(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Left rows with a zero, with and without a partner of their key, before it and after it."""
    left = [(0, 1, "a", 0, 0), (0, 2, "B", 0, 0), (0, 3, "c", 0, 4), (0, 4, "D", 0, 5), (0, 5, "e", 0, None)]
    right = [(1, 2, "b", 0, 1), (1, 3, "C", 0, 1), (1, 4, "d", 0, 3), (1, 5, "e", 0, 1), (1, 6, "f", 0, 1)]
    late_left = [(0, 6, "F", 0, 0), (0, 6, "f", 0, 2)]
    ahead = [(0, 7, "g", 600, 0), (1, 8, "h", 600, 1)]
    tables = [rows(part) for part in (left, right, late_left, ahead)]
    found = compare(spark, tmp_path, joined(JOINS[name]), "append", [tables[:2], tables[2:]], ddl=DDL)
    shown = {row for batch in found.values() for row in batch}
    assert {(1, "a", 0, None, None), (2, "B", 0, None, None), (6, "F", 0, None, None)} <= shown
    assert {(3, "c", 4, 3, 1), (6, "f", 2, 6, 1)} <= shown

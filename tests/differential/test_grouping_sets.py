"""Clauses that Spark's analyser makes one aggregate of: ROLLUP, CUBE, GROUPING SETS, pivots over given values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.decide import decide
from tests.differential.data import batch
from tests.differential.harness import compare, stream
from tests.differential.test_windows import check, marked


def cube(df: DataFrame, session: SparkSession) -> DataFrame:
    df.createOrReplaceTempView("events")
    return session.sql(
        "select b, i8 % 3 as r, grouping(b), grouping_id(), count(*), sum(i64), max(s), count(*) filter (where i32 > 0)"
        " from events group by cube(b, i8 % 3)"
    )


def rollup(df: DataFrame, session: SparkSession) -> DataFrame:
    return df.rollup("k", "b").agg(F.count("*"), F.avg("i32"), F.sum("dec9"))


def sets(df: DataFrame, session: SparkSession) -> DataFrame:
    df.createOrReplaceTempView("events")
    return session.sql("select k, b, d, sum(i32) as n from events group by grouping sets ((k, b), (d), (b, d), ())")


def pivot(df: DataFrame, session: SparkSession) -> DataFrame:
    """Strings among the results: one aggregate, with a condition for each value."""
    groups = df.groupBy("b").pivot("k", [1, 2, 3])
    return groups.agg(F.sum("i32"), F.max("s"), F.count("i64"), F.min("d"), F.expr("sum(i8) filter (where i16 > 0)"))


def lists(df: DataFrame, session: SparkSession) -> DataFrame:
    return (
        df.groupBy("b").pivot("s", ["a", "bb", "none"]).agg(F.collect_set("i8"), F.expr("percentile_approx(i8, 0.5)"))
    )


@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize("query", [cube, rollup, sets, pivot, lists])
def test_one_aggregate(
    query: Callable[[DataFrame, SparkSession], DataFrame], mode: str, spark: SparkSession, tmp_path: Path
) -> None:
    compare(spark, tmp_path, query, mode, [[batch(1, 60), batch(2, 0)], [batch(3, 40)]])


def firsts(df: DataFrame, session: SparkSession) -> DataFrame:
    return df.groupBy("k").pivot("b", [True, False]).agg(F.first("s", ignorenulls=True), F.last("d", ignorenulls=True))


def test_first_of_each_value(spark: SparkSession, tmp_path: Path) -> None:
    compare(spark, tmp_path, firsts, "update", [[batch(4, 60, once=True)], [batch(5, 60, once=True)]])


def windows(df: DataFrame, session: SparkSession) -> DataFrame:
    """Beside a window that is in each set, so that all groups close."""
    windowed = marked(df).withColumn("w", F.window("ts", "10 seconds"))
    windowed.createOrReplaceTempView("events")
    return session.sql("select w, k, s, count(*), sum(v) from events group by grouping sets ((w, k), (w, s), (w))")


@pytest.mark.parametrize("mode", ["append", "update"])
def test_windows_in_each_set(mode: str, spark: SparkSession, tmp_path: Path) -> None:
    assert sum(map(len, check(spark, tmp_path, windows, mode).values())) > 20


def test_a_pivot_of_numbers_alone_is_two_aggregates_that_stay(spark: SparkSession, tmp_path: Path) -> None:
    df = stream(spark, tmp_path).groupBy("b").pivot("k", [1, 2]).sum("i32")
    reasons = [operator.reason for operator in decide(df, "append").operators]
    assert any(reason is not None and "pivotfirst" in str(reason) for reason in reasons)

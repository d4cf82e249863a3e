"""Texts in order, approximate percentiles and count-min sketches: by windows and sessions, beyond what is exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.data import batch
from tests.differential.harness import compare
from tests.differential.test_windows import check, marked


def results() -> list[Column]:
    return [
        F.expr("listagg(s, ', ') within group (order by s desc)").alias("texts"),
        F.expr("string_agg(s) within group (order by v, k desc nulls last, s)").alias("by_number"),
        F.expr("listagg(s) within group (order by s) filter (where v > 0)").alias("some"),
        F.expr("percentile_approx(v, array(0.9, 0.25, 0.5))").alias("quantiles"),
        F.expr("percentile_approx(ts, 0.5) filter (where v < 0)").alias("time"),
        F.expr("approx_percentile(v / 7.0, 0.3)").alias("decimal"),
        F.expr("hex(count_min_sketch(v, 0.2D, 0.9D, 3))").alias("numbers"),
        F.expr("hex(count_min_sketch(s, 0.1D, 0.9D, 4)) || '!'").alias("words"),
    ]


def tumbling(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "k").agg(*results())


def sliding(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(*results())


def panes(df: DataFrame, session: SparkSession) -> DataFrame:
    """Without texts, whose order has each window keep its own state."""
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(*results()[3:])


def sessions(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.session_window("ts", "2 seconds"), "k").agg(*results())


def merged_sessions(df: DataFrame, session: SparkSession) -> DataFrame:
    """Without texts, which have the rows of sessions kept."""
    return marked(df).groupBy(F.session_window("ts", "2 seconds"), "k").agg(*results()[3:])


@pytest.mark.parametrize("query", [tumbling, sliding, panes, sessions, merged_sessions])
def test_closed_windows(
    query: Callable[[DataFrame, SparkSession], DataFrame], spark: SparkSession, tmp_path: Path
) -> None:
    assert sum(map(len, check(spark, tmp_path, query, "append").values())) > 20


def test_windows_that_are_updated(spark: SparkSession, tmp_path: Path) -> None:
    check(spark, tmp_path, tumbling, "update")


def test_groups_without_values(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        nothing = "s is null and s is not null"
        calls = ["percentile_approx(i32, 0.5)", "listagg(s)", "count_min_sketch(s, 0.5D, 0.5D, 1)"]
        return df.groupBy().agg(*(F.expr(f"{call} filter (where {nothing})").alias(call[:4]) for call in calls))

    compare(spark, tmp_path, query, "complete", [[batch(1, 0), batch(2, 9)], [batch(3, 5)]])


@pytest.mark.parametrize("ansi", ["true", "false"])
@pytest.mark.parametrize("accuracy", [3, 20, 150])
def test_one_batch_beyond_what_is_exact(accuracy: int, ansi: str, spark: SparkSession, tmp_path: Path) -> None:
    """Spark's answer depends on how rows are cut into tasks and batches: of one each, it is ours."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", ansi)
        shares = "array(0.5, 0.0, 0.1, 0.99, 0.25, 1.0, 0.75)"
        numbers = [f"percentile_approx({name}, {shares}, {accuracy}) as {name}" for name in ("i32", "i64", "dec9")]
        return df.groupBy().agg(*map(F.expr, numbers))

    compare(spark, tmp_path, query, "update", [[batch(accuracy, 700)]])


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_decimals_that_round_to_more_digits(ansi: str, spark: SparkSession, tmp_path: Path) -> None:
    """Quantiles of decimals are those of doubles, and no digit more fits: Spark gives null."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", ansi)
        many = df.withColumn("many", F.expr("cast(999999999999999999 - abs(i8 % 2) as decimal(18, 0))"))
        calls = ["percentile_approx(many, 0.5)", "percentile_approx(many, array(0.1, 0.9))", "count(many)"]
        return many.groupBy().agg(*(F.expr(call).alias(f"c{place}") for place, call in enumerate(calls)))

    assert compare(spark, tmp_path, query, "update", [[batch(1, 50)]])[0][0][:2] == (None, [None, None])

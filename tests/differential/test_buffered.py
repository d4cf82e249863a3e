"""Functions of all rows of a window: percentiles, modes and lists, beside others, as Spark computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.plan.decide import decide
from tests.differential.harness import compare, stream
from tests.differential.test_windows import DDL, check, marked, rounds


def results() -> list[Column]:
    return [
        F.median("v").alias("median"),
        F.expr("percentile(v, array(0.0, 0.1, 0.5, 0.99, 1.0))").alias("several"),
        F.expr("percentile(v, 0.3, abs(k) + 1)").alias("frequent"),
        F.expr("percentile(v / 7.0, 0.37)").alias("decimals"),
        F.expr("percentile(sqrt(v), 0.81)").alias("nans"),
        F.expr("percentile(if(v % 3 = 0, double('-infinity'), if(v % 3 = 1, 1e308D, -1e308D)), 0.3)").alias("far"),
        F.expr("median(v / 10)").alias("tenths"),
        F.expr("percentile_cont(0.3) within group (order by v desc)").alias("cont"),
        F.expr("percentile_disc(array(0.3, 0.0, 1.0)) within group (order by v)").alias("disc"),
        F.expr("percentile_disc(0.3) within group (order by v desc)").alias("disc_desc"),
        F.expr("mode(s, true)").alias("mode"),
        F.expr("mode() within group (order by v desc)").alias("greatest"),
        F.expr("median(v) filter (where s is not null)").alias("filtered"),
        F.collect_list("s").alias("list"),
        F.count("*").alias("n"),
        F.sum("v").alias("sum"),
        F.max("s").alias("high"),
    ]


def tumbling(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "k").agg(*results())


def sliding(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(*results())


def uneven(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("s", F.window("ts", "10 seconds", "4 seconds")).agg(*results())


def windows_only(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "20 seconds", "10 seconds")).agg(*results())


def sessions(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.session_window("ts", "2 seconds"), "k").agg(*results(), F.collect_set("v").alias("set"))


def dynamic_sessions(df: DataFrame, session: SparkSession) -> DataFrame:
    gap = F.when(F.col("v") < 0, "700 milliseconds").when(F.col("v") < 40, "4 seconds")
    return marked(df).groupBy("s", F.session_window("ts", gap)).agg(*results())


def instants(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("ts", "k").agg(*results())


@pytest.mark.parametrize("query", [tumbling, sliding, uneven, windows_only, sessions, dynamic_sessions, instants])
def test_whole_groups(
    query: Callable[[DataFrame, SparkSession], DataFrame], spark: SparkSession, tmp_path: Path
) -> None:
    batches = check(spark, tmp_path, query, "append")
    assert sum(len(rows) for rows in batches.values()) > 20
    (operator,) = decide(query(stream(spark, tmp_path, DDL), spark), "append").operators
    assert operator.spec is not None
    assert operator.spec.keeps_rows or operator.spec.keeps_rows
    state = millpond.read_state(spark, str(tmp_path / "ours"))
    assert {"k" if "k" in state.columns else "s"} <= set(state.columns) or query is windows_only
    assert state.count() > 0


def counted(df: DataFrame, session: SparkSession) -> DataFrame:
    windows = F.window("ts", "20 seconds", "5 seconds")
    return marked(df).groupBy(windows, "k").agg(F.count("*").alias("n"), F.sum("v").alias("sum"))


def listed(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(F.collect_list("s").alias("list"))


def session_counts(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.session_window("ts", "2 seconds"), "k").agg(F.count("*").alias("n"), F.max("s"))


def tumbling_counts(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "k").agg(F.count("*").alias("n"), F.max("s"))


@pytest.mark.parametrize(
    ("query", "pattern"),
    [(counted, "append"), (listed, "rmw"), (session_counts, "append"), (tumbling_counts, "rmw")],
)
def test_the_pattern_that_is_asked_for(
    query: Callable[[DataFrame, SparkSession], DataFrame], pattern: str, spark: SparkSession, tmp_path: Path
) -> None:
    conf = {"store.pattern": pattern}
    batches = compare(spark, tmp_path, query, "append", rounds(), ddl=DDL, **conf)
    assert sum(len(rows) for rows in batches.values()) > 20
    state = millpond.read_state(spark, str(tmp_path / "ours"))
    # Results, or rows under the names of the query's columns.
    assert bool({"n", "list"} & set(state.columns)) == (pattern == "rmw")
    assert next(type_ for name, type_ in state.dtypes if "window" in name) == "struct<start:timestamp,end:timestamp>"
    assert len(state.collect()) > 0

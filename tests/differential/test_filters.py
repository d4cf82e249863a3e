"""Filters above stateful operators: where Spark pushes them below a watermark, what they drop does not move it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType

from tests.differential.harness import Query, compare

DDL = "t timestamp, k int, v bigint, s string"
SCHEMA = pa.schema([("t", pa.timestamp("us", tz="UTC")), ("k", pa.int32()), ("v", pa.int64()), ("s", pa.string())])
START = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)


def rows(seed: int, minute: int, count: int = 60) -> pa.Table:
    """Rows around a minute, of each key a quarter of an hour ahead of the one before; some keys and times are null."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 6, count)
    ahead = 900 * keys + rng.integers(-90, 90, count)
    times = [START + dt.timedelta(minutes=minute, seconds=int(seconds)) for seconds in ahead]
    return pa.table(
        {
            "t": pa.array([None if n < 0.05 else t for t, n in zip(times, rng.random(count), strict=True)]),
            "k": pa.array(keys, mask=rng.random(count) < 0.1),
            "v": rng.integers(0, 10, count),
            "s": [["x", "y", None][int(n)] for n in rng.integers(0, 3, count)],
        }
    ).cast(SCHEMA)


def rounds() -> list[list[pa.Table]]:
    return [[rows(seed, minute) for seed, minute in some] for some in (((1, 0), (2, 2), (3, 4)), ((4, 6), (5, 9)))] + [
        [rows(6, 240, 10), rows(7, 600, 3)]
    ]


def sql(text: str) -> Query:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        df.withWatermark("t", "1 minute").createOrReplaceTempView("marked")
        return session.sql(text)

    return query


def old_keys(df: DataFrame, session: SparkSession) -> DataFrame:
    """Groups by day, filtered by a special date; without ANSI mode, a cast would make it null before it is read."""
    session.conf.set("spark.sql.ansi.enabled", "false")
    marked = df.withWatermark("t", "1 minute")
    counts = marked.groupBy(F.window("t", "1 minute"), "k", F.to_date("t").alias("day")).count()
    return counts.where("day < 'today' and k < 2")


def by_key(df: DataFrame, condition: str) -> DataFrame:
    marked = df.withWatermark("t", "1 minute")
    return marked.groupBy(F.window("t", "1 minute"), "k").agg(F.count("*").alias("n"), F.sum("v")).where(condition)


COUNTS = "select window, k, count(*) as n from marked group by window(t, '1 minute'), k"
COUNTS_BY_PARITY = "select window, k % 2 as odd, count(*) as n from marked group by window(t, '1 minute'), k % 2"
TWICE = "(select max(id * 2) from range(3) r where r.id = k)"

QUERIES = {
    "one key": sql("select window, k, count(*) from marked group by window(t, '1 minute'), k having k = 1"),
    "some keys": lambda df, _: by_key(df, "k between 1 and 2 or k is null"),
    "key and result": lambda df, _: by_key(df, "k in (0, 1) and n > 1"),
    "key or result": lambda df, _: by_key(df, "k = 1 or n > 2"),
    "null or false": lambda df, _: by_key(df, "null or k < 2"),
    "the window": lambda df, _: by_key(df, "k < 2 and window.start > timestamp'2024-05-01 00:03:00Z'"),
    "a computed key": sql(
        "select * from (select window, k % 2 as odd, max(s) from marked group by window(t, '1 minute'), k % 2)"
        " where odd = 0"
    ),
    "sliding": sql(
        "select window, k, sum(v) from marked group by window(t, '2 minutes', '30 seconds'), k having k = 1"
    ),
    "uneven": sql("select window, k, sum(v) from marked group by window(t, '2 minutes', '50 seconds'), k having k = 1"),
    "sessions": sql(
        "select session_window, k, count(*) from marked group by session_window(t, '20 seconds'), k having k < 2"
    ),
    "median": sql("select window, k, median(v) from marked group by window(t, '1 minute'), k having k = 1"),
    "distinct": lambda df, _: df.withWatermark("t", "1 minute").select("t", "k").distinct().where("k = 1"),
    "deduplicated": lambda df, _: df.withWatermark("t", "1 minute").dropDuplicates(["t", "k"]).where("k = 1"),
    "within": lambda df, _: (
        df.withWatermark("t", "1 minute").dropDuplicatesWithinWatermark(["k", "v"]).select("k", "v").where("k = 1")
    ),
    "chained": lambda df, _: (
        by_key(df, "k = 1").groupBy(F.window(F.window_time("window"), "5 minutes"), "k").agg(F.sum("n").alias("n"))
    ),
    "above a chain": lambda df, _: (
        by_key(df, "true")
        .groupBy(F.window(F.window_time("window"), "5 minutes"), "k")
        .agg(F.sum("n").alias("n"))
        .where("k = 1")
    ),
    "a union": lambda df, _: by_key(df.where("s = 'x'").union(df.where("s = 'y'")), "k = 1"),
    "a function of the user": lambda df, _: by_key(df, "true").where(F.udf(lambda k: k == 1, BooleanType())("k")),
    "a folded condition": lambda df, _: by_key(df, "k = 1 or 1 = 0 and n > 1"),
    "branches": lambda df, _: by_key(df, "case when 1 = 2 then n > 1 else k = 1 end"),
    "equal branches": lambda df, _: by_key(df, "if(n > 0, k = 1, k = 1)"),
    "complements": lambda df, _: by_key(df, "(k = 1 or n > 1) and (k = 1 or n <= 1)"),
    "the current time": lambda df, _: by_key(df, "k = 1 and window.start < now()"),
    "a special date": old_keys,
    "below the time of the batch": lambda df, _: (
        by_key(df, "true").withColumn("past", F.col("window.end") < F.current_timestamp()).where("k = 1")
    ),
    "below a time of the batch that is not used": lambda df, _: (
        by_key(df, "true").withColumn("shown", F.current_timestamp()).where("k = 1").drop("shown")
    ),
    "with the time of the batch": lambda df, _: by_key(df, "k = 1 and window.start < current_timestamp()"),
    "with the time of the batch, in a range": lambda df, _: by_key(
        df, "k < 2 and current_timestamp() between window.start and window.start + interval 100 years"
    ),
    "above the time of the batch": lambda df, _: (
        df.withWatermark("t", "1 minute")
        .withColumn("came", F.current_date())
        .groupBy(F.window("t", "1 minute"), "k")
        .agg(F.count("came"))
        .where("k = 1")
    ),
    "a hint": lambda df, _: by_key(df, "true").hint("broadcast").where("k = 1"),
    "a table": lambda df, s: by_key(df, "true").join(s.range(3).selectExpr("int(id) as k"), "k"),
    "a filtered table": lambda df, s: by_key(df, "true").join(
        s.range(3).selectExpr("int(id) as k").where("k = 1"), "k"
    ),
    "a lateral table": sql(
        f"select * from ({COUNTS}) c, lateral (select id * 2 as m from range(3) r where r.id = c.k) where k < 2"
    ),
    "a lateral expression": sql(f"select * from ({COUNTS}) c, lateral (select c.n + 1 as more) where k = 1"),
    "known to a subquery": sql(
        f"select * from ({COUNTS_BY_PARITY}) c where exists (select 1 from range(1, 3) r where r.id = c.odd)"
    ),
    "among a subquery's rows": sql(
        f"select * from ({COUNTS_BY_PARITY}) c where odd in (select id from range(3) r where r.id * 2 > c.odd)"
    ),
    "below a subquery's result": sql(
        f"select * from ({COUNTS}) c where k <= (select max(id * 2) from range(3) r where r.id = c.k)"
    ),
    "grouped by a subquery": sql(
        f"select window, {TWICE} as m, count(*) from marked group by window(t, '1 minute'), {TWICE} having m > 0"
    ),
    "a result above a subquery's": sql(
        f"select * from ({COUNTS}) c where n > (select max(id * 2) from range(3) r where r.id = c.k)"
    ),
    "known to a table": lambda df, s: by_key(df, "true").join(s.range(2).selectExpr("int(id) as k"), "k", "left_semi"),
    "generated": lambda df, _: (
        df.withWatermark("t", "1 minute")
        .groupBy(F.window("t", "1 minute"), F.when(F.col("k") < 2, F.col("s")).alias("text"))
        .count()
        .select("window", "count", F.explode(F.split("text", "")))
    ),
    "sessions and a table": lambda df, s: (
        df.withWatermark("t", "1 minute")
        .groupBy(F.session_window("t", "20 seconds"), "k")
        .count()
        .join(s.range(2).selectExpr("int(id) as k"), "k")
    ),
    "sliding windows and a table": lambda df, s: (
        df.withWatermark("t", "1 minute")
        .groupBy(F.window("t", "2 minutes", "1 minute"), "k")
        .count()
        .join(s.sql("select timestamp'2024-05-01 00:03:00Z' as start"), F.expr("window.start = start"))
    ),
    "a bound of a sliding window": sql(
        "select window, k, sum(v) from marked group by window(t, '2 minutes', '30 seconds'), k"
        " having window.end is not null and k < 2"
    ),
    "one side or the other": sql(
        "select a.k, a.t, a.v, b.v from (select * from marked where s = 'x') a"
        " left join (select * from marked where s = 'y') b"
        " on a.k = b.k and a.t between b.t - interval 1 minute and b.t + interval 1 minute"
        " and (a.k < 1 and b.v > 2 or b.k < 2)"
    ),
}


RESTARTED = ("one key", "sliding", "sessions", "median", "deduplicated", "within", "chained", "one side or the other")
"""One query of each kind of state: where a filter stands decides nothing about what a restart restores."""


def runs(query: str) -> list[list[pa.Table]]:
    return rounds() if query in RESTARTED else [[table for tables in rounds() for table in tables]]


def joined_windows(df: DataFrame) -> DataFrame:
    left, right = (df.where(f"s = '{name}'").withWatermark("t", "1 minute").alias(name) for name in ("x", "y"))
    return left.join(right, F.expr("x.k = y.k and x.t between y.t - interval 1 minute and y.t")).select(
        F.col("x.k").alias("k"), "x.t", F.col("x.v").alias("one"), F.col("y.v").alias("two")
    )


KNOWN = {
    "windows": lambda df: by_key(df, "true"),
    "a join": joined_windows,
    "deduplicated": lambda df: df.withWatermark("t", "1 minute").dropDuplicates(["t", "k"]).select("t", "k"),
}


@pytest.mark.parametrize("kind", ["left_semi", "left_anti"])
@pytest.mark.parametrize("below", KNOWN)
def test_a_table_that_grows(spark: SparkSession, tmp_path: Path, below: str, kind: str) -> None:
    """Spark moves such joins below what keeps state: rows that a table did not have yet are not in it later either."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        known = len(list((tmp_path / "in").iterdir())) // 2
        return KNOWN[below](df).join(session.range(known).selectExpr("int(id) as k"), "k", kind)

    found = compare(spark, tmp_path, query, "append", rounds(), ddl=DDL)
    assert any(found.values()), "nothing came out"


@pytest.mark.parametrize("query", QUERIES)
def test_append(spark: SparkSession, tmp_path: Path, query: str) -> None:
    found = compare(spark, tmp_path, QUERIES[query], "append", runs(query), ddl=DDL)
    assert any(found.values()), "nothing came out"


@pytest.mark.parametrize(
    "query", ["one key", "key or result", "sliding", "the window", "distinct", "a bound of a sliding window"]
)
def test_update(spark: SparkSession, tmp_path: Path, query: str) -> None:
    compare(spark, tmp_path, QUERIES[query], "update", runs(query), ddl=DDL)


def test_complete(spark: SparkSession, tmp_path: Path) -> None:
    compare(spark, tmp_path, QUERIES["one key"], "complete", rounds(), ddl=DDL)

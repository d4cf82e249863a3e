"""Event time: windows, raw times as keys, chains of them, deduplication; late rows, quiet streams, restarts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.harness import Batches, Query, compare

SCHEMA = pa.schema([("ts", pa.timestamp("us", tz="UTC")), ("k", pa.int32()), ("v", pa.int64()), ("s", pa.string())])
DDL = "ts timestamp, k int, v bigint, s string"
START = dt.datetime(2024, 3, 31, 0, 30, tzinfo=dt.UTC)  # half an hour before European clocks change


def rows(seed: int, count: int, start: float, span: float, nulls: float = 0.05) -> pa.Table:
    """Rows with times in order, roughly, from `start` on for `span` seconds; some far behind, some whole seconds."""
    rng = np.random.default_rng(seed)
    at = start + np.sort(rng.uniform(0, span, count)) + rng.normal(0, span / 8, count)
    at = np.where(rng.random(count) < 0.1, at - 3 * span, at)
    at = np.where(rng.random(count) < 0.3, np.floor(at), at)
    times = [START + dt.timedelta(microseconds=int(second * 1e6)) for second in at]

    def some(values: list[object]) -> list[object]:
        return [None if n < nulls else value for value, n in zip(values, rng.random(count), strict=True)]

    return pa.table(
        {
            "ts": pa.array(some(list(times)), SCHEMA.field("ts").type),
            "k": pa.array(some([int(k) for k in rng.integers(0, 6, count)]), pa.int32()),
            "v": pa.array(some([int(v) for v in rng.integers(-50, 50, count)]), pa.int64()),
            "s": pa.array(some([f"{'value ' * int(n % 4)}{n}" for n in rng.integers(0, 9, count)]), pa.string()),
        },
        schema=SCHEMA,
    )


def rounds() -> list[list[pa.Table]]:
    """Three runs of some batches: times go on, stand still, jump, and one batch is empty."""
    empty = SCHEMA.empty_table()
    return [
        [rows(1, 60, 0, 20), rows(2, 60, 20, 20), rows(3, 40, 25, 20)],
        [rows(4, 60, 60, 30), empty],
        [rows(5, 10, 400, 5), rows(6, 40, 3600, 60), rows(7, 10, 100_000, 10)],
    ]


def marked(df: DataFrame, delay: str = "10 seconds") -> DataFrame:
    return df.withWatermark("ts", delay)


def check(spark: SparkSession, folder: Path, query: Query, mode: str) -> Batches:
    return compare(spark, folder, query, mode, rounds(), ddl=DDL)


def results() -> list[Column]:
    return [
        F.count("*").alias("n"),
        F.sum("v").alias("sum"),
        F.min("s").alias("low"),
        F.max("v").alias("high"),
        F.avg("v").alias("mean"),
        F.collect_set("k").alias("keys"),
    ]


def tumbling(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "k").agg(*results())


def offset(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("s", F.window("ts", "1 minute", startTime="7 seconds")).agg(*results())


def sliding(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(*results())


def sliding_offset(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("k", "s", F.window("ts", "10 seconds", "2 seconds", "1 second")).agg(*results())


def uneven(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("k", F.window("ts", "10 seconds", "4 seconds")).agg(*results())


def windows_only(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds")).agg(*results())


def sliding_only(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds", "5 seconds")).agg(*results())


def instants(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("ts", "k").agg(*results())


def days(df: DataFrame, session: SparkSession) -> DataFrame:
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    return marked(df).groupBy(F.window("ts", "1 day"), "k").agg(*results())


def renamed(df: DataFrame, session: SparkSession) -> DataFrame:
    return session.sql(
        "select w.end as stop, w.start as begin, g, count(*) + 1 as n from"
        " (select window(ts, '10 seconds') as w, k % 2 as g from {df}) group by w, g having count(*) > 1",
        df=marked(df),
    )


def distinct_text(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "s").agg(F.collect_set("v"), F.approx_count_distinct("v"))


def chained(df: DataFrame, session: SparkSession) -> DataFrame:
    counts = marked(df).groupBy(F.window("ts", "5 seconds"), "k").agg(F.count("*").alias("n"))
    return counts.groupBy(F.window(F.window_time("window"), "20 seconds")).agg(F.max("n"), F.sum("n"))


def same_window(df: DataFrame, session: SparkSession) -> DataFrame:
    counts = marked(df).groupBy(F.window("ts", "20 seconds", "10 seconds"), "k").agg(F.count("*").alias("n"))
    return counts.groupBy("window").agg(F.max("n"), F.sum("n"))


CLOSING = [tumbling, offset, sliding, sliding_offset, uneven, windows_only, sliding_only, instants, days, renamed]


@pytest.mark.parametrize("query", [*CLOSING, distinct_text, chained, same_window], ids=lambda query: query.__name__)
def test_append(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    found = check(spark, tmp_path, query, "append")
    assert any(found.values()), "no window ever closed"


@pytest.mark.parametrize("query", CLOSING, ids=lambda query: query.__name__)
def test_update(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    check(spark, tmp_path, query, "update")


@pytest.mark.parametrize("query", [tumbling, sliding, instants], ids=lambda query: query.__name__)
def test_complete(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    check(spark, tmp_path, query, "complete")


def first_rows(*keys: str) -> Query:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        # Which row of a key is the first one, Spark does not say: all that is shown has to be the key's.
        return (
            marked(df).select(*keys).dropDuplicates()
            if "ts" in keys
            else marked(df).dropDuplicates([*keys]).select(*keys)
        )

    return query


@pytest.mark.parametrize("keys", [("ts", "k"), ("ts",), ("k", "s")], ids="-".join)
@pytest.mark.parametrize("mode", ["append", "update"])
def test_deduplication(spark: SparkSession, tmp_path: Path, keys: tuple[str, ...], mode: str) -> None:
    check(spark, tmp_path, first_rows(*keys), mode)

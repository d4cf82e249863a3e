"""`foreachBatch` functions that use the batch as people do: more than once, from threads, from a cache."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from tests.differential.data import batch, write
from tests.differential.harness import Batches, assert_equal, plain, run, stream

BATCHES = 3


def counts(session: SparkSession, folder: Path) -> DataFrame:
    return stream(session, folder).groupBy("k").agg(F.count("*"), F.sum("i32"), F.max("s"))


def in_two_actions(df: DataFrame) -> list[Any]:
    return df.filter("k % 2 = 0").collect() + df.filter("k % 2 = 1 or k is null").collect()


def in_threads(df: DataFrame) -> list[Any]:
    """Tasks of user threads know no batch id."""
    parts = [df.filter("k % 2 = 0"), df.filter("k % 2 = 1"), df.filter("k is null")]
    with ThreadPoolExecutor(3) as pool:
        return [row for rows in pool.map(DataFrame.collect, parts) for row in rows]


def persisted(df: DataFrame) -> list[Any]:
    """Once it is all there, `first()` and `limit()` do no harm."""
    df.persist()
    try:
        return df.collect() if df.count() and df.first() and df.limit(1).collect() else []
    finally:
        df.unpersist()


def after_is_empty(df: DataFrame) -> list[Any]:
    return [] if df.isEmpty() else df.collect()


@pytest.mark.parametrize("use", [in_two_actions, in_threads, persisted, after_is_empty])
def test_rows_are_sparks(spark: SparkSession, tmp_path: Path, use: Any) -> None:
    for number in range(BATCHES):
        write(tmp_path / "in", number, batch(number, 40))
    native, ours = spark.newSession(), spark.newSession()
    expected: Batches = {}
    run(counts(native, tmp_path / "in"), "update", tmp_path / "native", ours=False, into=expected)
    actual: Batches = {}

    def keep(df: DataFrame, number: int) -> None:
        actual[number] = [plain(row) for row in use(df)]

    writer = millpond.writeStream(counts(ours, tmp_path / "in")).outputMode("update").foreachBatch(keep)
    writer.option("checkpointLocation", str(tmp_path / "ours")).trigger(availableNow=True).start().awaitTermination()
    assert_equal(actual, expected)

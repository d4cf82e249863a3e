"""`foreachBatch` functions that use the batch as people do: more than once, from threads, from a cache."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.query.running.session_settings import PLANNING_SETTINGS
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


def test_queries_started_in_a_function_run_as_anywhere(spark: SparkSession, tmp_path: Path) -> None:
    for number in range(BATCHES):
        write(tmp_path / "in", number, batch(number, 40))

    def windows(session: SparkSession) -> DataFrame:
        return stream(session, tmp_path / "in").withWatermark("ts", "1 second").groupBy(F.window("ts", "5 seconds"))

    def chained(session: SparkSession) -> DataFrame:
        by_time = windows(session).count()
        return by_time.groupBy(F.window(F.window_time("window"), "1 minute")).agg(F.sum("count"))

    def inside(ours: bool) -> tuple[list[Any], Batches, list[str]]:
        settings: list[Any] = []
        found: Batches = {}
        refused = []

        def keep(df: DataFrame, number: int) -> None:
            df.collect()
            if number:
                return
            settings.extend(df.sparkSession.conf.get(name, None) for name in PLANNING_SETTINGS)
            run(chained(df.sparkSession), "append", tmp_path / f"inner {ours}", ours=False, into=found)
            twice = counts(df.sparkSession, tmp_path / "in").groupBy("count(1)").count()
            try:
                twice.writeStream.format("noop").outputMode("update").start()
            except AnalysisException as error:
                refused.append(str(error.getCondition()))

        df = windows(spark.newSession()).count()
        writer = (millpond.writeStream(df) if ours else df.writeStream).outputMode("append").foreachBatch(keep)
        writer.option("checkpointLocation", str(tmp_path / f"outer {ours}")).trigger(availableNow=True)
        writer.start().awaitTermination()
        return settings, found, refused

    (settings, found, refused), (_, expected, expected_refusal) = inside(True), inside(False)
    assert set(settings) == {None}, "as the user has set them: not at all"
    assert_equal(found, expected)
    assert refused == expected_refusal
    assert refused
    assert any(found.values())

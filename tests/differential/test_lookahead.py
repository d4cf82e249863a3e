"""Stages that announce keys change no row: wherever they stand, whatever they name, and whether they are right."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType

import millpond
from tests.differential.harness import Query, compare
from tests.differential.test_filters import DDL, rounds
from tests.support.hint_requests import requesting_hints

NAMES = ("lookahead(k)", "exchange", "lookahead(k) #2", "lookahead(k, v)", "lookahead(s)")


def marked(df: DataFrame) -> DataFrame:
    return df.withWatermark("t", "1 minute")


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def other(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keys that the stage below has not seen."""
    for batch in batches:
        keys = [None if key is None else 5 - key for key in batch.column("k").to_pylist()]
        yield batch.set_column(1, "k", pa.array(keys, pa.int32()))


@F.udf(IntegerType())
def next_key(key: int | None) -> int | None:
    return None if key is None else key + 1


def ahead(df: DataFrame, *columns: str) -> DataFrame:
    return millpond.lookahead(df, *(columns or ("k",)))


def joined(df: DataFrame, kind: str) -> DataFrame:
    left = ahead(marked(df).where("s = 'x'")).alias("l")
    right = ahead(marked(df)).where("s = 'y'").alias("r")
    near = "l.k = r.k and l.t between r.t - interval 1 minute and r.t + interval 1 minute"
    return left.join(right, F.expr(near), kind).select("l.k", "l.t", "l.v", F.col("r.v").alias("w"))


def sql(df: DataFrame, session: SparkSession) -> DataFrame:
    ahead(df, "K").createOrReplaceTempView("staged")
    return session.sql(
        "with some as (select a.k, a.v from staged a where a.v > 2)"
        " select k, count(*) n from some group by k having k < 4"
    )


UPDATE: dict[str, Query] = {
    "a filter that Spark moves below the watermark": lambda df, _: (
        ahead(marked(df)).where("k = 1").groupBy(F.window("t", "1 minute"), "k").count()
    ),
    "a filter on groups": lambda df, _: (
        ahead(marked(df)).groupBy("k", F.window("t", "1 minute")).count().where("k = 1")
    ),
    "a function of the user": lambda df, _: (
        ahead(df).withColumn("u", next_key("v")).where("u > 3").groupBy("k").agg(F.sum("u"))
    ),
    "a key that a function makes": lambda df, _: ahead(df).withColumn("k", next_key("k")).groupBy("k").count(),
    "a function of batches": lambda df, _: ahead(df).mapInArrow(same, df.schema).groupBy("k").count(),
    "a function that gives other keys": lambda df, _: ahead(df).mapInArrow(other, df.schema).groupBy("k").count(),
    "a computed key": lambda df, _: ahead(df, "k", "v").groupBy(F.expr("k * 7 + v div 2").alias("key")).agg(F.max("s")),
    "a key that most rows do not have": lambda df, _: (
        ahead(df, "s").where("s is null").groupBy(F.expr("cast(coalesce(s, '4') as int) + 1").alias("n")).count()
    ),
    "a key that cannot be computed": lambda df, _: (
        ahead(df, "k").where("k <> 2").groupBy(F.expr("12 div (k - 2)").alias("n")).agg(F.expr("sum(12 div (k - 2))"))
    ),
    "two stages": lambda df, _: ahead(ahead(df).withColumn("u", next_key("v"))).groupBy("k").agg(F.sum("u")),
    "no operator's key": lambda df, _: ahead(df, "s").groupBy("k").count(),
    "a stage below an operator for one above": lambda df, _: (
        ahead(df, "k").dropDuplicates(["k", "v"]).groupBy("k").agg(F.count("s"))
    ),
    "a union": lambda df, _: ahead(df).union(df.where("v > 5")).union(ahead(df, "k", "v")).groupBy("k").count(),
    "deduplicated": lambda df, _: ahead(df).dropDuplicates(["k", "v"]).where("v <> 4"),
    "distinct": lambda df, _: ahead(df).select("k", "s").distinct(),
    "a table": lambda df, s: ahead(df).join(s.range(4).selectExpr("int(id) as k"), "k").groupBy("k").count(),
    "exploded": lambda df, _: (
        ahead(df, "s").select(F.explode(F.array("s", F.lit("z"))).alias("s"), "k").groupBy("s").agg(F.sum("k"))
    ),
    "sql": sql,
}
APPEND: dict[str, Query] = {
    "an inner join": lambda df, _: joined(df, "inner"),
    "an outer join": lambda df, _: joined(df, "left_outer"),
    "windows": lambda df, _: ahead(marked(df)).groupBy(F.window("t", "1 minute"), "k").agg(F.sum("v")),
    "a filter that Spark moves below the watermark": lambda df, _: (
        ahead(marked(df)).where("k < 3").groupBy(F.window("t", "1 minute"), "k").count()
    ),
    "sessions": lambda df, _: (
        ahead(marked(df)).groupBy(F.session_window("t", "20 seconds"), "k").count().where("k < 2")
    ),
    "deduplicated": lambda df, _: ahead(marked(df)).where("k < 4").dropDuplicates(["t", "k"]),
    "within": lambda df, _: ahead(marked(df)).dropDuplicatesWithinWatermark(["k", "v"]).select("k", "v").where("k = 1"),
    "a chain": lambda df, _: (
        ahead(marked(df).where("v > 0"))
        .groupBy(F.window("t", "1 minute"), "k")
        .agg(F.count("*").alias("n"))
        .groupBy(F.window(F.window_time("window"), "5 minutes"), "k")
        .agg(F.sum("n").alias("n"))
    ),
}


@pytest.fixture(scope="module", autouse=True)
def own_slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Slots that no other tests have: these here are set to ask for hints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("slots")))
        yield


@pytest.mark.parametrize("query", UPDATE)
def test_update(spark: SparkSession, tmp_path: Path, query: str) -> None:
    with requesting_hints(NAMES):
        found = compare(spark, tmp_path, UPDATE[query], "update", rounds(), ddl=DDL, slots="2")
    assert any(found.values()), "nothing came out"


@pytest.mark.parametrize("query", APPEND)
def test_append(spark: SparkSession, tmp_path: Path, query: str) -> None:
    with requesting_hints(NAMES):
        found = compare(spark, tmp_path, APPEND[query], "append", rounds(), ddl=DDL, slots="2")
    assert any(found.values()), "nothing came out"


@pytest.mark.parametrize("query", UPDATE)
def test_spark_alone_does_nothing(spark: SparkSession, query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = spark.createDataFrame([], DDL)
    with_stages = UPDATE[query](rows, spark)._jdf.queryExecution().optimizedPlan().canonicalized()
    monkeypatch.setattr(millpond, "lookahead", lambda df, *columns: df)
    without = UPDATE[query](rows, spark)._jdf.queryExecution().optimizedPlan().canonicalized()
    assert with_stages.equals(without)

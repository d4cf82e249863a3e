from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.decide import decide
from millpond.plan.explain import as_dict, as_text
from millpond.plan.replay.repeatable import needs_sync


def reason(df: DataFrame, mode: str = "update") -> str | None:
    return needs_sync(decide(df, mode))


def test_plain_queries_may_lag(stream: DataFrame, spark: SparkSession) -> None:
    assert reason(stream.groupBy("k").agg(F.first("s"), F.collect_list("v"), F.current_timestamp())) is None
    assert reason(spark.readStream.format("rate").load().groupBy("value").count()) is None
    assert reason(stream.dropDuplicates(["k"]).withColumn("r", F.rand()), "append") is None
    logged = "ts > current_timestamp() - interval 1 day and date(ts) <= current_date"
    assert reason(stream.where(logged).groupBy("k").count()) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda df: df.withColumn("r", F.rand()).groupBy("k").agg(F.sum("r")), "not deterministic"),
        (lambda df: df.filter("uuid() > 'a'").dropDuplicates(["k"]), "not deterministic"),
        (lambda df: df.where("ts > now() - interval 10 minutes").groupBy("k").count(), "reads the clock"),
        (lambda df: df.where("date(ts) >= 'today'").groupBy("k").count(), "reads the clock"),
        (lambda df: df.where("ts >= '09:00'").groupBy("k").count(), "reads the clock"),
        (lambda df: df.where("ts > (select now() - interval 10 minutes)").groupBy("k").count(), "reads the clock"),
        (lambda df: df.where("ts > (select current_timestamp())").groupBy("k").count(), "reads the clock"),
        (lambda df: df.sample(0.5).groupBy("k").count(), "sample"),
    ],
)
def test_nondeterministic_plans(stream: DataFrame, make: object, words: str) -> None:
    assert words in str(reason(make(stream)))  # type: ignore[operator]


def test_sources_that_forget(spark: SparkSession, tmp_path: Path) -> None:
    cleaning = spark.readStream.schema("k int").option("cleanSource", "delete").parquet(str(tmp_path))
    assert "cleanSource" in str(reason(cleaning.groupBy("k").count()))
    socket = spark.readStream.format("socket").option("host", "localhost").option("port", 9).load()
    assert "socket" in str(reason(socket.groupBy("value").count()))


def test_batch_tables_that_may_change(spark: SparkSession, stream: DataFrame, tmp_path: Path) -> None:
    spark.range(3).write.parquet(str(tmp_path / "table"))
    table = spark.read.parquet(str(tmp_path / "table"))
    joined = stream.join(table, F.col("k") == F.col("id"))
    assert "batch table with columns id may change" in str(reason(joined.groupBy("k").count()))
    assert reason(stream.groupBy("k").count().join(table, F.col("k") == F.col("id"))) is None
    assert reason(stream.join(spark.range(3), F.col("k") == F.col("id")).groupBy("k").count()) is None


def test_window_functions_over_a_table(spark: SparkSession, stream: DataFrame) -> None:
    ranked = spark.range(3).selectExpr("id", "row_number() over (order by id) n", "max(id) over (partition by id) m")
    assert reason(stream.join(ranked, F.col("k") == F.col("id")).groupBy("k").count()) is None


def test_subqueries_over_tables_that_may_change(spark: SparkSession, stream: DataFrame, tmp_path: Path) -> None:
    spark.range(3).write.parquet(str(tmp_path / "table"))
    spark.read.parquet(str(tmp_path / "table")).createOrReplaceTempView("looked_up")
    known = stream.where("k in (select id from looked_up)").groupBy("k").count()
    assert "batch table with columns id may change" in str(reason(known))
    assert reason(stream.where("k in (select id from range(3))").groupBy("k").count()) is None
    assert reason(stream.groupBy("k").count().where("count > (select max(id) from looked_up)")) is None


def test_explain(stream: DataFrame) -> None:
    df = stream.dropDuplicates(["k"]).groupBy("k").agg(F.expr("percentile(d, 0.5)"), F.sum("v"))
    data = as_dict(decide(df, "update"))
    assert data["commit_mode"] == "async"
    first, second = data["operators"]
    assert (first["engine"], first["index"], first["keys"]) == ("millpond", 0, ["k: int"])
    assert first["store"] == "read-modify-write"
    assert second["reason"]["code"] == "MP-WHOLE"
    text = as_text(decide(df, "update"))
    assert "[millpond 0] deduplicate by k" in text
    assert "MP-WHOLE: percentile needs all rows" in text
    assert as_text(decide(stream.select("k"), "append")).startswith("no stateful operators")

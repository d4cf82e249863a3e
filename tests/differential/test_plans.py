"""Stateful operators wherever they may stand in a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.data import DDL, batch
from tests.differential.harness import Query, compare


def sql(text: str) -> Query:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        df.createOrReplaceTempView("events")
        return session.sql(text)

    return query


def names(session: SparkSession) -> DataFrame:
    return session.sql("select * from values (1, 'one'), (2, 'two'), (3, null) as t(id, name)")


def python_udf(df: DataFrame, session: SparkSession) -> DataFrame:
    double = F.udf(lambda value: None if value is None else value * 2, "int")
    return df.groupBy(double("k").alias("kk")).agg(F.sum(double("i32")).alias("t"))


def idle_union(df: DataFrame, session: SparkSession) -> DataFrame:
    idle = session.readStream.schema(DDL).parquet(str(Path(session.conf.get("spark.sql.warehouse.dir"), "idle")))
    return df.groupBy("k").count().union(idle.groupBy("k").count())


QUERIES: dict[str, tuple[Query, str]] = {
    "global": (lambda df, _: df.agg(F.count("*"), F.sum("i64"), F.max("s"), F.avg("f64")), "update"),
    "global complete": (lambda df, _: df.agg(F.count("*"), F.min("dec38"), F.collect_set("k")), "complete"),
    "global of nothing": (lambda df, _: df.filter("k > 1000").agg(F.count("*"), F.sum("k")), "update"),
    "no functions": (lambda df, _: df.groupBy("k", "b").agg(F.lit(1).alias("one")), "update"),
    "a constant among the keys": (
        sql("select k, 1 one, round(avg(i32), 1) r, regexp_replace(max(s), 'a', 'b') t from events group by k, one"),
        "update",
    ),
    "select distinct": (sql("select distinct k, st from events"), "update"),
    "select distinct complete": (sql("select distinct f64, s from events"), "complete"),
    "rollup": (sql("select k, b, count(*), sum(i32) from events group by rollup(k, b)"), "update"),
    "cube": (sql("select k % 2, b, grouping_id(), max(s) from events group by cube(k % 2, b)"), "complete"),
    "having": (sql("select k, sum(i32) as t from events group by k having count(*) > 3 and t is not null"), "update"),
    "subquery": (sql("select n + 1, s from (select s, count(*) as n from events group by s) where n > 2"), "update"),
    "cte": (
        sql("with c as (select k, b, i32 from events where i32 > 0) select k, max(i32) from c group by k"),
        "update",
    ),
    "cte read twice": (
        sql(
            "with c as (select k, count(*) as n from events group by k) select k, n from c union all select n, k from c"
        ),
        "update",
    ),
    "static join above": (
        lambda df, s: df.groupBy("k").agg(F.sum("i32").alias("t")).join(names(s), F.col("k") == F.col("id"), "left"),
        "update",
    ),
    "static join below": (
        lambda df, s: df.join(names(s), F.col("k") == F.col("id")).groupBy("name").agg(F.count("*"), F.max("i64")),
        "update",
    ),
    "batch aggregate beside": (
        lambda df, s: (
            df.join(names(s).groupBy("id").agg(F.count("*").alias("c")), F.col("k") == F.col("id"))
            .groupBy("c")
            .agg(F.sum("i32"))
        ),
        "update",
    ),
    "in subquery": (sql("select s, count(*) from events where k in (select id from range(3)) group by s"), "update"),
    "two aggregates": (
        lambda df, _: (
            df.groupBy("k")
            .agg(F.count("*").alias("n"))
            .unionByName(df.groupBy(F.col("i8").cast("int").alias("k")).agg(F.count("*").alias("n")))
        ),
        "update",
    ),
    "two aggregates, complete": (
        lambda df, _: df.groupBy("b").agg(F.sum("i32").alias("n")).union(df.groupBy(F.col("k") > 2).agg(F.sum("i32"))),
        "complete",
    ),
    "idle source": (idle_union, "update"),
    "union below": (lambda df, _: df.select("k", "i32").union(df.select("i32", "k")).groupBy("k").count(), "update"),
    "deduplicated, then aggregated": (
        lambda df, _: (
            df.select("k", "s", "b").dropDuplicates(["k", "s", "b"]).groupBy("k").agg(F.count("*"), F.max("s"))
        ),
        "update",
    ),
    "deduplicated, complete": (lambda df, _: df.select("k", "s").distinct().groupBy("s").count(), "complete"),
    "aggregated, then deduplicated": (
        lambda df, _: df.groupBy("k").agg(F.count("*").alias("n")).dropDuplicates(["n"]).select("n"),
        "update",
    ),
    "deduplicated twice": (
        lambda df, _: df.select("k", "s").dropDuplicates().select("s").dropDuplicates(),
        "append",
    ),
    "explode": (
        lambda df, _: df.select(F.explode(F.split("s", "-")).alias("word")).groupBy("word").count(),
        "update",
    ),
    "limited, complete": (
        lambda df, _: df.groupBy("s").agg(F.sum("i32").alias("t")).limit(2).select(F.lit(1)),
        "complete",
    ),
    "sorted, complete": (
        lambda df, _: df.groupBy("s").agg(F.sum("i32").alias("t")).orderBy("s").limit(3),
        "complete",
    ),
    "sorted, then selected, complete": (
        lambda df, _: df.groupBy("s").agg(F.sum("i32").alias("t")).orderBy("s").select("t").limit(3),
        "complete",
    ),
    "python udf": (python_udf, "update"),
    "awkward names": (
        lambda df, _: (
            df.select(F.col("k").alias("a.b"), F.col("i32").alias("__hash"), F.col("s").alias("call0"))
            .groupBy("`a.b`", "call0")
            .agg(F.max("__hash").alias("__mark"), F.count("*").alias("__figure"))
        ),
        "update",
    ),
    "names of inputs": (
        lambda df, _: (
            df.select(F.col("k").alias("Input0"), F.col("s").alias("input1"), "i32")
            .groupBy("Input0", "input1")
            .agg(F.sum("i32"), F.max("i32"), F.count("input1"))
        ),
        "update",
    ),
    "equal names": (
        lambda df, _: df.select("k", F.col("i8").cast("int").alias("K"), "s").distinct().select("s"),
        "append",
    ),
    "struct results": (
        lambda df, _: df.groupBy("k").agg(F.struct(F.max("i32"), F.min("s")).alias("both"), F.first("k").alias("f")),
        "update",
    ),
    "watermark beside": (
        lambda df, _: df.withWatermark("ts", "1 hour").groupBy("k").agg(F.count("*").alias("n")),
        "update",
    ),
}


@pytest.mark.parametrize("name", QUERIES)
def test_plan(spark: SparkSession, tmp_path: Path, name: str) -> None:
    query, mode = QUERIES[name]
    seed = sum(map(ord, name))
    Path(str(spark.conf.get("spark.sql.warehouse.dir")).removeprefix("file:"), "idle").mkdir(
        parents=True, exist_ok=True
    )
    rounds = [[batch(seed, 40), batch(seed + 1, 0)], [batch(seed + 2, 30)]]
    compare(spark, tmp_path, query, mode, rounds)


def test_many_distinct_values(spark: SparkSession, tmp_path: Path) -> None:
    """Enough for every range of the sketch: linear counting, bias correction, raw estimate."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        many = df.select("k", F.explode(F.sequence(F.lit(1), F.col("k") * F.col("k") * 300)).alias("x"))
        return many.groupBy("k").agg(
            F.approx_count_distinct("x").alias("usual"),
            F.approx_count_distinct("x", 0.2).alias("coarse"),
            F.approx_count_distinct(F.col("x").cast("string"), 0.01).alias("fine"),
        )

    compare(spark, tmp_path, query, "update", [[batch(3, 20, once=True)]])


def test_many_keys(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        many = df.select("i32", F.explode(F.sequence(F.lit(1), F.col("k") * 500)).alias("x"))
        return many.groupBy((F.col("x") * 7919 % 10007).alias("key")).agg(F.count("*"), F.sum("i32"), F.max("x"))

    compare(spark, tmp_path, query, "update", [[batch(3, 30, once=True)], [batch(4, 40, once=True)]])

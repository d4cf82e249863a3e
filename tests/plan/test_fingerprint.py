from collections.abc import Callable
from itertools import combinations

import pandas as pd
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.plan.replay.fingerprint import fingerprint

COUNTS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "plain": lambda df: df.groupBy("k").agg(F.sum("v")),
    "another input": lambda df: df.groupBy("k").agg(F.sum(F.col("v") * 2)),
    "another key": lambda df: df.groupBy((F.col("k") % 2).alias("k")).agg(F.sum("v")),
    "filter": lambda df: df.where("v > 1").groupBy("k").agg(F.sum("v")),
    "another constant": lambda df: df.where("v > 2").groupBy("k").agg(F.sum("v")),
    "two of one kind": lambda df: df.where("v > 2").where("d > 2").groupBy("k").agg(F.sum("v")),
    "columns changed places": lambda df: df.where("d > 2").where("v > 2").groupBy("k").agg(F.sum("v")),
    "text": lambda df: df.where("s = 'type_1'").groupBy("k").agg(F.sum("v")),
    "another text": lambda df: df.where("s = 'type_2'").groupBy("k").agg(F.sum("v")),
    "lambda": lambda df: df.where(F.exists("arr", lambda x: x > 1)).groupBy("k").agg(F.sum("v")),
    "another lambda": lambda df: df.where(F.exists("arr", lambda x: x > 2)).groupBy("k").agg(F.sum("v")),
    "function": lambda df: df.withColumn("v", F.udf(lambda v: v, "bigint")("v")).groupBy("k").agg(F.sum("v")),
    "another function": lambda df: (
        df.withColumn("v", F.udf(lambda v: v + 1, "bigint").asNondeterministic()("v")).groupBy("k").agg(F.sum("v"))
    ),
    "watermark": lambda df: df.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 hour")).count(),
    "another delay": lambda df: df.withWatermark("ts", "2 minutes").groupBy(F.window("ts", "1 hour")).count(),
    "table": lambda df: (
        df.join(df.sparkSession.range(5).withColumnRenamed("id", "k"), "k").groupBy("k").agg(F.sum("v"))
    ),
    "outer": lambda df: (
        df.join(df.sparkSession.range(5).withColumnRenamed("id", "k"), "k", "left").groupBy("k").agg(F.sum("v"))
    ),
}


def digest(df: DataFrame) -> str:
    return fingerprint(Catalyst(df.sparkSession), decide(df, "update"))


@pytest.mark.parametrize("name", COUNTS)
def test_a_query_written_again_is_the_same(stream: DataFrame, name: str) -> None:
    first, second = (digest(COUNTS[name](stream)) for _ in range(2))
    assert first == second


def test_what_stands_above_does_not_matter(stream: DataFrame) -> None:
    counts = stream.groupBy("k").agg(F.sum("v").alias("s"))
    above = counts.where("s > 3").select(F.col("s") + 1)
    assert digest(counts) == digest(above)


def test_other_queries_are_others(stream: DataFrame) -> None:
    found = {name: digest(make(stream)) for name, make in COUNTS.items()}
    assert all(found[one] != found[other] for one, other in combinations(COUNTS, 2)), found


@pytest.mark.parametrize("asks", [True, False])
def test_the_time_zone_counts_where_it_is_asked_for(stream: DataFrame, asks: bool) -> None:
    session, found = stream.sparkSession, set()
    try:
        for zone in ("UTC", "Asia/Tokyo"):
            session.conf.set("spark.sql.session.timeZone", zone)
            key = F.col("ts").cast("date" if asks else "timestamp")
            found.add(digest(stream.groupBy(key).agg(F.sum("v"))))
    finally:
        session.conf.set("spark.sql.session.timeZone", "UTC")
    assert len(found) == 1 + asks


def test_the_code_of_functions_over_groups_counts(stream: DataFrame) -> None:
    if tuple(map(int, stream.sparkSession.version.split(".")[:2])) < (4, 3):
        pytest.skip("functions over groups stay on Spark before 4.3")

    def largest(v: pd.Series) -> int:
        return int(v.max()) + more

    found = []
    for more in (0, 1, 1):  # noqa: B007 (the function reads it)
        windows = stream.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 hour"))
        decision = decide(windows.agg(F.pandas_udf(largest, "bigint")("v")), "append")
        assert decision.specs
        found.append(fingerprint(Catalyst(stream.sparkSession), decision))
    assert found[0] != found[1] == found[2]

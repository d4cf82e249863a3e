"""Queries that have changed at a restart in what their state does not hold: Spark goes on, and so has Millpond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.processors.checks import Turn, compare, script, values

Query = Callable[[DataFrame], DataFrame]


def _marked(df: DataFrame, delay: str = "4 seconds") -> DataFrame:
    return df.withWatermark("ts", delay)


def _joined(df: DataFrame) -> DataFrame:
    left = _marked(df.select("k", "ts"))  # in this order: the state has the columns as they stand
    right = left.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"))
    return left.join(right, F.expr("k = k2 and ts2 between ts and ts + interval 5 seconds")).select("k", "ts2")


QUERIES: dict[str, Query] = {
    "keys": lambda df: df.dropDuplicates(["k"]).select("k", "ts"),
    "keys with a watermark beside": lambda df: _marked(df).dropDuplicates(["k"]),
    "keys with event time": lambda df: _marked(df).dropDuplicates(["k", "ts"]),
    "within the watermark": lambda df: _marked(df).dropDuplicatesWithinWatermark(["k"]),
    "below an aggregate": lambda df: (
        _marked(df).dropDuplicates(["k", "ts"]).groupBy(F.window("ts", "5 seconds"), "k").count()
    ),
    "join": _joined,
}


@pytest.mark.parametrize("name", QUERIES)
def test_columns_that_are_not_in_the_state_come_and_go(spark: SparkSession, tmp_path: Path, name: str) -> None:
    def query(*columns: str) -> Query:
        def of(df: DataFrame) -> DataFrame:
            made = QUERIES[name](df.select(*columns))
            return made.select(*(column for column in made.columns if column not in ("do", "n")))

        return of

    tables = [
        script(("a", "x", 1), ("b", "x", 2)),
        script(("a", "y", 1), ("a", "y", 3), ("c", "y", 3), ("c", "y", 3)),
        script(("a", "z", 3), ("c", "z", 9), ("d", "z", 20)),
        script(("a", "z", 21), ("d", "z", 20), ("e", "z", 60)),
    ]
    turns = [
        Turn(query("k", "ts"), tables[:1], mode="append"),
        Turn(query("do", "k", "n", "ts"), tables[1:2], mode="append"),
        Turn(query("ts", "n", "k"), tables[2:], mode="append"),
    ]
    assert sum(map(len, values(compare(spark, tmp_path, turns)))) > 3

"""Inputs at the edges: long strings, the first and last times, odd names, deep types, empty strings beside nulls."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.harness import compare

FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
LONG = 1_500_000


def odd(number: int) -> pa.Table:
    words = ["", None, "a", " ", "A", "\0"]
    times = [-(2**63), 2**63 - 1, FIRST, LAST, 0, -1, None, FIRST + 1, 1_700_000_000_000_000]
    rows = range(number, number + 18)
    return pa.table(
        {
            "a.b": pa.array([n % 3 for n in rows], pa.int32()),
            "`x`": pa.array([words[n % 6] for n in rows]),
            "ü 🦆": pa.array([n * 7 for n in rows], pa.int64()),
            "t": pa.array([times[n % 9] for n in rows], pa.timestamp("us", tz="UTC")),
            "deep": pa.array(
                [{"m": [(words[n % 5] or "k", [{"p q": n, "z": words[n % 6]}])]} if n % 4 else None for n in rows],
                pa.struct(
                    [("m", pa.map_(pa.string(), pa.list_(pa.struct([("p q", pa.int64()), ("z", pa.string())]))))]
                ),
            ),
        }
    )


DDL = (
    "`a.b` int, ```x``` string, `ü 🦆` bigint, t timestamp,"
    " deep struct<m:map<string,array<struct<`p q`:bigint,z:string>>>>"
)
QUERIES = {
    "names": "select `a.b`, ```x``` as `e.f`, sum(`ü 🦆`) as `s p`, count(```x```) n from odd group by `a.b`, ```x```",
    "empty and null": "select ```x``` k, count(*) n, min(```x```) a, max(`a.b`) b from odd group by ```x```",
    "times": "select unix_micros(t) u, count(*) n, sum(`ü 🦆`) s from odd group by t",
    "extremes": "select `a.b` k, unix_micros(min(t)) a, unix_micros(max(t)) b, count(t) n from odd group by `a.b`",
    "no columns": "select count(*) n from (select 1 from odd)",
}


@pytest.mark.parametrize("name", QUERIES)
def test_odd_columns(spark: SparkSession, tmp_path: Path, name: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        df.createOrReplaceTempView("odd")
        return session.sql(QUERIES[name])

    compare(spark, tmp_path, query, "update", [[odd(0), odd(5)]], ddl=DDL)


def test_deep_values(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.dropDuplicates(["ü 🦆"]).drop("t").withColumn("deep", F.to_json("deep"))

    compare(spark, tmp_path, query, "append", [[odd(0), odd(5)]], ddl=DDL)


def test_long_strings(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.groupBy("s").agg(F.max("v").alias("m"), F.collect_set("v").alias("l"), F.count("*").alias("n"))

    tables = [
        pa.table({"s": ["a" * LONG, "b" * LONG, "a" * LONG], "v": ["x" * LONG + str(n), "y" * LONG, None]})
        for n in range(2)
    ]
    compare(spark, tmp_path, query, "update", [[tables[0]], [tables[1]]], ddl="s string, v string")

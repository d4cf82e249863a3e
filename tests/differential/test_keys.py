"""Every type as a key, alone, together, nested and computed; and deduplication by them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.data import batch
from tests.differential.harness import ZEROS_DIFFER, Query, compare

ATOMIC = ["b", "i8", "i16", "i32", "i64", "f32", "f64", "dec9", "dec18", "dec38", "s", "bin", "d", "ts", "tsn"]


def grouped(*keys: str) -> Query:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.groupBy(*[F.expr(key).alias(f"key{i}") for i, key in enumerate(keys)]).agg(
            F.count("*").alias("n"), F.sum("i32").alias("t"), F.max("s").alias("m")
        )

    return query


GROUPINGS = {
    **{f"{name}": (name,) for name in ATOMIC},
    "struct": ("st",),
    "nested struct": ("named_struct('in', st, 'k', k % 2, 'f', f64)",),
    "odd field names": (
        "named_struct('first name', s, 'a:int,b', k, 'x`y', i8, 'not', named_struct('', b), 'ä>', f32)",
    ),
    "field names but for case": ("named_struct('id', k, 'ID', i8)",),
    "two": ("k", "s"),
    "many": tuple(ATOMIC),
    "computed": ("k % 3", "substring(s, 1, 2)", "i64 > 0"),
    "null": ("cast(null as int)",),
    "constant": ("1", "k"),
    "floats": ("case when k % 3 = 0 then -0.0D when k % 3 = 1 then 0.0D else double('nan') end",),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_grouping(spark: SparkSession, tmp_path: Path, name: str) -> None:
    seed = sum(map(ord, name))
    batches = [batch(seed, 60), batch(seed + 1, 50)]
    # A key of each type is restored in the restart of "many".
    rounds = [batches] if name in ATOMIC else [batches[:1], batches[1:]]
    compare(spark, tmp_path, grouped(*GROUPINGS[name]), "update", rounds)


@pytest.mark.parametrize("name", ["struct", "many", "two"])
def test_complete_grouping(spark: SparkSession, tmp_path: Path, name: str) -> None:
    seed = sum(map(ord, name))
    compare(spark, tmp_path, grouped(*GROUPINGS[name]), "complete", [[batch(seed, 40)], [batch(seed + 1, 40)]])


DEDUPLICATIONS = {
    "one": ["i32"],
    "floats": ["f64"],
    "text": ["s", "bin"],
    "times": ["d", "ts", "tsn"],
    "struct": ["st"],
    "decimals": ["dec9", "dec38"],
    "boolean": ["b"],
    "some": ["k", "i8"],
}


@pytest.mark.parametrize("name", DEDUPLICATIONS)
def test_deduplication(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Which of a batch's equal rows passes is open; so only the keys are compared."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        if name == "floats" and ZEROS_DIFFER:
            df = df.withColumn("f64", F.expr("f64 + 0.0D"))  # -0.0 becomes 0.0
        return df.dropDuplicates(DEDUPLICATIONS[name]).select(DEDUPLICATIONS[name])

    seed = sum(map(ord, name))
    rounds = [[batch(seed, 50), batch(seed + 1, 0)], [batch(seed + 2, 60)]]
    compare(spark, tmp_path, query, "append", rounds)


@pytest.mark.parametrize("mode", ["append", "update"])
def test_deduplication_of_whole_rows(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    again = batch(7, 40)
    compare(spark, tmp_path, lambda df, _: df.distinct(), mode, [[again, batch(8, 10)], [again, batch(9, 20)]])


def test_the_first_batch_of_a_key_wins(spark: SparkSession, tmp_path: Path) -> None:
    rounds = [[batch(1, 20, once=True), batch(2, 30, once=True)], [batch(3, 40, once=True)]]
    compare(spark, tmp_path, lambda df, _: df.dropDuplicates(["k"]), "append", rounds)


def test_fields_with_odd_names_are_carried_and_collected(spark: SparkSession, tmp_path: Path) -> None:
    def lists(df: DataFrame, session: SparkSession) -> DataFrame:
        value = F.struct(F.col("i8").alias("the value"), F.col("s").alias("array<int>"))
        return df.select("k", value.alias("st")).dropDuplicates(["k"])

    compare(spark, tmp_path, lists, "append", [[batch(1, 40)], [batch(2, 40)]])

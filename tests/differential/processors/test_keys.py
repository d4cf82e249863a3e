"""What may be a key: types, nulls, NaN, several columns, structs; and how a processor sees it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.data import DDL as ALL
from tests.differential.data import batch
from tests.differential.processors.checks import APIS, Turn, compare, script, transformed, values
from tests.differential.processors.processors import Count, Frames, Script

ATOMIC = ["b", "i8", "i16", "i32", "i64", "f32", "f64", "dec9", "dec18", "dec38", "s", "bin", "d", "ts", "tsn"]


@pytest.mark.parametrize(
    ("keys", "api"), [(ATOMIC, "rows"), (["st", "b"], "rows"), (ATOMIC, "pandas"), (["s", "d"], "pandas")]
)
def test_types(spark: SparkSession, tmp_path: Path, keys: list[str], api: str) -> None:
    """With nulls, but for numbers and times in pandas, where Spark makes NaN of them, which it takes for other keys."""
    nulls = 0.0 if api == "pandas" and keys is ATOMIC else 0.15

    def query(df: DataFrame) -> DataFrame:
        seconds = {name: F.date_trunc("hour", name) for name in ("ts", "tsn")}
        return transformed(df.withColumns(seconds), Count().using(api), by=keys)

    tables = [batch(3, 60, nulls), batch(4, 60, nulls).slice(0, 20), batch(3, 60, nulls).slice(0, 30)]
    found = compare(spark, tmp_path, [Turn(query, tables[:2]), Turn(query, tables[2:])], ddl=ALL)
    assert any(total > now for _, total, now in found[2])
    assert any("None" in said for said, _, _ in found[0]) == (nulls > 0)


def test_floats(spark: SparkSession, tmp_path: Path) -> None:
    """Zeros are equal, and so are all NaN; there is one a batch here, as Spark calls a processor for each of them."""

    def query(df: DataFrame) -> DataFrame:
        other = F.when(F.col("f") < 0, None).otherwise(F.col("f").cast("float"))
        return transformed(df.withColumn("other", other), Count(), by=["f", "other"])

    numbers = [0.0, -0.0, 1.5, float("nan"), float("inf"), None, -0.0]
    table = pa.table({"f": pa.array(numbers, pa.float64())})
    found = compare(spark, tmp_path, [Turn(query, [table]), Turn(query, [table])], ddl="f double")
    assert values(found)[1] == [
        ("(0.0, 0.0)", 6, 3),
        ("(1.5, 1.5)", 2, 1),
        ("(None, None)", 2, 1),
        ("(inf, inf)", 2, 1),
        ("(nan, nan)", 2, 1),
    ]


@pytest.mark.parametrize("api", APIS)
def test_what_a_processor_sees(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Keys of rows are tuples with structs as maps, those of timers are rows; rows have the keys' columns too."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withColumn("st", F.struct("n", F.col("k").alias("deep"))).withWatermark("ts", "0 seconds")
        script = Script({}, due="key, key.st, key.k").using(api)
        return transformed(marked, script, time="eventTime", by=["st", "k"])

    row = "row" if api == "rows" else "list(row._fields)"
    table = script(("a", "register(1), key"), ("b", "key, key[0]"), ("b", row))
    found = compare(spark, tmp_path, [Turn(query, [table, script(("b", "timers(), row.do", 2))])])
    told = {said for rows in found.values() for _, _, said in rows}
    assert {
        "(None, ({'deep': 'a', 'n': 0}, 'a'))",
        "(({'deep': 'b', 'n': 1}, 'b'), {'deep': 'b', 'n': 1})",
        "due 1: (Row(st=Row(n=0, deep='a'), k='a'), Row(n=0, deep='a'), 'a')",
    } < told
    names = "['k', 'n', 'ts', 'do', 'st']"
    assert any(said == names or said.startswith("Row(k='b', n=2, ts=datetime.datetime(2024, 5, 1, 12") for said in told)


@pytest.mark.parametrize(("nulls", "records"), [(0.0, "7"), (0.3, "1000")])
def test_frames(spark: SparkSession, tmp_path: Path, nulls: float, records: str) -> None:
    """Types of columns are as pandas guesses them from the values; frames have so many rows at most."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withColumn("one", F.lit("one")), Frames(), by=["one"])

    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": records}
    found = compare(spark, tmp_path, [Turn(query, [batch(5, 20, nulls)], conf=conf)], ddl=ALL)
    assert ("i32 float64" if nulls else "i32 int64") in found[0][0][2]
    assert "Timestamp" in found[0][0][3]
    assert sorted(row[1] for row in found[0]) == ([6, 7, 7] if records == "7" else [20])

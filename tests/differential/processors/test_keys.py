"""Keys of all types, nulls, NaN, several columns, structs; and how a processor sees them."""

from __future__ import annotations

import struct
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


ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
FLOATS = [
    [0.0, -0.0, 1.5],
    [-0.0, float("nan")],
    [0.0],
    [-0.0, 0.0, -0.0],
    [float("nan"), ODD_NAN, float("nan"), float("nan")],
    [ODD_NAN, float("-inf")],
    [0.0, -0.0, ODD_NAN],
]


@pytest.mark.parametrize("key", ["f", "st"])
@pytest.mark.parametrize("api", APIS)
def test_floats(spark: SparkSession, tmp_path: Path, api: str, key: str) -> None:
    """Rows with 0.0 and −0.0 come with one call, which has the state of the first; each NaN comes with its own."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withColumn("st", F.struct("f")), Count().using(api), by=[key])

    tables = [pa.table({"f": pa.array(some, pa.float64())}) for some in FLOATS]
    found = compare(spark, tmp_path, [Turn(query, tables[:4]), Turn(query, tables[4:])], ddl="f double")
    told = ("({},)" if key == "f" else "({{'f': {}}},)").format
    plain = [[(told(k), *n) for k, *n in some] for some in (
        [("0.0", 2, 2), ("1.5", 1, 1)],
        [("-0.0", 1, 1), ("nan", 1, 1)],
        [("0.0", 3, 1)],
        [("-0.0", 4, 3)],
        [("nan", 1, 1), ("nan", 2, 1), ("nan", 3, 1), ("nan", 4, 1)],
        [("-inf", 1, 1), ("nan", 2, 1)],
        [("0.0", 5, 2), ("nan", 3, 1)],
    )]  # fmt: skip
    assert values(found) == plain


@pytest.mark.parametrize("api", APIS)
def test_floats_of_timers(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Timers of 0.0 are not those of −0.0, even if they are due at one time."""

    def query(df: DataFrame) -> DataFrame:
        script = Script({"v": ("Value", "n int")}, due="key, v.get(), timers()").using(api)
        floats = df.withColumn("f", F.col("k").cast("double"))
        return transformed(floats.withWatermark("ts", "0 seconds"), script, time="eventTime", by=["f"])

    do = "register(5), v.get(), v.update((row.n,)), timers()"
    tables = [
        script(("0.0", do, 1), ("-0.0", do, 1), ("1.5", do, 1)),
        script(("-0.0", do, 2), ("NaN", do, 2), ("NaN", do, 2), ("0.0", do, 2)),
        script(("7.0", do, 8)),
    ]
    found = compare(spark, tmp_path, [Turn(query, tables[:1]), Turn(query, tables[1:])])
    due = [row[0] for rows in found.values() for row in rows if row[1] < 0]
    assert sorted(due) == ["-0.0", "0.0", "1.5", "7.0", "nan"]


@pytest.mark.parametrize("number", ["int", "float", "boolean"])
def test_nulls_in_frames(spark: SparkSession, tmp_path: Path, number: str) -> None:
    """Null is NaN where keys are numbers, and each row comes with its own call; all have one state."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df.select(F.col("k").cast(number)), Count().using("pandas"))

    tables = [pa.table({"k": pa.array(some, pa.string())}) for some in ([None, "1", None], ["1"], [None, None, None])]
    found = compare(spark, tmp_path, [Turn(query, tables[:2]), Turn(query, tables[2:])], ddl="k string")
    assert [row[2] for row in values(found)[2]] == ([3] if number == "boolean" else [1, 1, 1])
    assert values(found)[2][-1][1] == 5


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
    """Types of columns are as pandas guesses them from the values; frames have at most `records` rows."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df.withColumn("one", F.lit("one")), Frames(), by=["one"])

    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": records}
    found = compare(spark, tmp_path, [Turn(query, [batch(5, 20, nulls)], conf=conf)], ddl=ALL)
    assert ("i32 float64" if nulls else "i32 int64") in found[0][0][2]
    assert "Timestamp" in found[0][0][3]
    assert sorted(row[1] for row in found[0]) == ([6, 7, 7] if records == "7" else [20])


@pytest.mark.parametrize("api", APIS)
def test_names_of_keys(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """A key may have the name that Spark gives to counts, and others that Millpond uses itself."""

    def query(df: DataFrame) -> DataFrame:
        named = df.withColumn("count", F.col("k")).withColumn("at", F.lit(1)).withColumn("value", F.lit("x"))
        marked = named.withWatermark("ts", "0 seconds")
        script = Script({}, due="key").using(api)
        return transformed(marked, script, time="eventTime", by=["at", "count", "value"])

    tables = [script(("a", "register(1), key"), ("b", "key")), script(("b", "timers(), key", 2))]
    found = compare(spark, tmp_path, [Turn(query, tables)])
    assert any(said.startswith("due 1: ") for rows in found.values() for _, _, said in rows)

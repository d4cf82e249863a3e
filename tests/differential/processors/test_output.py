"""Output of processors: any types, any number of rows; and operators above and below them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.errors import MillpondError
from tests.differential.harness import stream
from tests.differential.processors.checks import APIS, DDL, Turn, compare, script, transformed, values
from tests.differential.processors.processors import Count, Script, Several, Stamped, Stateless, Typed


@pytest.mark.parametrize("api", APIS)
def test_types(spark: SparkSession, tmp_path: Path, api: str) -> None:
    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Typed().using(api))

    conf = {"spark.sql.session.timeZone": "America/New_York"}
    found = compare(spark, tmp_path, [Turn(query, [script(("a", ""), ("b", ""), ("c", ""))], conf=conf)])
    (first, second, nulls, *_) = values(found)[0]
    assert repr(first[1:]) == repr(second[1:])
    assert nulls == ("b", *[None] * 14)
    assert first[5:8] == (Decimal("12345678901234567.891"), "Ö", b"\x00")
    assert first[9:11] == (dt.datetime(2024, 3, 10, 12, 30, 0, 5),) * 2
    assert first[11:] == ([None, 1], (("x", 1), ("y", None)), (1, [None, "a"]), [None, ("z",)])


@pytest.mark.parametrize("api", APIS)
def test_numbers_of_rows(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """None, one, 5,000; input that is not read, or in part; batches of rows that end within a key."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Several().using(api))

    keys = [("none", ""), ("unread", "1"), ("unread", "2"), ("many", "5000"), ("first", "1"), ("first", "2")]
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "100"}
    tables = [script(*keys, ("z", "1"), *[("long", "1")] * 1000), script(), script(*keys[:4], ("none", ""))]
    found = compare(spark, tmp_path, [Turn(query, tables, conf=conf)])
    assert [len(some) for some in values(found)] == [6003, 0, 5001]
    assert [row for row in values(found)[2] if row[0] != "many"] == [("unread", -1, 2)]


@pytest.mark.parametrize("api", APIS)
def test_stateless(spark: SparkSession, tmp_path: Path, api: str) -> None:
    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Stateless().using(api))

    tables = [script(("a", "x"), ("b", "y"), ("a", "z")), script(("a", "w"))]
    found = compare(spark, tmp_path, [Turn(query, tables[:1]), Turn(query, tables[1:])])
    assert values(found) == [[("a", 0, "X"), ("a", 2, "Z"), ("b", 1, "Y")], [("a", 0, "W")]]


def stamped() -> list:
    first = script(("a", "x", 1), ("a", "y", 9), ("b", "z", 2), ("b", "z", 2))
    return [first, script(("a", "w", 12), ("b", "v", 30)), script(("a", "u", 60))]


def test_aggregates_above(spark: SparkSession, tmp_path: Path) -> None:
    """The time of what comes out is that of a column of it."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", "1 second")
        out = transformed(marked, Stamped(), "append", "eventTime", eventTimeColumnName="at")
        windows = out.groupBy(F.window("at", "10 seconds"), "k").agg(F.count("*").alias("n"), F.max("said"))
        return windows.select(F.second("window.start"), "k", "n", "max(said)")

    tables = stamped()
    turns = [Turn(query, tables[:2], mode="append"), Turn(query, tables[2:], mode="append")]
    found = compare(spark, tmp_path, turns)
    assert values(found)[2] == [
        (0, "a", 3, "kept x until 1.5"),
        (0, "b", 3, "kept z until 2.5"),
        (10, "a", 1, "got w"),
    ]
    assert values(found)[4] == [(30, "a", 2, "kept y until 9.5"), (30, "b", 1, "got v")]


def test_chained(spark: SparkSession, tmp_path: Path) -> None:
    """Two processors of different APIs and a deduplication, each behind the watermark of the one below."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", "1 second")
        out = transformed(marked, Stamped(), "append", "eventTime", eventTimeColumnName="at")
        out = out.select("k", F.col("at").alias("ts"), F.concat("said", F.lit("'")).alias("do"))
        second = transformed(out, Stamped().using("pandas"), "append", "eventTime", eventTimeColumnName="at")
        return second.select("k", F.second("at").alias("at"), "said").dropDuplicates(["said"])

    tables = stamped()
    turns = [Turn(query, tables[:2], mode="append"), Turn(query, tables[2:], mode="append")]
    found = compare(spark, tmp_path, turns)
    assert values(found)[0] == [("a", 1, "got got x'"), ("a", 9, "got got y'"), ("b", 2, "got got z'")]
    assert ("a", 30, "kept kept x until 1.5' until 9.5") in values(found)[2]
    assert ("b", 0, "kept got v' until 30.5") in values(found)[4]


def test_rows_older_than_the_watermark(spark: SparkSession, tmp_path: Path) -> None:
    """They fail the query: 9 seconds before the row is too much once there is a watermark."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", "1 second")
        out = transformed(marked, Stamped(back=9), "append", "eventTime", eventTimeColumnName="at")
        return out.groupBy(F.window("at", "10 seconds")).count()

    tables = [script(("a", "1", 10)), script(("a", "1", 15)), script(("a", "1", 16))]
    fails = "EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED.*eventTime=1714564807000000 .*=1714564809000"
    found = compare(spark, tmp_path, [Turn(query, tables, mode="append", fails=fails)])
    assert values(found) == [[], []]


def test_complete_mode(spark: SparkSession, tmp_path: Path) -> None:
    """An aggregate over what comes out shows all its groups."""

    def query(df: DataFrame) -> DataFrame:
        out = transformed(df, Count(), "complete")
        return out.groupBy("said").agg(F.max("total"), F.count("*"))

    tables = [script(*((key, "") for key in batch)) for batch in ("abacab", "cad", "z")]
    found = compare(spark, tmp_path, [Turn(query, tables, mode="complete")])
    first = [("('a',)", 4, 2), ("('b',)", 2, 1), ("('c',)", 2, 2), ("('d',)", 1, 1)]
    assert values(found)[1:] == [first, [*first, ("('z',)", 1, 1)]]


def test_modes_that_differ(spark: SparkSession, tmp_path: Path) -> None:
    """The mode that is given with the processor need not be the query's; complete mode wants an aggregate above."""
    for inner, outer in (("append", "update"), ("complete", "append")):

        def query(df: DataFrame, inner: str = inner) -> DataFrame:
            return transformed(df, Count(), inner)

        found = compare(spark, tmp_path / inner, [Turn(query, [script(("a", ""))], mode=outer)])
        assert values(found) == [[("('a',)", 1, 1)]]
    df = transformed(stream(spark, tmp_path / "append" / "in", DDL), Count(), "complete")
    for writer in (df.writeStream, millpond.writeStream(df)):
        with pytest.raises((AnalysisException, MillpondError), match="complete"):
            writer.outputMode("complete").format("noop").start()


def test_operators_below(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame) -> DataFrame:
        names = df.sparkSession.createDataFrame([("a", "Anna"), ("b", None), ("c", "Cleo")], "k string, name string")
        joined = df.filter("n > 0").join(F.broadcast(names), "k").select(F.coalesce("name", "k").alias("k"), "n", "do")
        out = transformed(joined, Script({"l": ("List", "n int")}))
        return out.filter("n != 3").withColumn("more", F.upper("said"))

    tables = [script(*((k, "l.appendValue((row.n,)), l.get()") for k in batch)) for batch in ("xabcab", "aadc")]
    found = compare(spark, tmp_path, [Turn(query, tables[:1]), Turn(query, tables[1:])])
    assert [(row[0], row[3]) for row in values(found)[0]] == [
        ("Anna", "(NONE, [(1,)])"),
        ("Anna", "(NONE, [(1,), (4,)])"),
        ("b", "(NONE, [(2,)])"),
        ("b", "(NONE, [(2,), (5,)])"),
    ]
    assert [row[2] for row in values(found)[1]] == ["(None, [(1,), (4,), (1,)])"]

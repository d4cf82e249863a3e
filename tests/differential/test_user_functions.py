"""The user's pandas and Arrow functions over closed windows: what Spark makes of the same groups in batch."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.functions import arrow_udf, pandas_udf
from pyspark.sql.group import GroupedData
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    TimestampType,
)

import millpond
from millpond.errors import UnsupportedError
from tests.differential.data import write
from tests.differential.harness import Batches, assert_equal, plain, run, stream
from tests.differential.test_windows import DDL, SCHEMA, START, marked, rounds

COLUMNS = ("ts", "k", "v", "s")
By = Callable[[], Column]


def tumbling() -> Column:
    return F.window("ts", "10 seconds").alias("w")


def sliding() -> Column:
    return F.window("ts", "20 seconds", "5 seconds").alias("w")


def sessions() -> Column:
    return F.session_window("ts", "2 seconds").alias("w")


def grouped(df: DataFrame, by: By) -> GroupedData:
    return df.groupBy(by(), "k")


def close_natively(spark: SparkSession, folder: Path, by: By) -> None:
    """Have Spark write the rows of the groups that it closes in each batch of the stream."""

    def keep(batch: DataFrame, number: int) -> None:
        numbered = batch.select(F.lit(number).alias("batch"), "w", F.inline("rows"))
        numbered.write.mode("append").parquet(str(folder / "closed"))

    whole = grouped(marked(stream(spark, folder / "in", DDL)), by).agg(F.collect_list(F.struct(*COLUMNS)).alias("rows"))
    writer = whole.writeStream.outputMode("append").option("checkpointLocation", str(folder / "native"))
    writer.foreachBatch(keep).trigger(availableNow=True).start().awaitTermination()


def check(
    spark: SparkSession,
    folder: Path,
    by: By,
    apply: Callable[[GroupedData], DataFrame],
    truth: Callable[[GroupedData], list[tuple[Any, ...]]],
    runs: int = 3,
) -> None:
    """Compare functions over the windows of a stream with those over what Spark closes in its batches."""
    native, ours = spark.newSession(), spark.newSession()
    for session in (native, ours):
        session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
        session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "3")  # groups come in pieces
    ours.conf.set("spark.millpond.onUnsupported", "error")
    ours.conf.set("spark.millpond.mapGroups", "window")
    actual: Batches = {}
    number = 0
    for tables in rounds()[:runs]:
        for table in tables:
            write(folder / "in", number, table)
            number += 1
        df = apply(grouped(marked(stream(ours, folder / "in", DDL)), by))
        run(df, "append", folder / "ours", ours=True, into=actual)
        close_natively(native, folder, by)
    expected: Batches = {number: [] for number in range(len(actual))}
    for number, *row in truth(native.read.parquet(str(folder / "closed")).groupBy("batch", "w", "k")):
        expected[number].append(tuple(row))
    assert_equal(actual, expected)
    assert sum(map(len, actual.values())) > 20


@pandas_udf(DoubleType())
def mean(v: pd.Series) -> float:
    return v.mean()


@pandas_udf(StringType())
def told(s: pd.Series, v: pd.Series, at: pd.Series) -> str | None:
    if s.isna().all():
        return None
    return f"{v.dtype} {v.sum():.3f} {sorted(s.dropna())} {at.dtype} {at.max()}"


@pandas_udf(ArrayType(DecimalType(20, 2)))
def packed(rows: pd.Series) -> list[Decimal]:
    return sorted(Decimal(row["ts"].second) for row in rows if row["v"] is not None)


@pandas_udf(LongType())
def pieces(parts: Iterator[pd.Series]) -> int:
    return sum(10 ** len(part) for part in parts)


@arrow_udf(LongType())
def most(v: pa.Array) -> int | None:
    return pc.max(v).as_py()


@arrow_udf(TimestampType())
def first(at: pa.Array, s: pa.Array) -> dt.datetime:
    assert at.type == pa.timestamp("us", tz="Europe/Berlin")
    assert s.type == pa.string()
    return pc.min(at)


def results() -> list[list[Column]]:
    """Aggregates that Spark computes together; it does not mix these kinds."""
    pandas = [
        mean("v").alias("mean"),
        (mean(F.col("v") * F.col("k")) + 1).alias("weighted"),
        told("s", at="ts", v=F.col("v") / 7).alias("told"),
        packed(F.struct("v", "ts")).alias("packed"),
    ]
    arrow = [most("v").alias("most"), first("ts", "s").alias("first")]
    return [pandas, [pieces("v").alias("pieces")], arrow, [F.count("*").alias("n"), F.max("s").alias("high")]]


def apart(groups: GroupedData) -> list[tuple[Any, ...]]:
    """The same aggregates of each group, by several of Spark's."""
    parts = [{row[:3]: row[3:] for row in rows_of(groups.agg(*some))} for some in results()]
    return [(*key, *(value for part in parts for value in part[key])) for key in parts[0]]


def rows_of(df: DataFrame) -> list[tuple[Any, ...]]:
    return [plain(row) for row in df.collect()]


@pytest.mark.parametrize("by", [sliding, sessions])
def test_aggregates(spark: SparkSession, tmp_path: Path, by: By) -> None:
    def apply(groups: GroupedData) -> DataFrame:
        return groups.agg(*(result for some in results() for result in some))

    check(spark, tmp_path, by, apply, apart)


def tidied(key: tuple[Any, ...], rows: pd.DataFrame) -> pd.DataFrame:
    """Two rows of odd groups, no rows of some groups, in another order of the columns."""
    window, k = key[-2:]
    if k == 2:
        return pd.DataFrame({"k": 2, "low": rows["ts"], "who": "", "n": 0})[:0]
    who = f"{window['start']} {rows['v'].dtype} {rows['ts'].dtype}"
    low = [rows["ts"].min()] * (1 + len(rows) % 2)
    return pd.DataFrame({"low": low, "k": k, "n": len(rows), "who": who})


def in_pieces(key: tuple[Any, ...], parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    window, k = (one.as_py() for one in key[-2:])
    stamp = pa.timestamp("us", tz="UTC")
    shape = pa.schema([("n", pa.int64()), ("end", stamp), ("sum", pa.int64()), ("k", pa.int32())])
    total = 0
    for part in parts:
        assert part.schema.field("ts").type == pa.timestamp("us", tz="Europe/Berlin")
        total += pc.sum(part["v"]).as_py() or 0
        yield pa.RecordBatch.from_pylist([{"n": part.num_rows, "end": None, "sum": None, "k": k}], shape)
    yield pa.RecordBatch.from_pylist([{"n": None, "end": window["end"], "sum": total, "k": k}], shape)


def numbered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results begin with the number of the batch that its group has been closed in."""

    def pandas(key: tuple[Any, ...], rows: pd.DataFrame) -> pd.DataFrame:
        return function(key, rows).assign(batch=key[0])

    def arrow(key: tuple[Any, ...], parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for part in function(key, parts):
            yield part.append_column("batch", pa.array([key[0].as_py()] * part.num_rows, pa.int32()))

    return arrow if function is in_pieces else pandas


def test_groups_to_rows(spark: SparkSession, tmp_path: Path) -> None:
    ddl = "k int, low timestamp, who string, n long"
    check(
        spark,
        tmp_path / "pandas",
        tumbling,
        lambda g: g.applyInPandas(tidied, ddl),
        lambda g: rows_of(g.applyInPandas(numbered(tidied), "batch int, " + ddl)),
        runs=2,
    )
    shape = "n long, end timestamp, sum long, k int"
    check(
        spark,
        tmp_path / "arrow",
        sliding,
        lambda g: g.applyInArrow(in_pieces, shape),
        lambda g: rows_of(g.applyInArrow(numbered(in_pieces), "batch int, " + shape)),
        runs=2,
    )


def test_a_function_that_fails_and_is_mended(spark: SparkSession, tmp_path: Path) -> None:
    """Nothing is lost: the batch is repeated with the new function, over rows that had been kept before."""
    large = spark.sparkContext.broadcast({"factor": 2, "padding": list(range(300_000))})

    def total(broken: bool) -> Callable[..., Any]:
        @pandas_udf(DoubleType())
        def summed(v: pd.Series) -> float:
            if broken and v.max() == 4:
                raise ValueError("four is too much")
            return float(v.sum() * large.value["factor"])

        return summed

    def query(broken: bool) -> DataFrame:
        df = stream(spark, tmp_path / "in", DDL).withWatermark("ts", "0 seconds")
        windows = df.groupBy(F.window("ts", "10 seconds").alias("w"), "k")
        return windows.agg(total(broken)("v").alias("sum"), F.count("*").alias("n")).select("w.start", "k", "sum", "n")

    def batch(number: int, second: int, *values: int) -> None:
        at = START + dt.timedelta(seconds=second)
        columns = {"ts": [at] * len(values), "k": [v % 2 for v in values], "v": values, "s": [None] * len(values)}
        write(tmp_path / "in", number, pa.table(columns, schema=SCHEMA))

    batch(0, 0, 1, 2, 3, 4)
    batch(1, 30, 5)
    found: Batches = {}
    with pytest.raises(StreamingQueryException) as failed:
        run(query(broken=True), "append", tmp_path / "ours", ours=True, into=found)
    message = str(failed.value)
    assert "ValueError: four is too much" in message
    assert "in summed" in message
    assert "operator 0 (aggregate by window, k), partition" in message
    batch(2, 60, 6)
    run(query(broken=False), "append", tmp_path / "ours", ours=True, into=found)
    rows = sorted((row[1], row[2], row[3]) for rows in found.values() for row in rows)
    assert rows == [(0, 12.0, 2), (1, 8.0, 2), (1, 10.0, 1)]


def test_as_spark_unless_asked_for(spark: SparkSession, tmp_path: Path) -> None:
    def mapped(df: DataFrame) -> DataFrame:
        return df.groupBy(F.window("ts", "1 minute"), "k").applyInPandas(lambda rows: rows[["k"]], "k int")

    marked_, other = (session_of(spark, map_groups) for map_groups in ("window", "batch"))
    write(tmp_path / "in", 0, SCHEMA.empty_table())
    df = marked(stream(marked_, tmp_path / "in", DDL))
    (operator,) = millpond.explain(mapped(df), "append", as_dict=True)["operators"]
    assert (operator["title"], operator["store"]) == ("applyInPandas by window, k", "aligned append")
    assert operator["functions"] == ["<lambda>: map pandas"]
    assert millpond.explain(mapped(marked(stream(other, tmp_path / "in", DDL))), as_dict=True)["operators"] == []
    for wrong, mode, why in (
        (mapped(df), "update", "append mode"),
        (mapped(stream(marked_, tmp_path / "in", DDL)), "append", "watermark"),
        (mapped(df.withColumn("long", F.expr("make_dt_interval(v)"))), "append", "MP-INPUT-TYPE"),
        (
            df.groupBy(F.session_window("ts", "1 minute")).applyInArrow(lambda t: t, "k int"),
            "append",
            "session windows do",
        ),
    ):
        with pytest.raises(UnsupportedError, match=why):
            millpond.writeStream(wrong).format("noop").outputMode(mode).start()


def session_of(spark: SparkSession, map_groups: str) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.millpond.mapGroups", map_groups)
    return session

"""Session windows and deduplication within the watermark: late rows, any order, restarts, quiet streams."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.differential.data import write
from tests.differential.harness import Batches, Query, compare, plain, run, stream
from tests.differential.test_windows import DDL, SCHEMA, START, marked, rounds


def check(spark: SparkSession, folder: Path, query: Query, mode: str) -> Batches:
    return compare(spark, folder, query, mode, rounds(), ddl=DDL)


def results() -> list[Column]:
    return [
        F.count("*").alias("n"),
        F.sum("v").alias("sum"),
        F.min("s").alias("low"),
        F.avg("v").alias("mean"),
        F.stddev("v").alias("spread"),
        F.collect_list("s").alias("texts"),
        F.count_if(F.col("v") > 0).alias("positive"),
    ]


def fixed(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("k", F.session_window("ts", "2 seconds")).agg(*results())


def named_twice(df: DataFrame, session: SparkSession) -> DataFrame:
    window = F.session_window("ts", "2 seconds")
    return marked(df).groupBy(window.alias("a"), "k", window.alias("b")).agg(*results())


def window_first(df: DataFrame, session: SparkSession) -> DataFrame:
    grouped = marked(df).groupBy(F.session_window("ts", "1500 milliseconds").alias("w"), "s", F.col("k") % 2)
    return grouped.agg(F.count("*").alias("n"), F.max("v")).select(F.col("w.end"), "n", "s", "max(v)", "w")


def dynamic(df: DataFrame, session: SparkSession) -> DataFrame:
    gap = (
        F.when(F.col("v") < -30, "0 seconds")
        .when(F.col("v") < 0, "700 milliseconds")
        .when(F.col("v") < 40, "4 seconds")
    )
    return marked(df).groupBy(F.session_window("ts", gap), "k").agg(*results())


def touching(df: DataFrame, session: SparkSession) -> DataFrame:
    whole = df.withColumn("ts", F.date_trunc("second", "ts"))
    return marked(whole).groupBy("k", F.session_window("ts", "1 second")).agg(*results())


def above_windows(df: DataFrame, session: SparkSession) -> DataFrame:
    counts = marked(df).groupBy(F.window("ts", "2 seconds"), "k").agg(F.count("*").alias("n"))
    return counts.groupBy("k", F.session_window(F.window_time("window"), "4 seconds")).agg(F.sum("n"))


@pytest.mark.parametrize(
    "query", [fixed, named_twice, window_first, dynamic, touching, above_windows], ids=lambda query: query.__name__
)
def test_append(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    found = check(spark, tmp_path, query, "append")
    assert any(found.values()), "no session ever closed"


@pytest.mark.parametrize("query", [fixed, dynamic], ids=lambda query: query.__name__)
def test_complete(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    check(spark, tmp_path, query, "complete")


def test_a_gap_that_changes_between_starts(spark: SparkSession, tmp_path: Path) -> None:
    starts: dict[SparkSession, Iterator[str]] = {}

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        gap = next(starts.setdefault(session, iter(("2 seconds", "5 seconds", "500 milliseconds"))))
        return marked(df).groupBy("k", F.session_window("ts", gap)).agg(*results())

    assert any(check(spark, tmp_path, query, "append").values())
    assert [next(gaps, None) for gaps in starts.values()] == [None, None]


@pytest.mark.parametrize("mode", ["append", "complete"])
def test_rows_count_in_the_order_of_their_times(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Also those of several batches: a row before the stored session counts before it, one after its start after it."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        sessions = marked(df, "60 seconds").groupBy("k", F.session_window("ts", "10 seconds"))
        calls = [F.first("v"), F.last("v"), F.any_value("s"), F.last("s"), F.max_by("v", F.lit(1)), F.count("*")]
        # In append mode such rows are kept until their session closes, and are not ordered.
        return sessions.agg(*calls, *([F.expr("listagg(s, ' ')")] if mode == "complete" else []))

    first = [(0, 20), (1, 20), (2, 20), (3, 20), (3, 30), (4, 20), (4, 38), (5, 38), (6, 20)]
    second = [(0, 15), (1, 25), (2, 15), (2, 25), (3, 25), (4, 29), (5, 20), (6, 20)]
    third = [(0, 5), (1, 12), (4, 12), (5, 29), (6, 20)]
    rounds = [[seconds_of(first)], [seconds_of(second), seconds_of(third)], [seconds_of([(7, 500)])]]
    found = compare(spark, tmp_path, query, mode, rounds, ddl=DDL)
    assert len({row[0] for rows in found.values() for row in rows}) >= 7


def seconds_of(rows: list[tuple[int, int]]) -> pa.Table:
    """Rows of keys at seconds; no values are equal."""
    columns = {
        "ts": [START + dt.timedelta(seconds=second) for _, second in rows],
        "k": [key for key, _ in rows],
        "v": [1000 * len(rows) + number for number in range(len(rows))],
        "s": [f"{len(rows)}.{number}" for number in range(len(rows))],
    }
    return pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names}, schema=SCHEMA)


def before_1970(df: DataFrame, session: SparkSession) -> DataFrame:
    early = df.withColumn("ts", F.col("ts") - F.expr("interval 60 years"))
    return early.groupBy("k", F.session_window("ts", "2 seconds")).agg(*results())


def local_times(df: DataFrame, session: SparkSession) -> DataFrame:
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    local = df.withColumn("ts", F.col("ts").cast("timestamp_ntz"))
    return local.groupBy("k", F.session_window("ts", "3 seconds")).agg(*results())


@pytest.mark.parametrize("query", [before_1970, local_times], ids=lambda query: query.__name__)
def test_complete_without_watermark(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    check(spark, tmp_path, query, "complete")


def test_one_stream_of_sessions(spark: SparkSession, tmp_path: Path) -> None:
    """Spark has no streaming sessions without another key; a batch has."""

    def query(df: DataFrame) -> DataFrame:
        return df.groupBy(F.session_window("ts", "1 second")).agg(F.count("*").alias("n"), F.sum("v").alias("sum"))

    tables = rounds()[0]
    for number, table in enumerate(tables):
        write(tmp_path / "in", number, table)
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    found: Batches = {}
    run(query(stream(session, tmp_path / "in", DDL)), "complete", tmp_path / "ours", ours=True, into=found)
    wanted = [plain(row) for row in query(spark.read.schema(DDL).parquet(str(tmp_path / "in"))).collect()]
    assert sorted(found[len(tables) - 1]) == sorted(wanted)
    assert len(wanted) > 2


def within(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).dropDuplicatesWithinWatermark(["k", "s"])


def within_one(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df, "1 second").dropDuplicatesWithinWatermark(["k"]).select("k")


def one_row_a_key(seed: int, start: float) -> pa.Table:
    """Rows in which no key occurs twice: the order of a key's rows in a batch is not defined."""
    times = [START + dt.timedelta(seconds=start + 0.7 * ((seed * n) % 11)) for n in range(8)]
    columns = {
        "ts": pa.array([*times[:-1], None], SCHEMA.field("ts").type),
        "k": pa.array([*range(7), None], pa.int32()),
        "v": pa.array(range(8), pa.int64()),
        "s": pa.array([f"text {n % 3}" for n in range(8)], pa.string()),
    }
    return pa.table(columns, schema=SCHEMA)


@pytest.mark.parametrize("query", [within, within_one], ids=lambda query: query.__name__)
@pytest.mark.parametrize("mode", ["append", "update"])
def test_within_watermark(spark: SparkSession, tmp_path: Path, query: Query, mode: str) -> None:
    empty = SCHEMA.empty_table()
    runs = [
        [one_row_a_key(3, 0), one_row_a_key(5, 4), one_row_a_key(7, 16)],
        [empty, one_row_a_key(4, 17), one_row_a_key(2, 5)],
        [one_row_a_key(1, 40), one_row_a_key(1, 41), one_row_a_key(1, 5000)],
    ]
    found = compare(spark, tmp_path, query, mode, runs, ddl=DDL)
    assert any(found.values())

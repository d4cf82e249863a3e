"""Event time: windows, raw times as keys, chains of them, deduplication; late rows, quiet streams, restarts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.checkpoint.formats.commit import read_header
from millpond.state_reader.reader import StateReader
from millpond.time_slices import base_name
from tests.differential.data import write
from tests.differential.harness import Batches, Query, compare, run, stream

SCHEMA = pa.schema([("ts", pa.timestamp("us", tz="UTC")), ("k", pa.int32()), ("v", pa.int64()), ("s", pa.string())])
DDL = "ts timestamp, k int, v bigint, s string"
START = dt.datetime(2024, 3, 31, 0, 30, tzinfo=dt.UTC)  # half an hour before European clocks change


def rows(seed: int, count: int, start: float, span: float, nulls: float = 0.05) -> pa.Table:
    """Rows with times in order, roughly, from `start` on for `span` seconds; some far behind, some whole seconds."""
    rng = np.random.default_rng(seed)
    at = start + np.sort(rng.uniform(0, span, count)) + rng.normal(0, span / 8, count)
    at = np.where(rng.random(count) < 0.1, at - 3 * span, at)
    at = np.where(rng.random(count) < 0.3, np.floor(at), at)
    times = [START + dt.timedelta(microseconds=int(second * 1e6)) for second in at]

    def some(values: list[object]) -> list[object]:
        return [None if n < nulls else value for value, n in zip(values, rng.random(count), strict=True)]

    return pa.table(
        {
            "ts": pa.array(some(list(times)), SCHEMA.field("ts").type),
            "k": pa.array(some([int(k) for k in rng.integers(0, 6, count)]), pa.int32()),
            "v": pa.array(some([int(v) for v in rng.integers(-50, 50, count)]), pa.int64()),
            "s": pa.array(some([f"{'value ' * int(n % 4)}{n}" for n in rng.integers(0, 9, count)]), pa.string()),
        },
        schema=SCHEMA,
    )


def rounds() -> list[list[pa.Table]]:
    """Three runs of some batches: times go on, stand still, jump, and one batch is empty."""
    empty = SCHEMA.empty_table()
    return [
        [rows(1, 60, 0, 20), rows(2, 60, 20, 20), rows(3, 40, 25, 20)],
        [rows(4, 60, 60, 30), empty],
        [rows(5, 10, 400, 5), rows(6, 40, 3600, 60), rows(7, 10, 100_000, 10)],
    ]


def marked(df: DataFrame, delay: str = "10 seconds") -> DataFrame:
    return df.withWatermark("ts", delay)


def check(spark: SparkSession, folder: Path, query: Query, mode: str, *, restarts: bool = True) -> Batches:
    runs = rounds() if restarts else [[table for tables in rounds() for table in tables]]
    return compare(spark, folder, query, mode, runs, ddl=DDL)


def results() -> list[Column]:
    return [
        F.count("*").alias("n"),
        F.sum("v").alias("sum"),
        F.min("s").alias("low"),
        F.max("v").alias("high"),
        F.avg("v").alias("mean"),
        F.collect_set("k").alias("keys"),
    ]


def tumbling(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "k").agg(*results())


def offset(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("s", F.window("ts", "1 minute", startTime="7 seconds")).agg(*results())


def sliding(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(*results())


def sliding_offset(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("k", "s", F.window("ts", "10 seconds", "2 seconds", "1 second")).agg(*results())


def uneven(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("k", F.window("ts", "10 seconds", "4 seconds")).agg(*results())


def windows_only(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds")).agg(*results())


def sliding_only(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds", "5 seconds")).agg(*results())


def instants(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy("ts", "k").agg(*results())


def instants_in_structs(df: DataFrame, session: SparkSession) -> DataFrame:
    """Spark gives the name of a struct's field, with the field's watermark, to what it groups by."""
    return marked(df).withColumn("event", F.struct("ts", "s")).groupBy("event.ts", "k").agg(*results())


def days(df: DataFrame, session: SparkSession) -> DataFrame:
    session.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    return marked(df).groupBy(F.window("ts", "1 day"), "k").agg(*results())


def renamed(df: DataFrame, session: SparkSession) -> DataFrame:
    return session.sql(
        "select w.end as stop, w.start as begin, g, count(*) + 1 as n from"
        " (select window(ts, '10 seconds') as w, k % 2 as g from {df}) group by w, g having count(*) > 1",
        df=marked(df),
    )


def named_twice(df: DataFrame, session: SparkSession) -> DataFrame:
    window = F.window("ts", "10 seconds")
    return marked(df).groupBy(window.alias("a"), "k", window.alias("b")).agg(*results())


def sliding_named_twice(df: DataFrame, session: SparkSession) -> DataFrame:
    window = F.window("ts", "20 seconds", "5 seconds")
    return marked(df).groupBy(window.alias("a"), window.alias("b")).agg(*results())


def distinct_text(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "10 seconds"), "s").agg(F.collect_set("v"), F.approx_count_distinct("v"))


def chained(df: DataFrame, session: SparkSession) -> DataFrame:
    counts = marked(df).groupBy(F.window("ts", "5 seconds"), "k").agg(F.count("*").alias("n"))
    return counts.groupBy(F.window(F.window_time("window"), "20 seconds")).agg(F.max("n"), F.sum("n"))


def same_window(df: DataFrame, session: SparkSession) -> DataFrame:
    counts = marked(df).groupBy(F.window("ts", "20 seconds", "10 seconds"), "k").agg(F.count("*").alias("n"))
    return counts.groupBy("window").agg(F.max("n"), F.sum("n"))


def tumbling_weeks(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "1 week"), "k").agg(F.count("*"), F.sum("v"))


def sliding_weeks(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.window("ts", "2 weeks", "1 week"), "k").agg(F.count("*"), F.sum("v"))


def without_ansi(query: Query) -> Query:
    def build(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", "false")
        return query(df, session)

    return build


def sliding_read(df: DataFrame, session: SparkSession) -> DataFrame:
    near = F.expr("count(*) filter (where ts >= window.end - interval 5 seconds)")
    return marked(df).groupBy(F.window("ts", "20 seconds", "5 seconds"), "k").agg(near, F.max("window.end"), F.sum("v"))


CLOSING = [tumbling, offset, sliding, sliding_offset, uneven, windows_only, sliding_only, instants, days, renamed]
CLOSING += [named_twice, sliding_named_twice, sliding_read]


@pytest.mark.parametrize("query", [*CLOSING, distinct_text, chained, same_window], ids=lambda query: query.__name__)
def test_append(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    found = check(spark, tmp_path, query, "append")
    assert any(found.values()), "no window ever closed"


@pytest.mark.parametrize("query", [*CLOSING, instants_in_structs], ids=lambda query: query.__name__)
def test_update(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    check(spark, tmp_path, query, "update", restarts=query in (tumbling, sliding))


@pytest.mark.parametrize("query", [tumbling, sliding, instants], ids=lambda query: query.__name__)
def test_complete(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    check(spark, tmp_path, query, "complete", restarts=query is tumbling)


def numbered(seed: int, count: int, start: float, values: range, keys: int) -> pa.Table:
    """Rows of a minute, whose values are new each time, or few."""
    rng = np.random.default_rng(seed)
    at = np.sort(start + rng.uniform(0, 60, count))
    first = int(START.timestamp() * 1e6)
    v = values.start + np.arange(count) % len(values)
    columns = [pa.array(first + (at * 1e6).astype(np.int64)), pa.array(rng.integers(0, keys, count).astype(np.int32))]
    return pa.table([columns[0].cast(SCHEMA.field("ts").type), columns[1], v, v.astype(str)], schema=SCHEMA)


def distinct_values(df: DataFrame, session: SparkSession) -> DataFrame:
    sets = [F.size(F.collect_set("v")).alias("v"), F.size(F.collect_set("s")).alias("s")]
    return marked(df).groupBy(F.window("ts", "1 minute"), "k").agg(*sets, F.count("*"), F.max("s"))


def test_a_pattern_that_changes(spark: SparkSession, tmp_path: Path) -> None:
    """Distinct values outgrow their memory, are appended, and become groups again when they repeat."""
    new = [numbered(n, 30_000, 20 * n, range(30_000 * n, 30_000 * (n + 1)), 500) for n in range(2)]
    few = [numbered(2 + n, 20_000, 70 + 40 * n, range(3), 20) for n in range(4)]
    conf = {"slot.memory": "16m", "partitions": "2"}
    found = compare(spark, tmp_path, distinct_values, "append", [[*new, few[0]], few[1:]], ddl=DDL, **conf)
    assert sum(len(batch) for batch in found.values()) > 500
    files = StateReader(str(tmp_path / "ours")).files
    headers = [read_header(files, info.name) for info in files.list("commits/")]
    kept = {base_name(name) for header in headers for manifest in header.manifests for name in manifest.tables}
    assert kept == {"main", "distinct0", "distinct1", "rows", "sample", "moved"}
    state = millpond.read_state(spark, str(tmp_path / "ours"))
    assert {"k", "count(1)", "max(s)"} <= set(state.columns)
    assert state.schema["window"].dataType.simpleString() == "struct<start:timestamp,end:timestamp>"
    assert state.count() > 0


def first_rows(*keys: str) -> Query:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        # Which row of a key is the first one, Spark does not say: all that is shown has to be the key's.
        return (
            marked(df).select(*keys).dropDuplicates()
            if "ts" in keys
            else marked(df).dropDuplicates([*keys]).select(*keys)
        )

    return query


@pytest.mark.parametrize("keys", [("ts", "k"), ("ts",), ("k", "s")], ids="-".join)
@pytest.mark.parametrize("mode", ["append", "update"])
def test_deduplication(spark: SparkSession, tmp_path: Path, keys: tuple[str, ...], mode: str) -> None:
    check(spark, tmp_path, first_rows(*keys), mode)


def twice(df: DataFrame, session: SparkSession) -> DataFrame:
    seen = marked(df).dropDuplicates(["k", "v"])
    return seen.select("k", "v").union(seen.where("year(ts) < 2999").select("k", "v"))


UNREAD: dict[str, tuple[Query, str, bool]] = {
    "not shown": (lambda df, _: marked(df).dropDuplicates(["k", "v"]).select("k", "v"), "append", True),
    "shown": (lambda df, _: marked(df).dropDuplicates(["k", "v"]).select("k", "v", F.hour("ts") * 0), "append", False),
    "under a filter": (lambda df, _: marked(df).dropDuplicates(["k", "v"]).where("k < 4").select("v"), "append", True),
    "filtered by": (
        lambda df, _: marked(df).dropDuplicates(["k", "v"]).where("year(ts) < 2999").select("v"),
        "append",
        False,
    ),
    "in a struct": (
        lambda df, _: (
            marked(df).dropDuplicates(["k", "v"]).select("k", F.struct("ts", "v").alias("both")).select("k", "both.v")
        ),
        "append",
        True,
    ),
    "of one of two": (twice, "append", True),
    "under a count": (lambda df, _: marked(df).dropDuplicates(["k", "v"]).groupBy("k").count(), "update", True),
    "under a distinct": (
        lambda df, _: marked(df).dropDuplicates(["k", "v"]).select("k", "v", F.hour("ts") * 0).distinct().select("k"),
        "update",
        False,
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_deduplication_beside_a_time_that_nobody_reads(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Spark does not have the column then, and late rows pass."""
    query, mode, late = UNREAD[name]
    batches = [[rows(1, 30, 0, 20)], [rows(2, 3, 400, 5)], [rows(3, 30, 0, 20), rows(4, 30, 420, 20)]]
    found = compare(spark, tmp_path, query, mode, batches, ddl=DDL)
    assert max(found) > len(batches), "no batch without rows"
    assert (len(found[4]) > 5) == late, [len(batch) for batch in found.values()]


@pytest.mark.parametrize("engine", ["native", "ours"])
@pytest.mark.parametrize("kind", ["time and window", "window and time", "copies"])
def test_two_event_times_are_refused(spark: SparkSession, tmp_path: Path, kind: str, engine: str) -> None:
    """Which of them would close the state?"""
    write(tmp_path / "in", 0, rows(1, 60, 0, 20))
    df = marked(stream(spark, tmp_path / "in", DDL))
    window = F.window("ts", "10 seconds")
    query = {
        "time and window": df.groupBy("ts", window).count(),
        "window and time": df.groupBy(window, "ts").count(),
        "copies": df.select("ts", F.col("ts").alias("other"), "k").dropDuplicates(["ts", "k"]),
    }[kind]
    # Before Spark 4.3 the error has no class.
    with pytest.raises(StreamingQueryException, match=r"MULTIPLE_EVENT_TIME_COLUMNS|More than one event time column"):
        run(query, "append", tmp_path / "checkpoint", ours=engine == "ours", into={})


@pytest.mark.parametrize("query", [tumbling_weeks, sliding_weeks], ids=lambda query: query.__name__)
def test_the_last_window_of_all(spark: SparkSession, tmp_path: Path, query: Query) -> None:
    """Its end is no timestamp any more: an error in ANSI mode, else what 64 bits make of it."""
    last = (1 << 63) - 1 - 60_000_000
    start = int(START.timestamp() * 1e6)
    times = pa.array([last, start], pa.int64()).cast(SCHEMA.field("ts").type)
    far = pa.table([times, pa.array([1, 1], pa.int32()), pa.array([1, 2]), pa.array(["a", "b"])], schema=SCHEMA)
    batches = [[far, rows(1, 10, 60 * 86_400, 10)]]
    compare(spark, tmp_path / "plain", without_ansi(query), "append", batches, ddl=DDL)
    for engine in ("native", "ours"):
        write(tmp_path / "in", 0, far)
        df = query(stream(spark, tmp_path / "in", DDL), spark)
        with pytest.raises(StreamingQueryException, match="ARITHMETIC_OVERFLOW"):
            run(df, "append", tmp_path / engine, ours=engine == "ours", into={})


IN_ORDER = {
    "auto": ["first(v) f", "last(v) l", "any_value(s) a", "min_by(v, w) n", "max_by(s, w) x", "count(*) c"],
    "rmw": ["to_json(collect_list(v)) v", "to_json(collect_list(s) filter (where v > 1)) s"],
    "append": ["to_json(collect_list(v)) v", "first(s) f", "last(v, true) l", "min_by(v, w) n"],
}


@pytest.mark.parametrize("pattern", IN_ORDER)
def test_what_depends_on_order_follows_arrival(spark: SparkSession, tmp_path: Path, pattern: str) -> None:
    """Also where rows of later panes came first; a batch has one row of each key, so that Spark's order is settled."""
    seconds = [[13, 21, 4], [2, 14, 9], [11, 3, 23], [6, 26, 2], [15, 8, 18], [1, 4, 13], [24, 19, 27], [90, 90, 90]]
    tables = [
        pa.table(
            {
                "ts": pa.array([START + dt.timedelta(seconds=second) for second in each], SCHEMA.field("ts").type),
                "k": pa.array(range(3), pa.int32()),
                "v": pa.array([number, 10 + number, None if number % 3 == 1 else 20 + number], pa.int64()),
                "s": pa.array([f"{number} is no short text", None if number % 2 else f"{number}", "x"], pa.string()),
            },
            schema=SCHEMA,
        )
        for number, each in enumerate(seconds)
    ]

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        groups = (
            marked(df, "60 seconds").selectExpr("*", "v % 2 w").groupBy(F.window("ts", "20 seconds", "5 seconds"), "k")
        )
        return groups.agg(*map(F.expr, IN_ORDER[pattern]))

    found = compare(spark, tmp_path, query, "append", [tables[:4], tables[4:]], ddl=DDL, **{"store.pattern": pattern})
    assert sum(map(len, found.values())) > 15

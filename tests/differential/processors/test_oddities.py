"""Causes of wrong rows without an error: odd keys and values, other sessions, other operators beside."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import millpond
from tests.differential.data import write
from tests.differential.harness import stream
from tests.differential.processors.checks import APIS, DDL, Turn, compare, script, spoken, transformed, values
from tests.differential.processors.processors import Count, Script, Stamped, Variables

ZONES = ({"spark.sql.session.timeZone": "America/New_York"}, {"spark.sql.session.timeZone": "Asia/Kolkata"})


@pytest.mark.parametrize("api", APIS)
def test_another_time_zone_after_a_restart(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """Times are the same moments in keys, rows, state and timers; as frames have them, those of the session's clock.

    Of times that pandas has as keys Spark keeps what the clock says, so that in another time zone they are other keys.
    """
    first, second = ZONES if api == "rows" else ZONES[:1] * 2
    variables: Variables = {
        "v": ("Value", "t timestamp, n timestamp_ntz, d date"),
        "m": ("Map", "t timestamp", "l array<timestamp>"),
    }

    def query(df: DataFrame) -> DataFrame:
        rows = df.withColumn("at", F.date_trunc("hour", "ts")).withWatermark("ts", "0 seconds")
        return transformed(rows, Script(variables, due="at, v.get()").using(api), time="eventTime", by=["k", "at"])

    write = (
        "v.update((row.ts, dt.datetime(2024, 3, 10, 2, 30), dt.date(2024, 3, 10))), "
        "m.updateValue((row.ts,), ([row.ts, None, dt.datetime(2024, 11, 3, 1, 30)],)), register(5)"
    )
    told = "v.get(), m.iterator(), m.containsKey((row.ts,)), timers(), row.ts"
    tables = [script(("a", write, 1), ("a", told, 1)), script(("a", told, 1), ("a", write, 2)), script(("a", told, 9))]
    turns = [Turn(query, tables[:1], conf=first), Turn(query, tables[1:2], conf=second)]
    found = compare(spark, tmp_path, [*turns, Turn(query, tables[2:], conf=first)])
    assert any(at < 0 and "datetime" in said for rows in found.values() for _, at, said in rows)


def test_keys_that_compare_oddly(spark: SparkSession, tmp_path: Path) -> None:
    """Collated text, decimals of other scales, floats in structs; null in all places."""

    def query(df: DataFrame) -> DataFrame:
        number = F.when(F.col("n") < 3, F.lit(-0.0)).when(F.col("n") == 3, F.lit(math.nan))
        odd = F.struct(number.alias("f"), F.lit(None).cast("string").alias("x"))
        made = df.select(
            F.expr("k COLLATE UTF8_LCASE").alias("k"),
            F.when(F.col("n") % 2 == 0, F.col("n").cast("decimal(38, 18)")).alias("dec"),
            "n",
            "do",
        )
        return transformed(made, Count(), by=["dec"]).union(
            transformed(made.withColumn("odd", odd), Count(), by=["odd"])
        )

    tables = [script(*((key, "") for key in ("a", "A", None, "b", "a", "B"))), script(("A", ""), (None, ""), ("b", ""))]
    compare(spark, tmp_path, [Turn(query, tables[:1]), Turn(query, tables[1:])])


def test_large_and_nested_values(spark: SparkSession, tmp_path: Path) -> None:
    """Text of 512 KB in keys of maps and in output; nulls at each depth, and kept by keys that then rest."""
    variables: Variables = {
        "m": ("Map", "s string", "x string"),
        "v": ("Value", "a array<struct<x: array<string>, y: map<string, struct<z: decimal(38, 18)>>>>"),
        "l": ("List", "s string, d decimal(38, 0)"),
    }
    nested = (
        "[None, (None, None), ([], {}), ([None, ''], {'a': None, 'b': (None,)}), (['x'], {'c': (Decimal('1e-18'),)})]"
    )
    tables = [
        script(
            ("a", "m.updateValue(('k' * 524_288,), ('v' * 524_288,)), m.updateValue((None,), (None,))"),
            ("a", f"v.update(({nested},)), v.get()"),
            ("a", "l.appendValue((None, None)), l.appendValue(('ü' * 262_144, Decimal(10) ** 37))"),
            *((f"k{n}", f"v.update(({nested},)), l.put([(str(n), None)] * {n})") for n in range(20)),
        ),
        script(
            ("a", "v.get(), [(k == ('k' * 524_288,), v) for k, v in m.iterator()]"),
            ("a", "l.get()"),
            ("new", "v.get()"),
        ),
        script(*((f"k{n}", "v.get(), l.get()") for n in range(20))),
    ]

    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Script(variables))

    found = compare(spark, tmp_path, [Turn(query, tables[:1]), Turn(query, tables[1:2]), Turn(query, tables[2:])])
    assert "Decimal('1E-18')" in spoken(found, "a")[1][0] or "1E-18" in spoken(found, "a")[1][0]


def test_null_times(spark: SparkSession, tmp_path: Path) -> None:
    """Rows without an event time are never late."""

    def query(df: DataFrame) -> DataFrame:
        odd = df.withColumn("ts", F.when(F.col("do") != "'none'", F.col("ts")))
        return transformed(odd.withWatermark("ts", "0 seconds"), Script({}), time="eventTime")

    tables = [
        script(("a", "1", 50), ("b", "'none'")),
        script(("a", "'none'"), ("b", "2", 60)),
        script(("b", "'none'"), ("c", "3", 1)),
    ]
    compare(spark, tmp_path, [Turn(query, tables)])


def test_between_other_operators(spark: SparkSession, tmp_path: Path) -> None:
    """Above a deduplication and a join, below an aggregate in complete mode, and a union of two processors."""

    def query(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", "1 second")
        others = marked.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"), F.col("n").alias("n2"))
        near = F.expr("k = k2 AND ts2 >= ts AND ts2 <= ts + INTERVAL 2 SECONDS")
        joined = marked.join(others, near).select("k", "ts", F.col("n2").alias("n"), "do")
        both = [
            transformed(rows, Stamped().using(api), "append", "eventTime", eventTimeColumnName="at")
            for rows, api in ((joined, "rows"), (marked.dropDuplicates(["k", "ts"]), "pandas"))
        ]
        out = both[0].union(both[1])
        windows = out.groupBy(F.window("at", "10 seconds"), "k").agg(F.count("*").alias("n"), F.max("said"))
        return windows.select(F.second("window.start"), "k", "n", "max(said)")

    tables = [
        script(("a", "x", 1), ("a", "y", 2), ("b", "z", 2), ("b", "z", 2)),
        script(("a", "w", 12), ("b", "v", 13), ("b", "v", 13)),
        script(("a", "u", 60)),
        script(("a", "u", 90)),
    ]
    turns = [Turn(query, tables[:2], mode="append"), Turn(query, tables[2:], mode="append")]
    found = compare(spark, tmp_path, turns)
    assert sum(map(len, found.values())) > 3


def two_sources(df: DataFrame) -> DataFrame:
    fast = df.filter("do != 'timers()'").withWatermark("ts", "1 second")
    slow = df.filter("do = 'timers()'").withWatermark("ts", "10 seconds")
    return transformed(fast.union(slow), Script({}, due="at"), time="eventTime")


@pytest.mark.parametrize("policy", ["min", "max"])
def test_several_watermarks(spark: SparkSession, tmp_path: Path, policy: str) -> None:
    """Timers and late rows go by the watermark that the policy chooses."""
    tables = [
        script(("a", "register(3), register(12)", 20), ("b", "timers()", 20)),
        script(("a", "1", 11), ("b", "timers()", 30)),
        script(("a", "timers()", 40), ("a", "2", 5)),
    ]
    conf = {"spark.sql.streaming.multipleWatermarkPolicy": policy}
    compare(
        spark,
        tmp_path,
        [Turn(two_sources, tables[:2], conf=conf), Turn(two_sources, tables[2:], conf=conf)],
    )


@pytest.mark.parametrize("api", APIS)
def test_commits_that_lag(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """With `commit.mode=async`, over restarts."""

    def query(df: DataFrame) -> DataFrame:
        return transformed(df, Count().using(api))

    tables = [script(*((key, "") for key in batch)) for batch in ("abacab", "cad", "", "bbbbz", "az")]
    conf = {"spark.millpond.commit.mode": "async"}
    turns = [
        Turn(query, tables[:2], conf=conf),
        Turn(query, tables[2:4], conf=conf),
        Turn(query, tables[4:], conf=conf),
    ]
    found = compare(spark, tmp_path, turns)
    assert values(found)[-1] == [("('a',)", 5, 1), ("('z',)", 2, 1)]


def test_output_that_is_read_in_part_and_again(spark: SparkSession, tmp_path: Path) -> None:
    """A batch's output is read in part, twice, and in part again; two queries of one application do so side by side."""
    counted: list[tuple[str, int, int]] = []
    for number, keys in enumerate(("abacab", "cad", "bbbbz")):
        write(tmp_path / "in", number, script(*((key, "") for key in keys)))
        total = Counter("".join(("abacab", "cad", "bbbbz")[: number + 1]))
        counted += [(f"('{key}',)", total[key], now) for key, now in Counter(keys).items()]
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    seen: dict[str, list[list[tuple[object, ...]]]] = {api: [] for api in APIS}

    def query(api: str) -> StreamingQuery:
        def look(batch: DataFrame, number: int) -> None:
            assert len(batch.limit(1).collect()) == 1
            first = batch.collect()
            assert batch.count() == len(first)
            batch.take(2)
            assert sorted(batch.collect()) == sorted(first)
            seen[api].append([tuple(row) for row in first])

        df = transformed(stream(session, tmp_path / "in", DDL), Count().using(api))
        writer = millpond.writeStream(df).outputMode("update").foreachBatch(look).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(tmp_path / api)).start()

    for running in [query(api) for api in APIS]:
        running.awaitTermination()
    for api in APIS:
        assert len(seen[api]) == 3
        assert sorted(row for batch in seen[api] for row in batch) == sorted(counted)

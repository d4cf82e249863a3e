"""The names under which the state of each kind of operator is shown, and that aliases do not bind a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from millpond.checkpoint.state_schema import StateSchema
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.plan.state_column_names import state_column_names
from millpond.query.running.session_settings import changed_settings
from millpond.query.schema.comparison import compare
from millpond.query.schema.matching import state_schema_of

Make = Callable[[DataFrame], DataFrame]
TIME_ZONE = "spark.sql.session.timeZone"


def marked(df: DataFrame) -> DataFrame:
    return df.withWatermark("ts", "1 minute")


def joined(df: DataFrame) -> DataFrame:
    left = marked(df).select("k", "ts", "v").alias("a")
    right = marked(df).selectExpr("k as id", "ts", "v", "d as click").alias("b")
    within = "b.ts between a.ts and a.ts + interval 1 minute"
    return left.join(right, F.expr(f"a.k = b.id and {within}")).select("k", "a.v", "b.v", "click")


def ranked(df: DataFrame) -> DataFrame:
    return df.selectExpr("k", "s", "row_number() over (partition by k, s order by v) r").where("r <= 2")


CASES: dict[str, tuple[Make, str, list[list[str]]]] = {
    "aliases": (
        lambda df: df.groupBy((F.col("k") % 3).alias("part")).agg(F.count("*").alias("clicks"), F.max("v")),
        "update",
        [["part", "clicks", "max(v)"]],
    ),
    "a part of a column": (
        lambda df: df.groupBy("k").agg((F.sum("v") + 1).alias("more"), F.count("*").alias("rows")),
        "update",
        [["k", "sum_0", "rows"]],
    ),
    "renamed above": (
        lambda df: (
            df.groupBy("k").agg(F.count("*").alias("n")).withColumnRenamed("n", "clicks").selectExpr("k as u", "clicks")
        ),
        "update",
        [["u", "clicks"]],
    ),
    "a name that is taken": (
        lambda df: df.groupBy("k").agg(F.count("*").alias("K"), F.max("v").alias("a.b")).toDF("k", "K", "a.b"),
        "update",
        [["k", "K_2", "a_b"]],
    ),
    "windows": (
        lambda df: marked(df).groupBy(F.window("ts", "1 minute"), "k").agg(F.count("*").alias("clicks")),
        "append",
        [["window", "k", "clicks"]],
    ),
    "sliding windows": (
        lambda df: (
            marked(df).groupBy(F.window("ts", "1 minute", "20 seconds").alias("w"), "k").agg(F.avg("d").alias("mean"))
        ),
        "append",
        [["w", "k", "mean"]],
    ),
    "rows of windows": (
        lambda df: marked(df).groupBy(F.window("ts", "1 minute"), "k").agg(F.median("v").alias("m")),
        "append",
        [["window", "k", "v"]],
    ),
    "groups and rows of windows": (
        lambda df: marked(df).groupBy(F.window("ts", "1 minute"), "k").agg(F.countDistinct("v").alias("values")),
        "append",
        [["window", "k", "values", "v"]],
    ),
    "sessions": (
        lambda df: (
            marked(df).groupBy("k", F.session_window("ts", "1 minute").alias("visit")).agg(F.sum("v").alias("total"))
        ),
        "append",
        [["k", "visit", "total"]],
    ),
    "rows of sessions": (
        lambda df: marked(df).groupBy("k", F.session_window("ts", "1 minute")).agg(F.median("v").alias("m")),
        "append",
        [["k", "session_window", "rows"]],
    ),
    "grouping sets": (
        lambda df: df.rollup("k", "s").agg(F.sum("v").alias("total"), F.grouping_id().alias("level")),
        "update",
        [["k", "s", "level", "total"]],
    ),
    "distinct": (lambda df: df.select("k", F.col("s").alias("name")).distinct(), "update", [["k", "name"]]),
    "deduplication": (
        lambda df: df.dropDuplicates(["s"]).withColumnRenamed("s", "name"),
        "append",
        [["name"]],
    ),
    "deduplication within": (
        lambda df: marked(df).dropDuplicatesWithinWatermark(["k", "s"]),
        "append",
        [["k", "s"]],
    ),
    "join": (
        joined,
        "append",
        [["side", "matched", "time", "k", "left_v", "right_v", "click"]],
    ),
    "top-N": (ranked, "update", [["k", "s"]]),
    "over": (
        lambda df: df.selectExpr("k", "sum(v) over (partition by k order by v rows 2 preceding) a").withColumnRenamed(
            "k", "u"
        ),
        "update",
        [["u"]],
    ),
    "chain": (
        lambda df: (
            df.groupBy("k", "s").count().groupBy("k").agg(F.sum("count").alias("most"), F.count("*").alias("names"))
        ),
        "update",
        [["k", "s", "count"], ["k", "most", "names"]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_state_has_the_names_of_the_output(stream: DataFrame, case: str) -> None:
    make, mode, expected = CASES[case]
    decision = decide(make(stream), mode)
    columns = state_column_names(decision.root)
    found = [
        list(columns[index] or [field.name for field in spec.state_fields]) for index, spec in enumerate(decision.specs)
    ]
    assert found == expected


def test_windows_have_a_start_and_an_end(stream: DataFrame) -> None:
    for name in ("windows", "sliding windows", "rows of windows", "sessions"):
        make, mode, _ = CASES[name]
        (spec,) = decide(make(stream), mode).specs
        types = [field.type for field in spec.state_fields]
        assert "struct<start:timestamp,end:timestamp>" in types, name


def pinned(df: DataFrame, mode: str) -> StateSchema:
    return state_schema_of(decide(df, mode), Catalyst(df.sparkSession))


def test_another_alias_is_the_same_query(stream: DataFrame) -> None:
    """Also of what it groups by: Spark takes up its own state with another alias, too."""

    def query(key: str, window: str, count: str, by: str = "k") -> StateSchema:
        grouped = marked(stream).groupBy(F.window("ts", "1 minute").alias(window), (F.col(by) + 1).alias(key))
        return pinned(grouped.agg(F.count("*").alias(count)), "append")

    def visits(key: str, window: str) -> StateSchema:
        grouped = marked(stream).groupBy(F.col("k").alias(key), F.session_window("ts", "1 minute").alias(window))
        return pinned(grouped.count(), "append")

    assert compare(query("a", "w", "n"), query("b", "x", "m")) == []
    assert compare(visits("a", "w"), visits("b", "x")) == []
    assert compare(query("a", "w", "n"), query("a", "w", "n", by="v"))
    first, second = (pinned(stream.select(name).distinct(), "update") for name in ("v", "d"))
    assert compare(first, second)


def test_a_column_of_the_same_type_is_another_key(stream: DataFrame) -> None:
    """Where an operator has no aliases, only its columns' names differ."""
    frame = stream.selectExpr("k", "v", "v + 1 as w")
    pairs = (
        (frame.select("v").distinct(), frame.select("w").distinct()),
        (frame.groupBy("v").count(), frame.groupBy("w").count()),
        (frame.dropDuplicates(["v"]), frame.dropDuplicates(["w"])),
    )
    for before, now in pairs:
        assert compare(pinned(before, "update"), pinned(now, "update"))


def sql(text: str, mode: str = "update") -> Callable[[DataFrame], StateSchema]:
    """Pin a query over the view `events`, which has a watermark in append mode."""

    def make(stream: DataFrame) -> StateSchema:
        events = (marked(stream) if mode == "append" else stream).selectExpr("*", "ts as at")
        return pinned(stream.sparkSession.sql(text, events=events), mode)

    return make


def windows(arguments: str, mode: str = "complete", by: str = "k") -> Callable[[DataFrame], StateSchema]:
    return sql(f"select window({arguments}) w, count(*) from {{events}} group by window({arguments}), {by}", mode)


def top(partition: str, order: str, below: str = "*") -> Callable[[DataFrame], StateSchema]:
    rank = f"row_number() over (partition by {partition} order by {order})"
    return sql(f"select * from (select k, v, {rank} r from (select {below} from {{events}})) where r < 3")


def over(function: str, partition: str = "k") -> Callable[[DataFrame], StateSchema]:
    frames = f"over (partition by {partition} order by v + 1 rows 2 preceding)"
    other = "sum(d) over (partition by k + 1 order by v rows 1 preceding)"
    return sql(f"select k, {function} {frames} a, {other} b from {{events}}")


def sample(df: DataFrame) -> StateSchema:
    """PySpark draws the seeds of both calls of `rand`."""
    at = F.expr("ts") + F.make_dt_interval(secs=F.rand() * 10)
    rank = F.row_number().over(Window.partitionBy("k", F.window(at, "1 minute")).orderBy(F.rand()))
    return pinned(df.withColumn("r", rank).where("r <= 3"), "update")


def sets(clause: str) -> Callable[[DataFrame], StateSchema]:
    return sql(f"select k + 1, s, count(*) from {{events}} group by {clause}")


NO_KEYS = "select count(*) from {events} group by grouping sets (())"
UNION = (
    "select w, count(*) from (select window(ts, '1 minute') w from {{events}} union all "
    "select window(ts, '{} minutes') w from {{events}}) group by w"
)
COMPUTED = {
    "a size": (
        windows("ts, '10 minutes'"),
        windows("ts, '5 minutes'"),
        "the query has windows of 5 minutes of ts; its checkpoint has windows of 10 minutes of ts",
    ),
    "a slide and a start": (
        windows("ts, '10 minutes', '5 minutes'", "update"),
        windows("ts, '10 minutes', '2 minutes', '1 minute'", "update"),
        "the query has windows of 10 minutes every 2 minutes (startTime 1 minute) of ts; "
        "its checkpoint has windows of 10 minutes every 5 minutes of ts",
    ),
    "a size that is no multiple of its slide": (
        windows("ts, '10 minutes', '4 minutes'", "append"),
        windows("ts, '10 minutes', '3 minutes'", "append"),
        "the query has windows of 10 minutes every 3 minutes of ts; "
        "its checkpoint has windows of 10 minutes every 4 minutes of ts",
    ),
    "a time": (
        windows("ts + interval 1 hour, '10 minutes'"),
        windows("ts + interval 2 hours, '10 minutes'"),
        "the query has windows of 10 minutes of CAST(ts + INTERVAL '02' HOUR AS TIMESTAMP); "
        "its checkpoint has windows of 10 minutes of CAST(ts + INTERVAL '01' HOUR AS TIMESTAMP)",
    ),
    "a time of windows that Millpond assigns": (
        windows("ts, '10 minutes'", "append"),
        windows("at, '10 minutes'", "append"),
        "the query has windows of at; its checkpoint has windows of ts",
    ),
    "windows of a projection": (
        sql("select w, count(*) from (select window(ts, '10 minutes') w from {events}) group by w", "complete"),
        sql("select w, count(*) from (select window(ts, '5 minutes') w from {events}) group by w", "complete"),
        "the query has windows of 5 minutes of ts; its checkpoint has windows of 10 minutes of ts",
    ),
    "a part of windows": (
        sql("select count(*) from {events} group by window(ts, '10 minutes').start", "complete"),
        sql("select count(*) from {events} group by window(ts, '5 minutes').start", "complete"),
        "the query has windows of 5 minutes of ts; its checkpoint has windows of 10 minutes of ts",
    ),
    "windows of which rows are distinct": (
        sql("select distinct window(ts, '10 minutes') w from {events}"),
        sql("select distinct window(ts, '5 minutes') w from {events}"),
        "the query has windows of 5 minutes of ts; its checkpoint has windows of 10 minutes of ts",
    ),
    "sessions": (
        sql("select count(*) from {events} group by session_window(ts, '10 minutes')", "append"),
        sql("select count(*) from {events} group by session_window(at, '10 minutes')", "append"),
        "the query has sessions of at; its checkpoint has sessions of ts",
    ),
    "grouping sets": (
        sets("rollup(k + 1, s)"),
        sets("cube(k + 1, s)"),
        "the query has grouping sets (((k + 1), s), ((k + 1)), (s), ()); "
        "its checkpoint has grouping sets (((k + 1), s), ((k + 1)), ())",
    ),
    "windows of some grouping sets": (
        sql("select count(*) from {events} group by grouping sets ((k), (window(ts, '10 minutes')))"),
        sql("select count(*) from {events} group by grouping sets ((k), (window(ts, '5 minutes')))"),
        "the query has windows of 5 minutes of ts; its checkpoint has windows of 10 minutes of ts",
    ),
    "an order": (
        top("k", "v * 2 desc"),
        top("k", "v * 3 desc"),
        "the query has ORDER BY (v * CAST(3 AS BIGINT)); its checkpoint has ORDER BY (v * CAST(2 AS BIGINT))",
    ),
    "partitions": (
        top("k % 2", "v"),
        top("k % 3", "v"),
        "the query has PARTITION BY (k % 3); its checkpoint has PARTITION BY (k % 2)",
    ),
    "an argument": (
        over("sum(v * 2)"),
        over("sum(v * 3)"),
        "the query has a function of (v * CAST(3 AS BIGINT)); its checkpoint has a function of (v * CAST(2 AS BIGINT))",
    ),
    "variables of a function": (
        top("k", "aggregate(arr, 0, (x, y) -> x - y)"),
        top("k", "aggregate(arr, 0, (x, y) -> y - x)"),
        "the query has ORDER BY aggregate(arr, 0, lambdafunction((x2 - x1), x1, x2), lambdafunction(x1, x1)); its "
        "checkpoint has ORDER BY aggregate(arr, 0, lambdafunction((x1 - x2), x1, x2), lambdafunction(x1, x1))",
    ),
    "windows of a union": (
        sql(UNION.format(5), "complete"),
        sql(UNION.format(6), "complete"),
        "the query has windows of 1 minute of ts and windows of 6 minutes of ts; "
        "its checkpoint has windows of 1 minute of ts and windows of 5 minutes of ts",
    ),
    "one of several projected partitions": (
        over("sum(v * 2)", "k % 2"),
        over("sum(v * 2)", "k % 3"),
        "the query has PARTITION BY (k % 3); its checkpoint has PARTITION BY (k % 2)",
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_spark_computes_below_an_operator_is_compared(stream: DataFrame, name: str) -> None:
    """The operator reads only columns, whose names and types stay."""
    before, now, difference = COMPUTED[name]
    first = before(stream)
    assert before(stream) == first
    assert [line.partition(": ")[2] for line in compare(first, now(stream))] == [difference]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (top("k", "v desc", "k, v * 2 as v"), top("k", "v desc", "k, v * 3 as v")),
        *(
            (
                sql(f"select count(*) from {{events}} group by session_window(ts, '{gap} minutes')", "append"),
                sql("select count(*) c from {events} e group by session_window(e.ts, '7 minutes')", "append"),
            )
            for gap in (5, 7)
        ),
        (sets("rollup(k + 1, s)"), sets("grouping sets ((k + 1, s), (k + 1), ())")),
        *(
            (sets(clause), sets(clause))
            for clause in ("k + 1, s grouping sets ((k + 1), ())", "k + 1, s grouping sets (())")
        ),
        (sql(NO_KEYS), sql(NO_KEYS)),
        (sample, sample),
    ],
)
def test_what_may_change_below_an_operator(
    stream: DataFrame, before: Callable[[DataFrame], StateSchema], now: Callable[[DataFrame], StateSchema]
) -> None:
    """Projections under the same name, gaps of sessions, aliases, another way to write the same, and seeds."""
    assert compare(before(stream), now(stream)) == []


def test_instants_are_compared_in_any_time_zone(stream: DataFrame) -> None:
    def started(zone: str, instant: str) -> StateSchema:
        with changed_settings(stream.sparkSession, {TIME_ZONE: zone}, {TIME_ZONE: "UTC"}):
            return top("k", f"ts < timestamp'{instant}'")(stream)

    before = started("UTC", "2024-01-01 00:00:00")
    assert compare(before, started("Asia/Tokyo", "2024-01-01 00:00:00Z")) == []
    (line,) = compare(before, started("Asia/Tokyo", "2024-01-01 00:00:00"))
    assert "TIMESTAMP '2023-12-31T15:00:00" in line.partition("; its checkpoint")[0]


class Idle(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("value", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        yield from ()

    def close(self) -> None:
        pass


def with_windows(df: DataFrame, size: str) -> DataFrame:
    return marked(df).select("k", F.window("ts", size).alias("w"))


BY_WINDOWS: dict[str, Callable[[DataFrame, str], DataFrame]] = {
    "a join": lambda df, size: with_windows(df, size).join(with_windows(df, size), ["k", "w"]),
    "a deduplication": lambda df, size: with_windows(df, size).dropDuplicates(["w"]),
    "groups of a function": lambda df, size: (
        marked(df).groupBy(F.window("ts", size)).applyInPandas(lambda group: group[["k"]], "k int")
    ),
    "groups with state": lambda df, size: (
        with_windows(df, size)
        .groupBy("w")
        .applyInPandasWithState(lambda key, rows, state: rows, "k int", "n int", "append", "NoTimeout")
    ),
    "a processor": lambda df, size: (
        with_windows(df, size).groupBy("w").transformWithStateInPandas(Idle(), "k int", "append", "none")
    ),
}


@pytest.mark.parametrize("name", BY_WINDOWS)
def test_windows_by_which_other_operators_have_their_rows_are_compared(stream: DataFrame, name: str) -> None:
    def windowed(size: str) -> StateSchema:
        decision = decide(BY_WINDOWS[name](stream, size), "append", map_groups="window")
        assert decision.on_millpond, decision.operators
        return state_schema_of(decision, Catalyst(stream.sparkSession))

    before = windowed("10 minutes")
    assert windowed("10 minutes") == before
    (line,) = compare(before, windowed("5 minutes"))
    assert "the query has windows of 5 minutes" in line

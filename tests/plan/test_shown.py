"""The names under which the state of each kind of operator is shown, and that aliases do not bind a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.checkpoint.state_schema import StateSchema
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.plan.state_column_names import state_column_names
from millpond.query.schema.comparison import compare
from millpond.query.schema.matching import state_schema_of

Make = Callable[[DataFrame], DataFrame]


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

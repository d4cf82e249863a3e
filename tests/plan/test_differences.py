"""Messages of a restart with a query other than the one that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from millpond.checkpoint.state_schema import plain
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.query.schema.differences import differences
from millpond.query.schema.matching import state_schema_of

Make = Callable[[DataFrame], DataFrame]


def pinned(df: DataFrame, mode: str, changes: str = "upsert", map_groups: str = "batch") -> dict[str, object]:
    decision = decide(df, mode, changes, map_groups=map_groups)
    assert decision.on_millpond
    query: dict[str, object] = plain(state_schema_of(decision, Catalyst(df.sparkSession)))
    return query


def by_k(*functions: str, by: str = "k") -> Make:
    return lambda df: df.groupBy(F.expr(by)).agg(*map(F.expr, functions))


def windows(size: str, slide: str | None = None, delay: str = "1 minute") -> Make:
    return lambda df: df.withWatermark("ts", delay).groupBy(F.window("ts", size, slide or size), "k").count()


def top(
    order: str, condition: str = "r <= 3", rank: str = "row_number()", by: str = "k", columns: str = "k, r"
) -> Make:
    return lambda df: (
        df.withColumn("r", F.expr(f"{rank} over (partition by {by} order by {order})"))
        .where(condition)
        .selectExpr(*columns.split(", "))
    )


def over(function: str, rows: int) -> Make:
    return lambda df: df.selectExpr("k", f"{function} over (partition by k order by v rows {rows} preceding) a")


def joined(how: str, minutes: int = 1, columns: tuple[str, ...] = ("v",), more: str = "") -> Make:
    def make(df: DataFrame) -> DataFrame:
        marked = df.withWatermark("ts", "1 minute")
        left = marked.select("k", "ts", *columns).alias("a")
        right = marked.selectExpr("k", "ts", "d", "v").alias("b")
        within = f"b.ts between a.ts - interval {minutes} minutes and a.ts"
        return left.join(right, F.expr(f"a.k = b.k and {within} {more}"), how).select("a.*", "b.d")

    return make


def deduplicated(*keys: str) -> Make:
    return lambda df: df.select("k", "v").dropDuplicates(list(keys))


K = "aggregate by k: "
SAID = {
    "another function": (
        by_k("sum(v)", "max(d)"),
        by_k("min(v)", "max(d)"),
        "update",
        [K + "the query computes min(v); its checkpoint computes sum(v)"],
    ),
    "an expression of functions": (
        by_k("sum(v * 2) + max(d)"),
        by_k("sum(v * 2) + min(d)"),
        "update",
        [K + "the query computes min(d); its checkpoint computes max(d)"],
    ),
    "one more": (
        by_k("sum(v)"),
        by_k("sum(v)", "max(d)"),
        "update",
        [K + "the query computes max(d); its checkpoint does not"],
    ),
    "one less": (
        by_k("count(1)", "sum(v)", "max(d)"),
        by_k("sum(v)", "max(d)"),
        "update",
        [K + "the query does not compute count(1); its checkpoint does"],
    ),
    "one less before others": (
        by_k("count(1)", "max(v)", "sum(d)"),
        by_k("count(1)", "sum(d)"),
        "update",
        [K + "the query does not compute max(v); its checkpoint does"],
    ),
    "another order of inputs": (
        by_k("max(v)", "sum(d)", "min(v)"),
        by_k("sum(d)", "max(v)", "min(v)"),
        "update",
        [
            K + "the query computes its functions in the order sum(d), max(v), min(v); "
            "its checkpoint in the order max(v), sum(d), min(v)"
        ],
    ),
    "another order, and one less": (
        by_k("max(v)", "sum(d)", "min(v)"),
        by_k("min(v)", "max(v)"),
        "update",
        [
            K + "the query computes its functions in the order min(v), max(v); "
            "its checkpoint in the order max(v), sum(d), min(v)",
            K + "the query does not compute sum(d); its checkpoint does",
        ],
    ),
    "another order": (
        by_k("sum(v)", "min(v)"),
        by_k("min(v)", "sum(v)"),
        "update",
        [
            K
            + "the query computes its functions in the order min(v), sum(v); its checkpoint in the order sum(v), min(v)"
        ],
    ),
    "another type": (
        by_k("max(v)", "sum(v)"),
        lambda df: by_k("max(v)", "sum(v)")(df.withColumn("v", F.col("v").cast("int"))),
        "update",
        [
            K + "the query computes max(v) of int; its checkpoint of bigint",
            K + "the query's max(v) gives int; its checkpoint's gives bigint",
            K + "the query computes sum(v) of int; its checkpoint of bigint",
        ],
    ),
    "a filter": (
        by_k("count(v)"),
        by_k("count(v) filter (where b)"),
        "update",
        [K + "the query computes count(v) FILTER (WHERE b); its checkpoint computes count(v)"],
    ),
    "distinct": (
        by_k("count(v)"),
        by_k("count(distinct v)"),
        "update",
        [K + "the query computes count(DISTINCT v); its checkpoint computes count(v)"],
    ),
    "an option": (
        by_k("first(v)"),
        by_k("first(v, true)"),
        "update",
        [K + "the query's first(v) ignores nulls; its checkpoint's takes nulls"],
    ),
    "another key": (
        by_k("sum(v)"),
        by_k("sum(v)", by="s"),
        "update",
        [K + "the query groups by (s); its checkpoint groups by (k)"],
    ),
    "a key's type": (
        by_k("sum(v)"),
        lambda df: by_k("sum(v)")(df.withColumn("k", F.col("k").cast("bigint"))),
        "update",
        [K + "the query groups by (k bigint); its checkpoint groups by (k int)"],
    ),
    "more keys": (
        lambda df: df.groupBy("k").count(),
        lambda df: df.groupBy("s", "k").count(),
        "update",
        [K + "the query groups by (s, k); its checkpoint groups by (k)"],
    ),
    "order of keys": (
        lambda df: df.groupBy("k", "s").count(),
        lambda df: df.groupBy("s", "k").count(),
        "update",
        ["aggregate by k, s: the query groups by (s, k); its checkpoint groups by (k, s)"],
    ),
    "windows": (
        windows("1 minute"),
        windows("90 seconds"),
        "append",
        ["the query has windows of 1 minute 30 seconds; its checkpoint has windows of 1 minute"],
    ),
    "slides": (
        windows("10 minutes", "5 minutes"),
        windows("10 minutes", "1 minute"),
        "append",
        [
            "the query has windows of 10 minutes every 1 minute; "
            "its checkpoint has windows of 10 minutes every 5 minutes"
        ],
    ),
    "sessions": (
        lambda df: df.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 minute"), "k").count(),
        lambda df: df.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 minute"), "s").count(),
        "append",
        ["the query groups by sessions and (s); its checkpoint groups by sessions and (k)"],
    ),
    "a time": (
        lambda df: df.groupBy("k", "ts").count(),
        lambda df: df.withWatermark("ts", "1 minute").groupBy("k", "ts").count(),
        "update",
        [
            "aggregate by k, ts: the query keeps groups until the watermark passes ts; "
            "its checkpoint keeps groups for ever"
        ],
    ),
    "another operator": (
        by_k("sum(v)"),
        deduplicated("k"),
        "update",
        ["the query has 'deduplicate by k' where its checkpoint has 'aggregate by k'"],
    ),
    "one more operator": (
        lambda df: df.groupBy("k").count(),
        lambda df: df.dropDuplicates(["s"]).groupBy("k").count(),
        "update",
        [
            "the query has 2 stateful operators on Millpond; its checkpoint has 1 stateful operator",
            "the query has 'deduplicate by s'; its checkpoint has none",
        ],
    ),
    "one less operator": (
        lambda df: df.dropDuplicates(["s"]).groupBy("k").count(),
        lambda df: df.groupBy("k").count(),
        "update",
        [
            "the query has 1 stateful operator on Millpond; its checkpoint has 2 stateful operators",
            "the query has no 'deduplicate by s'; its checkpoint has one",
        ],
    ),
    "keys of a deduplication": (
        deduplicated("k"),
        deduplicated("k", "v"),
        "append",
        ["deduplicate by k: the query deduplicates by (k, v); its checkpoint deduplicates by (k)"],
    ),
    "a rank": (
        top("v desc"),
        top("v desc", rank="rank()"),
        "update",
        [
            "row_number() over rows of each k: the query keeps rows with rank() up to 3; "
            "its checkpoint keeps rows with row_number() up to 3"
        ],
    ),
    "how many": (
        top("v"),
        top("v", "r <= 5"),
        "update",
        ["the query keeps rows with row_number() up to 5; its checkpoint keeps rows with row_number() up to 3"],
    ),
    "an order": (top("v desc"), top("v"), "update", ["the query orders by (v); its checkpoint orders by (v desc)"]),
    "a column": (
        top("v"),
        top("v", columns="k, r, s"),
        "update",
        ["row_number() over rows of each k: the query keeps the columns ("],
    ),
    "rows before": (
        over("sum(v)", 2),
        over("sum(v)", 5),
        "update",
        [
            "the query computes its functions over (5 rows) preceding the current one; "
            "its checkpoint computes its functions over (2 rows)"
        ],
    ),
    "a join": (
        joined("inner"),
        joined("left_outer"),
        "append",
        ["inner join: the query has a join of the kind left outer; its checkpoint has a join of the kind inner"],
    ),
    "a range": (
        joined("left_outer"),
        joined("left_outer", 2),
        "append",
        [
            "the query joins rows whose left time is from 0 seconds to 2 minutes after the right one; "
            "its checkpoint joins rows whose left time is from 0 seconds to 1 minute after the right one",
            "the query keeps right rows until the watermark is 2 minutes 1 millisecond past them; "
            "its checkpoint keeps right rows until the watermark is 1 minute 1 millisecond past them",
        ],
    ),
    "a condition": (
        joined("left_outer"),
        joined("left_outer", more="and a.v < b.v"),
        "append",
        ["the query has (left.v < right."],
    ),
    "columns of a join": (
        joined("inner"),
        joined("inner", columns=("v", "s")),
        "append",
        [
            "inner join: the query shows the left columns (k, ts, v, s); "
            "its checkpoint shows the left columns (k, ts, v)"
        ],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_a_difference_in_plain_words(stream: DataFrame, name: str) -> None:
    before, now, mode, said = SAID[name]
    lines = differences(pinned(before(stream), mode), pinned(now(stream), mode))
    assert len(lines) >= len(said)
    for line, wanted in zip(lines, said, strict=False):
        assert wanted in line
    assert not any("spec" in line or "[" in line for line in lines)


def test_modes_and_changes(stream: DataFrame) -> None:
    counts = by_k("count(1)")(stream)
    (line,) = differences(pinned(counts, "update"), pinned(counts, "complete"))
    assert line.endswith("the query runs in output mode complete; its checkpoint runs in output mode update")
    line, places = differences(pinned(counts, "update"), pinned(counts, "update", "all"))
    assert "the query gives out also which rows are gone" in line
    assert places.startswith("the query has operators whose rows change"), "what is above them is compared, too"


def test_results_may_have_other_names_and_functions_be_called_with_nothing_else(stream: DataFrame) -> None:
    before, renamed, now = (
        pinned(by_k(text)(stream), "update") for text in ("sum(v) as a", "sum(v) as b", "sum(v + 1) as a")
    )
    assert differences(before, renamed) == []
    (line,) = differences(before, now)
    assert line.startswith("aggregate by k: the query computes sum((v + ")
    nameless = {**before, "operators": [{**one, "functions": []} for one in before["operators"]]}  # type: ignore[attr-defined]
    assert differences(nameless, now) == [], "what is not known is no difference"


def test_views_and_aliases_may_have_other_names(stream: DataFrame) -> None:
    """Some jobs make new ones at each start."""

    def summed(view: str, text: str) -> dict[str, object]:
        return pinned(stream.alias(view).groupBy("k").agg(F.expr(text)), "update")

    text = "sum({0}.v) filter (where {0}.s = 'a.b' and `{0}`.d > 1.5)"
    before = summed("one", text.format("one"))
    assert before == summed("other", text.format("other"))
    assert differences(before, summed("one", text.format("one").replace("a.b", "c.b"))) != []
    assert differences(before, summed("one", text.format("one").replace("1.5", "2.5"))) != []


def test_computed_keys_and_functions_have_no_names_of_views(stream: DataFrame) -> None:
    """Spark evaluates `nullif` and `between` as other expressions, and makes their SQL from what was written."""

    def counted(view: str) -> dict[str, object]:
        groups = stream.alias(view).groupBy(F.expr(f"date({view}.ts)"), F.expr(f"nullif({view}.k, 1)").alias("n"))
        function = f"count(nullif({view}.v, {view}.k)) filter (where {view}.v between 1 and 9)"
        return pinned(groups.agg(F.expr(function)), "update")

    def over_rows(view: str) -> dict[str, object]:
        function = f"sum({view}.v) over (partition by {view}.k order by {view}.v rows 2 preceding) as a"
        return pinned(stream.alias(view).selectExpr("k", function), "update")

    for query in (counted, over_rows):
        before = query("one")
        assert before == query("other")
        assert "one." not in str(before)


def test_fields_of_another_struct_are_another_function(stream: DataFrame) -> None:
    structs = stream.withColumn("other", F.col("st"))
    before, now = (pinned(by_k(f"sum({struct}.a)")(structs), "update") for struct in ("st", "other"))
    assert differences(before, now) == [K + "the query computes sum(other.`a`); its checkpoint computes sum(st.`a`)"]


def test_columns_of_both_sides_of_a_join_are_distinguished(stream: DataFrame) -> None:
    """Their names are equal, and those of the sides may change."""
    table = stream.sparkSession.range(3).selectExpr("cast(id as int) as k", "id as v", "timestamp_seconds(id) as ts")

    def joined_as(left: str, right: str, summed: str, key: str) -> dict[str, object]:
        rows = stream.select("k", "v", "ts").alias(left).join(table.alias(right), F.expr(f"{left}.k = {right}.k"))
        return pinned(rows.groupBy(F.expr(f"date({key}.ts)")).agg(F.expr(f"sum({summed}.v)")), "update")

    before = joined_as("l", "r", "l", "l")
    assert joined_as("one", "two", "one", "one") == before
    title = "aggregate by CAST(ts AS DATE): "
    assert differences(before, joined_as("l", "r", "r", "l")) == [
        title + "the query computes sum(v#2); its checkpoint computes sum(v)"
    ]
    assert joined_as("l", "r", "r", "r") == joined_as("one", "two", "two", "two")
    assert differences(before, joined_as("l", "r", "l", "r")) == [
        title + "the query has 'aggregate by CAST(ts#2 AS DATE)'"
    ]


@pytest.mark.parametrize(
    "query",
    [
        lambda rows, key: rows.groupBy(F.col(f"{key}.s")).agg(F.sum("v")),
        lambda rows, key: rows.selectExpr(f"sum(v) over (partition by {key}.s order by v rows 2 preceding) as a"),
        lambda rows, key: rows.selectExpr(
            f"{key}.s", f"row_number() over (partition by {key}.s order by v) as r"
        ).where("r <= 3"),
        lambda rows, key: rows.selectExpr(f"sum(v) over (partition by v order by {key}.s rows 2 preceding) as a"),
        lambda rows, key: rows.selectExpr(f"{key}.s", "row_number() over (partition by v order by v) as r").where(
            "r <= 3"
        ),
        lambda rows, key: rows.select(F.col(f"{key}.s"), "v").dropDuplicates(["s"]),
    ],
    ids=["aggregate", "over", "rank", "over, order", "rank, kept", "deduplicate"],
)
def test_plain_keys_of_both_sides_of_a_join_are_distinguished(
    stream: DataFrame, query: Callable[[DataFrame, str], DataFrame]
) -> None:
    table = stream.sparkSession.range(3).selectExpr("cast(id as int) as k", "string(id) as s")

    def joined_as(left: str, right: str, key: str) -> dict[str, object]:
        # At each start, Spark gives columns other numbers.
        events = stream.selectExpr("k + 0 as k", "upper(s) as s", "v + 0 as v")
        rows = events.alias(left).join(table.alias(right), F.expr(f"{left}.k = {right}.k"))
        return pinned(query(rows, key), "update")

    before, now = joined_as("l", "r", "l"), joined_as("l", "r", "r")
    assert joined_as("one", "two", "one") == before
    assert joined_as("one", "two", "two") == now
    (line,) = differences(before, now)
    assert "s#2" in line.partition("; its checkpoint")[0]


def test_columns_of_the_users_functions_are_compared(stream: DataFrame) -> None:
    """Slots keep them, and know the functions neither by name nor by code: these may change."""

    @F.pandas_udf("double")  # type: ignore[call-overload]
    def mean(x: pd.Series) -> float:
        return float(x.mean())

    @F.pandas_udf("double")  # type: ignore[call-overload]
    def ratio(x: pd.Series, y: pd.Series) -> float:
        return float(x.sum() / y.sum())

    def computed(*functions: Column) -> dict[str, object]:
        rows = stream.selectExpr("*", "v + 0 as w", "d + 0 as e").withWatermark("ts", "1 minute")
        return pinned(rows.groupBy(F.window("ts", "1 minute"), "k").agg(*functions), "append")

    def changed(before: dict[str, object], *functions: Column) -> list[str]:
        return [line.removeprefix("aggregate by window, k: ") for line in differences(before, computed(*functions))]

    before = computed(ratio("v", "w"), F.sum("d"))
    assert computed(ratio("v", "w"), F.sum("d")) == before
    assert changed(before, ratio("v", "w").alias("r"), mean("w"), F.sum("d")) == []
    of_columns = "the query computes your functions of ({}); its checkpoint computes your functions of (v, w)"
    assert changed(before, ratio("w", "v"), F.sum("d")) == [of_columns.format("w, v")]
    assert changed(before, ratio("v", F.col("w") + F.col("v")), F.sum("d")) == [of_columns.format("v, (w + v)")]
    other_sum = ["the query computes sum(e); its checkpoint computes sum(d)"]
    assert changed(before, ratio("v", "w"), F.sum("e")) == other_sum
    known = [{**one, "functions": one["functions"][:1]} for one in before["operators"]]  # type: ignore[attr-defined]
    nameless = {**before, "operators": known}
    assert changed(nameless, ratio("w", "v"), F.sum("d")) == [], "what is not known is no difference"
    assert changed(nameless, ratio("v", "w"), F.sum("e")) == other_sum


def test_columns_of_mapped_groups_are_compared(stream: DataFrame) -> None:
    def mapped(*columns: str) -> dict[str, object]:
        rows = stream.selectExpr("k + 0 as k", "ts", *columns).withWatermark("ts", "1 minute")
        groups = rows.groupBy(F.window("ts", "1 minute"), "k")
        return pinned(groups.applyInPandas(lambda group: group[["k"]], "k int"), "append", map_groups="window")

    before = mapped("v", "v + 1 as w")
    assert mapped("v", "v + 1 as w") == before
    assert mapped("v", "v + 2 as w") == before
    assert differences(before, mapped("v as w", "v + 1 as v")) == [
        "applyInPandas by window, k: the query computes your functions of (k, ts, w, v); "
        "its checkpoint computes your functions of (k, ts, v, w)"
    ]

"""What a restart says of a query that is not the one that wrote the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.checkpoint.differences import differences
from millpond.checkpoint.pinned import PinnedOperator, PinnedQuery, plain
from millpond.plan.decide import decide

Make = Callable[[DataFrame], DataFrame]


def pinned(df: DataFrame, mode: str, changes: str = "upsert") -> dict[str, object]:
    ours = decide(df, mode, changes).ours
    operators = [PinnedOperator(one.title, plain(one.spec.lasting), {}, one.functions) for one in ours]
    assert operators
    query: dict[str, object] = plain(PinnedQuery(1 << 15, tuple(operators)))
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
    "another function": (by_k("sum(v)", "max(d)"), by_k("min(v)", "max(d)"), "update", [K + "sum(v) became min(v)"]),
    "an expression of functions": (
        by_k("sum(v * 2) + max(d)"),
        by_k("sum(v * 2) + min(d)"),
        "update",
        [K + "max(d) became min(d)"],
    ),
    "one more": (by_k("sum(v)"), by_k("sum(v)", "max(d)"), "update", [K + "max(d) is new"]),
    "one less": (by_k("count(1)", "sum(v)", "max(d)"), by_k("sum(v)", "max(d)"), "update", [K + "count(1) is gone"]),
    "one less before others": (
        by_k("count(1)", "max(v)", "sum(d)"),
        by_k("count(1)", "sum(d)"),
        "update",
        [K + "max(v) is gone"],
    ),
    "another order of inputs": (
        by_k("max(v)", "sum(d)", "min(v)"),
        by_k("sum(d)", "max(v)", "min(v)"),
        "update",
        [K + "the functions are in another order: max(v), sum(d), min(v) became sum(d), max(v), min(v)"],
    ),
    "another order, and one less": (
        by_k("max(v)", "sum(d)", "min(v)"),
        by_k("min(v)", "max(v)"),
        "update",
        [
            K + "the functions are in another order: max(v), sum(d), min(v) became min(v), max(v)",
            K + "sum(d) is gone",
        ],
    ),
    "another order": (
        by_k("sum(v)", "min(v)"),
        by_k("min(v)", "sum(v)"),
        "update",
        [K + "the functions are in another order: sum(v), min(v) became min(v), sum(v)"],
    ),
    "another type": (
        by_k("max(v)", "sum(v)"),
        lambda df: by_k("max(v)", "sum(v)")(df.withColumn("v", F.col("v").cast("int"))),
        "update",
        [
            K + "max(v) was of bigint, and is of int now",
            K + "max(v) gave bigint, and gives int now",
            K + "sum(v) was of bigint, and is of int now",
        ],
    ),
    "a filter": (
        by_k("count(v)"),
        by_k("count(v) filter (where b)"),
        "update",
        [K + "count(v) became count(v) FILTER (WHERE b)"],
    ),
    "distinct": (by_k("count(v)"), by_k("count(distinct v)"), "update", [K + "count(v) became count(DISTINCT v)"]),
    "an option": (
        by_k("first(v)"),
        by_k("first(v, true)"),
        "update",
        [K + "first(v): ignore_nulls was False, and is True now"],
    ),
    "another key": (by_k("sum(v)"), by_k("sum(v)", by="s"), "update", [K + "the key k (int) became s (string)"]),
    "a key's type": (
        by_k("sum(v)"),
        lambda df: by_k("sum(v)")(df.withColumn("k", F.col("k").cast("bigint"))),
        "update",
        [K + "the key k was int, and is bigint now"],
    ),
    "more keys": (
        lambda df: df.groupBy("k").count(),
        lambda df: df.groupBy("s", "k").count(),
        "update",
        [K + "the key s (string) is new"],
    ),
    "order of keys": (
        lambda df: df.groupBy("k", "s").count(),
        lambda df: df.groupBy("s", "k").count(),
        "update",
        ["aggregate by k, s: the keys are in another order: k, s became s, k"],
    ),
    "windows": (
        windows("1 minute"),
        windows("90 seconds"),
        "append",
        ["windows of 1 minute became windows of 1 minute 30 seconds"],
    ),
    "slides": (
        windows("10 minutes", "5 minutes"),
        windows("10 minutes", "1 minute"),
        "append",
        ["slides of 5 minutes became slides of 1 minute"],
    ),
    "sessions": (
        lambda df: df.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 minute"), "k").count(),
        lambda df: df.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 minute"), "s").count(),
        "append",
        ["the key k (int) became s (string)"],
    ),
    "a time": (
        lambda df: df.groupBy("k", "ts").count(),
        lambda df: df.withWatermark("ts", "1 minute").groupBy("k", "ts").count(),
        "update",
        ["aggregate by k, ts: event time had no watermark, and has one now"],
    ),
    "another operator": (
        by_k("sum(v)"),
        deduplicated("k"),
        "update",
        ["the operator 'aggregate by k' became 'deduplicate by k'"],
    ),
    "one more operator": (
        lambda df: df.groupBy("k").count(),
        lambda df: df.dropDuplicates(["s"]).groupBy("k").count(),
        "update",
        [
            "1 stateful operator ran on Millpond, and there are 2 now",
            "the operator 'deduplicate by s' is new",
        ],
    ),
    "one less operator": (
        lambda df: df.dropDuplicates(["s"]).groupBy("k").count(),
        lambda df: df.groupBy("k").count(),
        "update",
        [
            "2 stateful operators ran on Millpond, and it is 1 now",
            "the operator 'deduplicate by s' is gone",
        ],
    ),
    "keys of a deduplication": (
        deduplicated("k"),
        deduplicated("k", "v"),
        "append",
        ["deduplicate by k: the key v (bigint) is new"],
    ),
    "a rank": (
        top("v desc"),
        top("v desc", rank="rank()"),
        "update",
        ["row_number() over rows of each k: the rank was row_number(), and is rank() now"],
    ),
    "how many": (top("v"), top("v", "r <= 5"), "update", ["the last rank that is kept was 3, and is 5 now"]),
    "an order": (top("v desc"), top("v"), "update", ["the order was by v desc, and is by v now"]),
    "a column": (
        top("v"),
        top("v", columns="k, r, s"),
        "update",
        ["row_number() over rows of each k: the column s (string) is new"],
    ),
    "rows before": (over("sum(v)", 2), over("sum(v)", 5), "update", ["sum(v): preceding rows was 2, and is 5 now"]),
    "a join": (
        joined("inner"),
        joined("left_outer"),
        "append",
        ["inner join: the join was inner, and is left outer now"],
    ),
    "a range": (
        joined("left_outer"),
        joined("left_outer", 2),
        "append",
        [
            "the greatest time between the left row and the right one was 1 minute, and is 2 minutes now",
            "right rows are kept until the watermark is 1 minute 1 millisecond past them in the checkpoint, and"
            " until the watermark is 2 minutes 1 millisecond past them now",
        ],
    ),
    "a condition": (
        joined("left_outer"),
        joined("left_outer", more="and a.v < b.v"),
        "append",
        ["the condition was none, and is (left.v < right."],
    ),
    "columns of a join": (
        joined("inner"),
        joined("inner", columns=("v", "s")),
        "append",
        ["inner join: the left column s (string) is new"],
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
    assert line == "aggregate by k: the output mode was update, and is complete now"
    (line,) = differences(pinned(counts, "update"), pinned(counts, "update", "all"))
    assert line == (
        "aggregate by k: in the checkpoint it tells new rows; now it tells also which rows are gone"
        " (spark.millpond.changes, or what is above)"
    )


def test_results_may_have_other_names_and_functions_be_called_with_nothing_else(stream: DataFrame) -> None:
    before, renamed, now = (
        pinned(by_k(text)(stream), "update") for text in ("sum(v) as a", "sum(v) as b", "sum(v + 1) as a")
    )
    assert differences(before, renamed) == []
    (line,) = differences(before, now)
    assert line.startswith("aggregate by k: sum(v) became sum((v + ")
    nameless = {**before, "operators": [{**one, "functions": []} for one in before["operators"]]}  # type: ignore[attr-defined]
    assert differences(nameless, now) == [], "what is not known is no difference"


def test_views_and_aliases_may_have_other_names(stream: DataFrame) -> None:
    """Some jobs make them anew at each start."""

    def summed(view: str, text: str) -> dict[str, object]:
        return pinned(stream.alias(view).groupBy("k").agg(F.expr(text)), "update")

    text = "sum({0}.v) filter (where {0}.s = 'a.b' and `{0}`.d > 1.5)"
    before = summed("one", text.format("one"))
    assert differences(before, summed("other", text.format("other"))) == []
    assert differences(before, summed("one", text.format("one").replace("a.b", "c.b"))) != []
    assert differences(before, summed("one", text.format("one").replace("1.5", "2.5"))) != []


def test_what_is_not_known_is_told_by_its_path() -> None:
    before, now = ({"key_groups": 1, "operators": [], "new": {"a": [n]}} for n in (1, 2))
    assert differences(before, now) == ["new.a[0] was 1, and is 2 now"]


def test_what_stands_between_operators_is_told() -> None:
    def pinned(computes: list[str], zone: str, ansi: str, *codes: str) -> dict[str, Any]:
        between = {
            "below": "aggregate by k",
            "above": "aggregate",
            "computes": computes,
            "functions": [["scored", code] for code in codes],
            "time_zones": [zone],
            "settings": {"spark.sql.ansi.enabled": ansi},
            "digest": "".join(computes) + zone + ansi,
        }
        return {"operators": [], "between": [between]}

    before = pinned(["Filter: (n >= 1)", "Aggregate: count(1)"], "UTC", "true")
    assert differences(before, before) == []
    assert differences(before, pinned(["Filter: (n >= 2)", "Aggregate: count(1)"], "UTC", "true")) == [
        "between 'aggregate by k' and 'aggregate': Filter: (n >= 1) became Filter: (n >= 2)"
    ]
    called = [pinned(["Filter: scored(n)"], "UTC", "true", *codes) for codes in (("a", "b"), ("a", "c"), ("a", ""))]
    assert differences(called[0], called[1]) == [
        "between 'aggregate by k' and 'aggregate': the code of the function scored is another (or what it refers to, "
        "or Python's release)"
    ]
    assert differences(called[0], called[2]) == []  # some code cannot be read
    assert differences(before, pinned(["Aggregate: count(1)"], "Asia/Tokyo", "false")) == [
        "between 'aggregate by k' and 'aggregate': Filter: (n >= 1) is gone",
        "between 'aggregate by k' and 'aggregate': the time zone was UTC, and is Asia/Tokyo now",
        "between 'aggregate by k' and 'aggregate': spark.sql.ansi.enabled was 'true', and is 'false' now",
    ]

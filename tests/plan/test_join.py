"""Specs of joins of two streams, and the joins that stay on Spark."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.decide import decide
from millpond.plan.explain import as_dict, as_text
from millpond.plan.reading.join import JoinReading
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.join import FROM_TIME, JoinSide, JoinSpec
from millpond.spec.operators import Field

SECOND = 1_000_000


@pytest.fixture(autouse=True)
def sides(stream: DataFrame) -> None:
    for name in ("l", "r"):
        columns = [f"{column} as {name}{column}" for column in ("k", "s", "v", "d", "ts", "arr")]
        stream.withWatermark("ts", "10 seconds").selectExpr(*columns).createOrReplaceTempView(name)
    stream.selectExpr("k as pk", "ts as pts", "v as pv").createOrReplaceTempView("plain")


def read(spark: SparkSession, query: str) -> tuple[JoinSpec, JoinReading]:
    (operator,) = decide(spark.sql(query), "append").operators
    assert operator.reason is None, operator.reason
    assert isinstance(operator.spec, JoinSpec)
    assert isinstance(operator.reading, JoinReading)
    return operator.spec, operator.reading


def test_spec(spark: SparkSession) -> None:
    spec, reading = read(
        spark,
        "select lk, lts, rd, ls from l join r on lk = rk and lts >= rts - interval 1 minute and lts < rts and lv < rv",
    )
    # Columns that are not read stay behind; keys and times are kept once.
    assert spec == JoinSpec(
        kind="inner",
        keys=(Field("key0", "int"),),
        null_safe=(False,),
        left=JoinSide(
            columns=(Field("lk", "int"), Field("ls", "string"), Field("lv", "bigint"), Field("lts", "timestamp")),
            places=(-1, 0, 1, FROM_TIME),
            values=(Field("value", "string"), Field("value_2", "bigint")),
            late="time",
            expiry_ms=-60_001,
        ),
        right=JoinSide(
            columns=(Field("rk", "int"), Field("rv", "bigint"), Field("rd", "double"), Field("rts", "timestamp")),
            places=(-1, 0, 1, FROM_TIME),
            values=(Field("value_3", "bigint"), Field("value_4", "double")),
            late="time",
            expiry_ms=0,
        ),
        earliest=-60 * SECOND,
        latest=-1,
    )
    assert [part.name for part in reading.above] == ["(lv < rv)"]


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("lts between rts - interval 5 seconds and rts + interval 1 minute", (-5 * SECOND, 60 * SECOND)),
        ("lts > rts", (1, None)),
        ("rts >= lts + interval 2 seconds", (None, -2 * SECOND)),
        ("lts - rts <= interval 1 minute and rts - lts < interval 1 second", (-SECOND + 1, 60 * SECOND)),
        ("lts + interval 1 second <= rts + interval 3 seconds", (None, 2 * SECOND)),
        ("lts <= rts + interval 1 day and lts >= rts", (0, 86_400 * SECOND)),
        ("lts <= rts and lts <= rts - interval 1 minute", (None, -60 * SECOND)),
        ("lts <= rts + make_interval(0, 0, 0, 0, 0, 1, 5)", (None, 65 * SECOND)),
    ],
)
def test_ranges_of_time(spark: SparkSession, condition: str, bounds: tuple[int | None, int | None]) -> None:
    spec, reading = read(spark, f"select lk from l join r on lk = rk and {condition}")
    assert (spec.earliest, spec.latest) == bounds
    assert reading.above == []


def test_a_day_is_no_number_of_seconds_where_clocks_are_changed(spark: SparkSession) -> None:
    query = "select lk from l join r on lk = rk and lts <= rts + interval 1 day and lts >= rts - interval 1 hour"
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        spec, reading = read(spark, query)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert (spec.earliest, spec.latest) == (-3600 * SECOND, None)
    assert len(reading.above) == 1


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("lts <= rts + interval 1 day", (None, 86_400 * SECOND)),
        ("lts - rts <= interval 1 hour", (None, 3600 * SECOND)),
        ("lts <= rts + interval 1 hour", (None, 3600 * SECOND)),
    ],
)
@pytest.mark.parametrize("zones", [("America/New_York", "UTC"), ("UTC", "America/New_York")])
def test_days_are_those_of_the_zone_in_which_the_query_was_made(
    spark: SparkSession, condition: str, bounds: tuple[int | None, int | None], zones: tuple[str, str]
) -> None:
    """Spark writes the session's zone into each expression when it makes the query, not when it starts it."""
    made, started = zones
    spark.conf.set("spark.sql.session.timeZone", made)
    try:
        query = spark.sql(f"select lk from l join r on lk = rk and {condition}")
        spark.conf.set("spark.sql.session.timeZone", started)
        (operator,) = decide(query, "append").operators
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert isinstance(operator.reading, JoinReading)
    spec = operator.reading.spec
    fixed = made == "UTC" or condition == "lts <= rts + interval 1 hour"
    assert (spec.earliest, spec.latest) == (bounds if fixed else (None, None))
    assert len(operator.reading.above) == (not fixed)


def test_the_watermarks_of_states_are_sparks(spark: SparkSession) -> None:
    near = "lts between rts - interval 30 seconds and rts + interval 1 minute"
    spec, reading = read(spark, f"select * except (larr, rarr) from l join r on lk = rk and {near}")
    assert (spec.left.expiry_ms, spec.right.expiry_ms) == (-30_001, -60_001)
    assert reading.output_lag_ms == 60_001
    spec, reading = read(spark, "select lk, lts from l join r on lk = rk and lts = rts")
    assert (spec.left.expiry_ms, spec.right.expiry_ms) == (0, 0)
    assert reading.output_lag_ms == 0
    spec, _ = read(spark, "select lk, pv from l join plain on lk = pk and lts >= pts")
    assert (spec.left.expiry_ms, spec.right.expiry_ms, spec.right.late) == (None, None, "none")
    assert spec.earliest == 0
    # Spark takes a comparison with a number for a bound of time.
    spec, _ = read(spark, f"select lk, lts from l left join r on lk = rk and {near} and lv > 2")
    assert spec.left.expiry_cap_ms == 2000


@pytest.mark.parametrize("right", ["r", "(select rk, rts, rv from r)", "(select pk rk, pts rts from plain)"])
@pytest.mark.parametrize("written", ["on", "where"])
@pytest.mark.parametrize("cast", ["to_timestamp({})", "cast({} as timestamp)"])
def test_a_needless_cast_of_an_event_time_among_the_keys(
    spark: SparkSession, right: str, written: str, cast: str
) -> None:
    """Spark's optimiser removes it, so the state of both sides expires by this key."""
    join = "join" if written == "on" else "cross join"
    equal = f"lk = rk and {cast.format('lts')} = {cast.format('rts')}"
    spec, _ = read(spark, f"select lk, lts from l {join} {right} {written} {equal}")
    plain, _ = read(spark, f"select lk, lts from l join {right} on lk = rk and lts = rts")
    assert spec == plain
    assert spec.expires


def test_conditions_of_outer_joins(spark: SparkSession) -> None:
    near = "lts between rts and rts + interval 1 minute"
    spec, _ = read(
        spark,
        f"select lk, lts, rk, rts from l left join r on lk = rk and {near} "
        "and (lv + 1 < rv or not ls <=> upper(rs)) and ld > 0",
    )
    assert spec.condition == ["or", ["<", ["left", 0], ["right", 0]], ["not", ["<=>", ["left", 1], ["right", 1]]]]
    assert spec.left.filtered
    assert not spec.right.filtered
    assert spec.left.keeps


def test_a_filter_makes_an_outer_join_an_inner_one(spark: SparkSession) -> None:
    spec, _ = read(spark, "select lk from l left join r on lk = rk and lts >= rts where rv > 1")
    assert spec.kind == "inner"


@pytest.mark.parametrize(("time", "kind"), [("2000-01-01", "left_outer"), ("2999-01-01", "inner")])
def test_whether_a_null_passes_a_filter_is_decided_by_the_time_now(spark: SparkSession, time: str, kind: str) -> None:
    """Spark evaluates the filter for a row without a partner; `now()` is a constant then."""
    where = f"coalesce(rts, timestamp'{time}') < now()"
    spec, _ = read(spark, f"select lk, rk from l left join r on lk = rk and lts = rts where {where}")
    assert spec.kind == kind


STAY = {
    "arithmetic across": ("select lk from l left join r on lk = rk and lts >= rts and lv + rv > 3", "MP-CONDITION"),
    "function across": (
        "select lk from l left join r on lk = rk and lts >= rts and concat(ls, rs) = 'x'",
        "MP-CONDITION",
    ),
    "a clock": ("select lk from l left join r on lk = rk and lts >= rts and (lv > 3 or rts > now())", "MP-CONDITION"),
    "intervals": (
        "select lk, long from l join (select *, make_dt_interval(rk) long from r) on lk = rk",
        "MP-INPUT-TYPE",
    ),
    "collated key": (
        "select lk from l join r on ls collate UTF8_LCASE = rs collate UTF8_LCASE",
        "MP-KEY-TYPE",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_stays_on_spark_with_a_reason(spark: SparkSession, name: str) -> None:
    query, code = STAY[name]
    (operator,) = decide(spark.sql(query), "append").operators
    assert operator.reason is not None
    assert operator.reason.code == code


def test_a_condition_with_a_table_that_may_change(spark: SparkSession, tmp_path: Path) -> None:
    """Spark looks into the table when a pair meets; a part of it that is kept with a row could not."""
    spark.range(3).write.parquet(str(tmp_path / "table"))
    spark.read.parquet(str(tmp_path / "table")).createOrReplaceTempView("some")
    query = "select lk from l {} join r on lk = rk and lts >= rts and lv < rv + (select max(id) from some)"
    (operator,) = decide(spark.sql(query.format("left")), "append").operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-CONDITION"
    (operator,) = decide(spark.sql(query.format("inner")), "append").operators
    assert operator.reason is None


def test_operators_above_lag(spark: SparkSession) -> None:
    near = "lts between rts - interval 30 seconds and rts + interval 1 minute"
    query = f"select window(lts, '1 minute'), count(*) from l join r on lk = rk and {near} group by 1"
    join, windows = decide(spark.sql(query), "append").specs
    assert isinstance(join, JoinSpec)
    assert isinstance(windows, AggregateSpec)
    assert join.lag_ms == 0
    assert windows.time is not None
    assert windows.time.lag_ms == 60_001


def test_a_join_without_watermark_does_not_hold_back_another_branch(stream: DataFrame) -> None:
    marked = stream.withWatermark("ts", "1 minute").select("k", "ts")
    joined = stream.alias("a").join(stream.alias("b"), "k").select("k", "a.ts")
    _, windows = decide(marked.union(joined).groupBy(F.window("ts", "1 minute")).count(), "append").specs
    assert isinstance(windows, AggregateSpec)
    assert windows.time is not None
    assert windows.time.lag_ms == 0


def test_explain(spark: SparkSession) -> None:
    decision = decide(spark.sql("select lk, rv from l join r on lk = rk and lts = rts"), "append")
    (operator,) = as_dict(decision)["operators"]
    assert operator["title"] == "inner join"
    assert operator["store"] == "ordered"
    assert operator["keys"] == ["key0: int", "key1: timestamp"]
    assert "[millpond 0] inner join" in as_text(decision)


@pytest.mark.parametrize("below", ["aggregate", "join", "deduplicate"])
def test_a_semi_join_that_spark_would_move(stream: DataFrame, below: str) -> None:
    """Below an aggregate, left rows meet right ones before they are grouped: others than those that come out above."""
    marked = stream.withWatermark("ts", "1 minute")
    right = marked.groupBy(F.window("ts", "1 minute").alias("w"), "k").count()
    left = {
        "aggregate": marked.groupBy(F.window("ts", "1 minute").alias("w"), "k").agg(F.sum("v")),
        "join": marked.groupBy(F.window("ts", "1 minute").alias("w"), "k").count().join(right, ["w", "k"]),
        "deduplicate": marked.select("k", F.window("ts", "1 minute").alias("w")).dropDuplicates(["k", "w"]),
    }[below]
    operator = decide(left.join(right, ["w", "k"], "left_semi"), "append").operators[-1]
    assert (operator.spec is None) == (below != "deduplicate")
    if operator.reason is not None:
        assert operator.reason.code == "MP-OPERATOR"
        assert "moves below its left side" in str(operator.reason)


def test_a_condition_without_columns_is_asked_of_both_sides(spark: SparkSession) -> None:
    """It may have another value in a later batch, so rows of either side that come now may have no partner."""
    now = "(select max(id) > 1 from range(3))"
    within = "lts >= rts and lts <= rts + interval 1 minute"
    _, reading = read(spark, f"select lk, rk from l full join r on lk = rk and {within} and {now}")
    assert [len(side.match_conditions) for side in (reading.left, reading.right)] == [1, 1]

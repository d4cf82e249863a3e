"""Which operators run on Millpond, what their specs say, and why the others stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

import millpond
from millpond.conf import read_settings
from millpond.errors import UnsupportedError
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import CLOCKS
from millpond.plan.catalyst.optimiser.rules import apply_rules
from millpond.plan.catalyst.optimiser.windows import needed_columns
from millpond.plan.catalyst.python import worker_settings
from millpond.plan.catalyst.session import STREAMING_CHECK
from millpond.plan.changelog.changes import may_split_updates
from millpond.plan.decide import decide
from millpond.plan.explain import as_dict
from millpond.query.schema.matching import state_schema_of
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import AggregateCall, Field, Pattern
from millpond.tasks.limits import MAX_BYTES, MAX_RECORDS, rows_per_batch

Make = Callable[[DataFrame, SparkSession], DataFrame]
ALL = read_settings({"spark.millpond.changes": "all"})
EXCLUDED = "spark.sql.optimizer.excludedRules"
RULES = "org.apache.spark.sql.catalyst.optimizer"


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Change a setting for a while."""
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name)


@pytest.mark.parametrize("time", ["'09:00'", "make_time(9, 0, 0)"])
def test_a_time_of_the_day_is_not_computed_at_the_start(spark: SparkSession, stream: DataFrame, time: str) -> None:
    """Spark plans each batch, and so makes a time of its day."""
    latest = stream.groupBy("k").agg(F.max("ts").alias("last"))
    with setting(spark, "spark.sql.timeType.enabled", "true"):
        plan = decide(latest.where(f"last >= cast({time} as timestamp)"), "update").root.node
    assert "as timestamp)" in str(plan.java)


def test_aggregate_spec(stream: DataFrame) -> None:
    df = stream.groupBy((F.col("k") + 1).alias("next"), "st").agg(
        F.count("*"), F.sum(F.col("v") * 2) + F.max("d"), F.expr("count(s) filter (where b)"), F.countDistinct("s", "v")
    )
    (operator,) = decide(df, "update").operators
    assert operator.spec == AggregateSpec(
        keys=(Field("next", "int"), Field("st", "struct<a:int,b:string>")),
        inputs=(
            Field("input0", "bigint"),
            Field("input1", "double"),
            Field("input2", "boolean"),
            Field("input3", "boolean"),
            Field("input4", "string"),
            Field("input5", "bigint"),
        ),
        calls=(
            AggregateCall("count", (), "bigint"),
            AggregateCall("sum", (0,), "bigint", options={"eval_mode": "ansi"}),
            AggregateCall("max", (1,), "double"),
            AggregateCall("count", (2,), "bigint", filter=3),
            AggregateCall("count", (4, 5), "bigint", distinct=True),
        ),
        output_mode="update",
    )


def test_sessions_whose_rows_are_kept(stream: DataFrame) -> None:
    sessions = stream.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 minute"), "k")
    for results in ([F.median("d")], [F.count("*"), F.mode("s")], [F.collect_set("v")], [F.count_distinct("v")]):
        (operator,) = decide(sessions.agg(*results), "append").operators
        assert operator.spec is not None
        assert operator.spec.keeps_rows
        assert operator.spec.access_pattern.store == "unaligned append"
    (operator,) = decide(sessions.agg(F.sum("d")), "append").operators
    assert operator.spec is not None
    assert operator.spec.access_pattern.store == "read-modify-write"


def test_the_pattern_can_be_asked_for_where_there_is_a_choice(stream: DataFrame, spark: SparkSession) -> None:
    marked = stream.withWatermark("ts", "1 minute")
    windows = marked.groupBy(F.window("ts", "2 minutes", "1 minute"), "k")
    sessions = marked.groupBy(F.session_window("ts", "1 minute"), "k")

    def store(df: DataFrame, pattern: Pattern, mode: str = "append") -> tuple[str, bool]:
        (operator,) = decide(df, mode, pattern=pattern).operators
        assert operator.spec is not None
        found = operator.spec.access_pattern
        return found.store, "asked for" in found.why

    for df, append in ((windows, "aligned append"), (sessions, "unaligned append")):
        counted = df.agg(F.count("*"), F.sum("v"))
        assert store(counted, "auto") == ("read-modify-write", False)
        assert store(counted, "append") == (append, True)
        assert store(counted, "rmw") == ("read-modify-write", False)
        assert store(df.agg(F.median("d")), "rmw") == (append, False)
    listed = windows.agg(F.collect_list("v"))
    assert store(listed, "auto") == ("aligned append", False)
    assert store(listed, "rmw") == ("read-modify-write", True)
    assert store(windows.agg(F.count("*")), "append", "update") == ("read-modify-write", False)
    assert store(stream.groupBy("k").count(), "append", "update") == ("read-modify-write", False)
    session = spark.newSession()
    session.conf.set("spark.millpond.store.pattern", "append")
    rates = session.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    counts = rates.groupBy(F.window("timestamp", "1 minute")).count()
    explained = millpond.explain(counts, "append", as_dict=True)
    assert explained is not None
    assert explained["operators"][0]["store"] == "aligned append"


def test_the_same_function_is_computed_once(stream: DataFrame) -> None:
    df = stream.groupBy("k").agg(F.sum("v"), F.sum("v").alias("again"), F.sum("v") + F.sum("v"), F.max("v"))
    (operator,) = decide(df, "update").operators
    assert isinstance(operator.spec, AggregateSpec)
    assert [call.function for call in operator.spec.calls] == ["sum", "max"]
    assert len(operator.spec.inputs) == 1


def test_counting_what_is_never_null_needs_no_input(spark: SparkSession) -> None:
    df = spark.readStream.format("rate").load().select(F.lit(1).alias("k"), F.lit("x").alias("s"))
    (operator,) = decide(df.groupBy("k").agg(F.count("s"), F.count(F.lit(1))), "update").operators
    assert isinstance(operator.spec, AggregateSpec)
    assert operator.spec.inputs == ()
    assert len(operator.spec.calls) == 2


def test_all_changes_come_out_or_it_is_an_error(stream: DataFrame, spark: SparkSession) -> None:
    counts = "select k, count(*) n from events group by k"
    assert decide(spark.sql(counts), "update", "all").all_changes
    assert not decide(spark.sql("select k from events"), "update", "all").all_changes
    both = spark.sql(f"{counts} union all {counts}")
    with pytest.raises(UnsupportedError, match=r"MP-CHANGES.*Union"):
        decide(both, "update", "all")
    assert not decide(both, "update").all_changes


def test_the_column_of_changes_has_a_name_of_its_own(stream: DataFrame, spark: SparkSession) -> None:
    with pytest.raises(UnsupportedError, match="has a column _op"):
        decide(spark.sql("select k as _OP, count(*) n from events group by k"), "update", "all")


def test_a_time_that_is_there_twice_closes_state(stream: DataFrame) -> None:
    df = stream.withWatermark("ts", "1 minute").select("k", "ts", "ts").dropDuplicates()
    (operator,) = decide(df, "append").operators
    assert isinstance(operator.spec, DeduplicateSpec)
    assert operator.spec.time is not None
    assert operator.spec.time.column in operator.spec.keys


def test_deduplicate_spec(stream: DataFrame) -> None:
    df = stream.select("k", "s", "arr", "v").dropDuplicates(["v", "k"])
    (operator,) = decide(df, "append").operators
    columns = (Field("k", "int"), Field("s", "string"), Field("arr", "array<int>"), Field("v", "bigint"))
    assert isinstance(operator.spec, DeduplicateSpec)
    assert operator.spec.columns == columns
    assert sorted(operator.spec.keys) == [0, 3]


def test_deduplication_by_a_time_that_nobody_reads(stream: DataFrame) -> None:
    rows = stream.withWatermark("ts", "1 minute").dropDuplicates(["k", "v"])
    pinned = []
    for df in (rows, rows.select("k", "v")):
        decision = decide(df, "append")
        (operator,) = decision.operators
        assert isinstance(operator.spec, DeduplicateSpec)
        assert (operator.spec.time is None, operator.spec.unread_time) == (df is not rows,) * 2
        assert operator.needs_no_data_batches
        pinned.append(state_schema_of(decision, Catalyst(df.sparkSession)).operators)
    assert pinned[0] == pinned[1]  # whether it is read may change, as natively


def test_select_distinct_groups_by_all_columns(stream: DataFrame, spark: SparkSession) -> None:
    (operator,) = decide(spark.sql("select distinct k, s from events"), "update").operators
    assert isinstance(operator.spec, AggregateSpec)
    assert [field.name for field in operator.spec.keys] == ["k", "s"]
    assert operator.spec.calls == ()


def test_names_are_unique(stream: DataFrame) -> None:
    df = stream.select("k", F.col("v").alias("K"), F.col("s").alias("__hash")).dropDuplicates()
    (operator,) = decide(df, "append").operators
    assert isinstance(operator.spec, DeduplicateSpec)
    names = [field.name.lower() for field in operator.spec.columns]
    assert len(set(names)) == 3
    assert not any(name.startswith("__") for name in names)


def test_operators_are_numbered_bottom_up(stream: DataFrame) -> None:
    df = stream.dropDuplicates(["k"]).groupBy("s").count()
    first, second = decide(df, "update").operators
    assert isinstance(first.spec, DeduplicateSpec)
    assert isinstance(second.spec, AggregateSpec)
    assert (first.index, second.index) == (0, 1)


def test_stateless_queries_and_batch_aggregates_have_no_operators(stream: DataFrame, spark: SparkSession) -> None:
    assert decide(stream.filter("k > 1").select("v"), "append").operators == ()
    totals = spark.range(10).groupBy((F.col("id") % 3).alias("id")).count()
    assert decide(stream.join(totals, F.col("k") == F.col("id")), "append").operators == ()


@pytest.mark.parametrize(
    "text",
    [
        "with c as (select k, sum(v) as t from events group by k) select * from c where t > 1",
        "select * from (select s, max(v) from events group by s having count(*) > 1)",
        "select k, s, sum(v) from events group by rollup(k, s)",
        "select k + 1, count(*) from events group by 1",
        "select e.k, count(*) from events e join values (1, 'a') as t(k, name) on e.k = t.k group by e.k",
    ],
)
def test_sql(stream: DataFrame, spark: SparkSession, text: str) -> None:
    decision = decide(spark.sql(text), "update")
    assert [operator.index for operator in decision.operators] == [0]


def test_a_cte_read_twice_is_two_operators(stream: DataFrame, spark: SparkSession) -> None:
    text = "with c as (select k, sum(v) as t from events group by k) select * from c union all select * from c"
    assert [operator.index for operator in decide(spark.sql(text), "update").operators] == [0, 1]


STAY = {
    "append": (lambda df, _: df.groupBy("k").count(), "append", "MP-WATERMARK"),
    "sessions in update mode": (
        lambda df, _: df.groupBy(F.session_window("ts", "1 minute")).count(),
        "update",
        "MP-MODE",
    ),
    "sessions without watermark": (
        lambda df, _: df.groupBy(F.session_window("ts", "1 m")).count(),
        "append",
        "MP-WATERMARK",
    ),
    "distinct inputs in sessions": (
        lambda df, _: df.groupBy(F.session_window("ts", "1 minute")).agg(F.collect_set("k")),
        "complete",
        "MP-SESSION-DISTINCT",
    ),
    "function": (lambda df, _: df.groupBy("k").agg(F.expr("histogram_numeric(d, 5)")), "update", "MP-FUNCTION"),
    "whole groups": (lambda df, _: df.groupBy("k").agg(F.expr("percentile(d, 0.5)")), "update", "MP-WHOLE"),
    "whole sessions": (
        lambda df, _: df.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 m"), "k").agg(F.median("d")),
        "complete",
        "MP-WHOLE",
    ),
    "a field name twice": (lambda df, _: df.groupBy(F.struct("k", "k")).count(), "update", "MP-KEY-TYPE"),
    "a field name twice, carried": (
        lambda df, _: df.select("k", F.struct("v", "v").alias("st")).dropDuplicates(["k"]),
        "append",
        "MP-INPUT-TYPE",
    ),
    "interval key": (lambda df, _: df.groupBy(F.expr("make_dt_interval(k)")).count(), "update", "MP-KEY-TYPE"),
    "map key": (lambda df, _: df.groupBy("m").count(), "update", "MP-KEY-TYPE"),
    "collation": (
        lambda df, _: df.groupBy(F.expr("s collate UTF8_LCASE")).count(),
        "update",
        "MP-KEY-TYPE",
    ),
    "input": (lambda df, _: df.groupBy("k").agg(F.max(F.expr("s collate UNICODE"))), "update", "MP-INPUT-TYPE"),
    "interval": (lambda df, _: df.groupBy("k").agg(F.first(F.expr("make_dt_interval(k)"))), "update", "MP-INPUT-TYPE"),
    "variant": (lambda df, _: df.groupBy("k").agg(F.last(F.parse_json("s"))), "update", "MP-INPUT-TYPE"),
    "limit": (lambda df, _: df.limit(3), "append", "MP-OPERATOR"),
    "distinct inputs of many columns": (
        lambda df, _: df.groupBy("k").agg(F.count_distinct(*(F.col("v") + n for n in range(64)))),
        "update",
        "MP-KEYS",
    ),
    "a subquery over groups": (
        lambda df, s: s.sql(
            "select k, exists (select 1 from range(3) r where r.id = k), count(*) from {df} group by k", df=df
        ),
        "update",
        "MP-OPERATOR",
    ),
    "neither keys nor functions": (lambda df, _: df.agg(F.lit(1)), "update", "MP-OPERATOR"),
    "intersect": (lambda df, _: df.select("k").intersect(df.select("k")), "append", "MP-OPERATOR"),
    "except": (lambda df, _: df.select("k").exceptAll(df.select("k")), "append", "MP-OPERATOR"),
    "pandas": (
        lambda df, _: df.groupBy("k").applyInPandasWithState(
            lambda *_: iter(()), "k int", "n interval day to second", "update", "NoTimeout"
        ),
        "update",
        "MP-INPUT-TYPE",
    ),
    "pandas without keys": (
        lambda df, _: df.groupBy().applyInPandasWithState(lambda *_: iter(()), "k int", "n int", "update", "NoTimeout"),
        "update",
        "MP-PROCESSOR",
    ),
    "keys": (
        lambda df, _: df.groupBy(*[(F.col("v") + i).alias(f"k{i}") for i in range(65)]).count(),
        "update",
        "MP-KEYS",
    ),
    "join without keys": (
        lambda df, _: df.alias("a").join(df.alias("b"), F.expr("a.k < b.k")),
        "append",
        "MP-OPERATOR",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_stays_on_spark_with_a_reason(stream: DataFrame, spark: SparkSession, name: str) -> None:
    make, mode, code = STAY[name]
    (operator,) = decide(make(stream, spark), mode).operators
    assert operator.spec is None
    assert operator.reason is not None
    assert operator.reason.code == code
    assert str(operator.reason).startswith(f"{code}: ")


def joined(df: DataFrame, function: str) -> DataFrame:
    """An aggregate over the left side of a left outer join."""
    left, right = (df.withWatermark("ts", "1 minute").alias(name) for name in ("l", "r"))
    near = "l.k = r.k and l.ts between r.ts - interval 1 minute and r.ts + interval 1 minute"
    rows = left.join(right, F.expr(near), "left").select("l.ts", "l.v")
    return rows.groupBy(F.window("ts", "1 minute")).agg(F.expr(function))


def by_finer_groups(df: DataFrame, function: str) -> DataFrame:
    """An aggregate over one by another key, too."""
    window = F.window("ts", "1 minute").alias("w")
    finer = df.withWatermark("ts", "1 minute").groupBy(window, "k").agg(F.count("*").alias("n"), F.sum("v").alias("t"))
    return finer.groupBy("w").agg(F.expr(function))


MERGED = {
    "an outer join": (joined, "max(v)", "left outer join"),
    "only keys are read": (by_finer_groups, "max(k)", "aggregate"),
    "a sum of counts": (by_finer_groups, "sum(n)", "aggregate"),
}


@pytest.mark.parametrize("name", MERGED)
def test_operators_that_spark_removes_stay_there(stream: DataFrame, name: str) -> None:
    make, function, merged = MERGED[name]
    reasons = [str(operator.reason) for operator in decide(make(stream, function), "append").operators]
    assert len(reasons) == 2
    assert all(reason.startswith("MP-MERGED: ") and reason.endswith(f": {merged}") for reason in reasons)


@pytest.mark.parametrize(("make", "function"), [(joined, "sum(v)"), (by_finer_groups, "sum(t)")])
def test_operators_that_spark_keeps_run_here(stream: DataFrame, make: Callable[..., DataFrame], function: str) -> None:
    assert [operator.reason for operator in decide(make(stream, function), "append").operators] == [None, None]


def test_operators_that_spark_would_remove_run_here_where_spark_refuses_the_query(stream: DataFrame) -> None:
    rows = joined(stream, "max(v)")
    assert [operator.reason for operator in decide(rows, "update").operators] == [None, None]
    with setting(stream.sparkSession, STREAMING_CHECK, "false"):
        reasons = [operator.reason for operator in decide(rows, "update").operators]
        assert [reason and reason.code for reason in reasons] == ["MP-MERGED", "MP-MERGED"]


def test_operators_run_here_where_sparks_optimiser_fails(stream: DataFrame) -> None:
    """Spark computes a constant, which has no value, when it plans a batch."""
    failing = by_finer_groups(stream, "max(n) as n").where("n > cast('x' as int)")
    assert [operator.reason for operator in decide(failing, "append").operators] == [None, None]


def test_rules_that_the_user_excludes_are_not_applied(stream: DataFrame) -> None:
    left, right = (stream.withWatermark("ts", "1 minute").alias(name) for name in ("l", "r"))
    rows = left.join(right, F.expr("l.k = r.k and l.ts = r.ts"), "left").where("r.v > 2").select("l.k", "l.ts")
    with setting(stream.sparkSession, EXCLUDED, f" {RULES}.EliminateOuterJoin,{RULES}.ColumnPruning"):
        (operator,) = decide(rows, "append").operators
        assert operator.title == "left outer join"
        (operator, _) = decide(joined(stream, "max(v)"), "append").operators
        assert operator.reason is None


@pytest.mark.parametrize("rule", ["analysis.EliminateSubqueryAliases", "optimizer.ReplaceDistinctWithAggregate"])
def test_rules_that_cannot_be_excluded_are_applied(stream: DataFrame, rule: str) -> None:
    catalyst, rule = Catalyst(stream.sparkSession), f"org.apache.spark.sql.catalyst.{rule}"
    plan = catalyst.analyzed(stream.sparkSession.sql("select distinct k from events")).java
    with setting(stream.sparkSession, EXCLUDED, rule):
        assert not apply_rules(catalyst, [rule], plan).fastEquals(plan)


@pytest.mark.parametrize("mode", ["append", "complete"])
def test_sessions_that_spark_merges_before_the_exchange(stream: DataFrame, mode: str) -> None:
    """With this setting, a row is late by the session that it makes with others of its input partition."""
    name = "spark.sql.streaming.sessionWindow.merge.sessions.in.local.partition"
    sessions = stream.withWatermark("ts", "1 minute").groupBy(F.session_window("ts", "1 minute"), "k").count()
    with setting(stream.sparkSession, name, "true"):
        (operator,) = decide(sessions, mode).operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-OPERATOR"
    assert name in str(operator.reason)
    (operator,) = decide(sessions, mode).operators
    assert operator.reason is None


@pytest.mark.parametrize("value", ["False", "FALSE"])
def test_booleans_are_read_as_spark_reads_them(stream: DataFrame, value: str) -> None:
    windows = stream.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute")).count()
    with setting(stream.sparkSession, "spark.sql.streaming.statefulOperator.allowMultiple", value):
        (operator,) = decide(windows, "append").operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-SINGLE"


def joined_by_casts(marked: DataFrame) -> DataFrame:
    left, right = (marked.selectExpr(f"k as {side}k", f"cast(ts as timestamp) as {side}t") for side in ("l", "r"))
    return left.join(right, F.expr("lk = rk and lt between rt - interval 1 minute and rt"))


HIDDEN: dict[str, tuple[Callable[[DataFrame], DataFrame], str]] = {
    "the same name": (lambda df: df.withColumn("ts", F.to_timestamp("ts")).dropDuplicates(["k", "ts"]), "append"),
    "another name": (
        lambda df: df.select("k", F.col("ts").cast("timestamp").alias("t")).dropDuplicates(["k", "t"]),
        "append",
    ),
    "another name beside it": (
        lambda df: df.withColumn("t", F.col("ts").cast("timestamp")).dropDuplicates(["k", "t"]),
        "append",
    ),
    "another name twice": (
        lambda df: df.select("k", F.to_timestamp("ts").alias("t")).selectExpr("k", "t as u").dropDuplicates(["k", "u"]),
        "append",
    ),
    "a field": (
        lambda df: (
            df.select(F.struct("k", "ts").alias("s"))
            .select("s.k", F.to_timestamp("s.ts").alias("t"))
            .dropDuplicates(["k", "t"])
        ),
        "append",
    ),
    "a group": (lambda df: df.withColumn("t", F.col("ts").cast("timestamp")).groupBy("t").count(), "update"),
    "a join": (joined_by_casts, "append"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_needless_cast_of_an_event_time(stream: DataFrame, name: str) -> None:
    """Spark's optimiser removes the cast, and what is left has the watermark: rows are late by it."""
    make, mode = HIDDEN[name]
    (operator,) = decide(make(stream.withWatermark("ts", "1 minute")), mode).operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-EVENT-TIME"


def test_casts_by_which_no_row_is_late(stream: DataFrame) -> None:
    """One that nothing reads, one that changes the time, and those below operators without late rows."""
    marked = stream.withWatermark("ts", "1 minute")
    cast = marked.withColumn("t", F.col("ts").cast("timestamp"))
    unread = cast.groupBy(F.window("ts", "1 minute")).count()
    days = marked.withColumn("day", F.col("ts").cast("date").cast("timestamp")).groupBy("day").count()
    first = cast.withColumn("n", F.row_number().over(Window.partitionBy("k").orderBy("t"))).where("n = 1")
    whole = cast.groupBy("t").count()
    for df, mode in ((unread, "append"), (days, "update"), (first, "update"), (whole, "complete")):
        (operator,) = decide(df, mode).operators
        assert operator.reason is None


def test_sessions_beside_another_event_time(stream: DataFrame) -> None:
    """Spark drops late rows of sessions by both, also in complete mode."""
    marked = stream.withWatermark("ts", "1 minute").withColumn("other", F.expr("ts + interval 1 second"))
    for time in (F.col("ts"), F.to_timestamp("ts")):
        sessions = marked.select(time.alias("t"), "other").groupBy(F.session_window("other", "5 seconds"), "t")
        (operator,) = decide(sessions.count(), "complete").operators
        assert operator.reason is not None
        assert operator.reason.code == "MP-EVENT-TIME"


@pytest.mark.parametrize("function", ["median(d)", "percentile(d, 0.5)", "mode(k)"])
def test_a_reason_calls_a_function_as_the_query_does(stream: DataFrame, function: str) -> None:
    (operator,) = decide(stream.groupBy("k").agg(F.sum("v"), F.expr(function)), "update").operators
    assert operator.reason is not None
    assert operator.reason.detail == function.split("(")[0]


def test_a_window_is_a_key_of_the_type_that_is_shown(stream: DataFrame) -> None:
    windows = stream.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute"), "k").count()
    (described,) = as_dict(decide(windows, "append"))["operators"]
    assert described["keys"] == ["window: struct<start:timestamp,end:timestamp>", "k: int"]


def test_changes_that_cannot_be_shown_are_warned_of(stream: DataFrame, caplog: pytest.LogCaptureFixture) -> None:
    writer = millpond.writeStream(stream)
    marked = stream.withWatermark("ts", "1 minute").groupBy("ts").count()
    for mode, said in (("append", "no row that it shows changes later"), ("update", ""), ("complete", "all rows")):
        caplog.clear()
        writer._report(decide(marked if mode == "append" else stream.groupBy("k").count(), mode, "all"), [], ALL)
        assert bool(caplog.messages) == bool(said)
        assert all("spark.millpond.changes=all has no effect" in m and said in m for m in caplog.messages)


def test_updates_stay_below_an_operator_that_stays(stream: DataFrame) -> None:
    df = stream.groupBy("k").agg(F.sum("v").alias("t")).groupBy("t").agg(F.expr("percentile(t, 0.5)"))
    first, second = decide(df, "update").operators
    assert first.reason is not None
    assert first.reason.code == "MP-ABOVE"
    assert second.reason is not None


@pytest.mark.parametrize("clock", ["now", "current_timestamp", "localtimestamp", "current_date"])
def test_the_clock_is_read_in_each_batch(stream: DataFrame, clock: str) -> None:
    """Spark can evaluate it when the query starts; the conditions that are simplified then would keep that time."""
    marked = stream.withWatermark("ts", "1 minute")
    counts = marked.groupBy(F.window("ts", "1 minute"), "k").count()
    others = marked.select(F.col("k").alias("other"), F.col("ts").alias("rts"))
    for df in (
        counts.where(f"1 = 1 and k = 1 and window.start < {clock}() - interval 1 hour"),
        marked.join(others, F.expr(f"k = other and ts = rts and v < year({clock}() - interval 1 hour)")),
    ):
        conditions = [
            str(part)
            for node in decide(df, "append").root.node.walk()
            if node.kind in ("Filter", "Join")
            for part in node.expressions
        ]
        assert any(clock in condition and "1 = 1" not in condition for condition in conditions)


def counts_by_window(stream: DataFrame) -> DataFrame:
    return stream.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute"), "k").count()


def filters_below_the_watermark(df: DataFrame) -> str:
    nodes = list(decide(df, "append").root.node.walk())
    watermark = [node.kind for node in nodes].index("EventTimeWatermark")
    return " ".join(str(node.expression("condition")) for node in nodes[watermark:] if node.kind == "Filter")


@pytest.mark.parametrize(("clock", "moves"), [("now", True), ("current_timestamp", False), ("current_date", False)])
def test_conditions_with_a_clock_move_as_in_spark(stream: DataFrame, clock: str, moves: bool) -> None:
    """`now()` is a constant of each batch; the time of the batch is that of the batch that shows a row."""
    df = counts_by_window(stream).where(f"k + 0 * year({clock}()) = 1")
    assert (clock in filters_below_the_watermark(df)) == moves


@pytest.mark.parametrize("shown", [True, False])
def test_a_time_that_nothing_reads_keeps_no_condition_though_another_is_read(stream: DataFrame, shown: bool) -> None:
    df = counts_by_window(stream).withColumn("shown", F.current_timestamp()).where("k = 1")
    df = (df if shown else df.drop("shown")).where("window.start < current_timestamp()")
    assert ("= 1)" in filters_below_the_watermark(df)) == (not shown)


def test_clocks_are_not_mixed_up(stream: DataFrame) -> None:
    clocks = ("now", "current_timestamp", "localtimestamp", "current_date", "now")
    later = " + ".join(f"year({clock}())" for clock in clocks)
    df = counts_by_window(stream).where(f"count < {later}").withColumn("day", F.current_date())
    nodes = list(decide(df, "append").root.node.walk())
    conditions = [node.expression("condition") for node in nodes if node.kind == "Filter"]
    (condition,) = (condition for condition in conditions if "count" in str(condition))
    read = [part.kind for part in condition.walk() if part.kind in CLOCKS]
    assert read == ["Now", "CurrentTimestamp", "LocalTimestamp", "CurrentDate", "Now"]
    assert [part.kind for part in nodes[0].expressions[-1].walk()] == ["Alias", "CurrentDate"]


@pytest.mark.parametrize(("below", "mode"), [("medians", "update"), ("medians", "complete"), ("distinct", "update")])
def test_each_version_of_a_row_is_not_a_row(stream: DataFrame, below: str, mode: str) -> None:
    """A top-N takes rows back where the operator below says which; Spark's do not."""
    medians = stream.groupBy("k", "s").agg(F.expr("percentile(v, 0.5)").alias("t"))
    stream.withWatermark("ts", "1 minute").createOrReplaceTempView("marked")
    distinct = stream.sparkSession.sql("select distinct k, ts, v as t from marked")
    rank = F.expr("row_number() over (partition by k order by t desc)")
    ranked = (medians if below == "medians" else distinct).withColumn("n", rank).where("n <= 3")
    reasons = [operator.reason.code for operator in decide(ranked, mode).operators if operator.reason is not None]
    assert "MP-BELOW" in reasons
    with pytest.raises(AnalysisException, match="MP-BELOW"):
        millpond.writeStream(ranked).outputMode(mode).format("noop").start()


def test_sessions(stream: DataFrame) -> None:
    marked = stream.withWatermark("ts", "1 minute")
    sessions = marked.groupBy(F.session_window("ts", F.col("s")).alias("w"), "k").agg(F.sum("v"))
    (operator,) = decide(sessions, "append").operators
    spec = operator.spec
    assert isinstance(spec, SessionSpec)
    assert [field.name for field in spec.keys] == ["k"]
    assert (spec.window.name, spec.lag_ms, spec.output_mode) == ("w", 0, "append")
    assert operator.needs_no_data_batches
    (operator,) = decide(sessions, "complete").operators
    assert not operator.needs_no_data_batches
    (described,) = as_dict(decide(sessions, "append"))["operators"]
    assert described["store"] == "read-modify-write"
    assert described["functions"] == ["sum(bigint): bigint"]


@pytest.mark.parametrize(
    ("gap", "wanted"),
    [
        ("'10 seconds'", 10_000_000),
        ("cast('1 hour 1 microsecond' as interval)", 3_600_000_001),
        ("make_interval(0, 0, 0, 0, 0, 1, 0.5)", 60_500_000),
        ("'1 day'", None),  # which the change to summer time makes an hour shorter
        ("'1 month'", None),
        ("case when v > 5 then '5 seconds' else '10 seconds' end", None),
    ],
)
def test_the_gap_of_sessions(stream: DataFrame, gap: str, wanted: int | None) -> None:
    marked = stream.withWatermark("ts", "1 minute")
    for time, mode in (("ts", "append"), ("cast(ts as timestamp_ntz)", "complete")):
        timed = marked.withColumn("t", F.expr(time)) if mode == "complete" else marked.withColumnRenamed("ts", "t")
        (operator,) = decide(timed.groupBy(F.expr(f"session_window(t, {gap})"), "k").count(), mode).operators
        assert isinstance(operator.spec, SessionSpec)
        assert operator.spec.gap == wanted


def test_deduplication_within_the_watermark(stream: DataFrame) -> None:
    (operator,) = decide(stream.withWatermark("ts", "1 minute").dropDuplicatesWithinWatermark(["k"])).operators
    assert isinstance(operator.spec, WithinSpec)
    assert operator.spec.delay_ms == 60_000
    assert operator.needs_no_data_batches


def test_a_watermark_beside_the_keys_of_an_aggregate_does_not_matter(stream: DataFrame) -> None:
    (operator,) = decide(stream.withWatermark("ts", "1 minute").groupBy("k").agg(F.max("ts")), "update").operators
    assert operator.spec is not None


PLACE = "row_number() over (partition by k order by v desc)"
LAST = "over (partition by k order by ts rows 2 preceding)"


def ranked(df: DataFrame, condition: str = "r <= 3") -> DataFrame:
    return df.withColumn("r", F.expr(PLACE)).filter(condition)


CARRIED = {
    "selected": (lambda df: ranked(df).select("k", "r", "s"), ["k", "s", "v"]),
    "filtered by": (lambda df: ranked(df).filter("d > 0").select("r"), ["k", "v", "d"]),
    "aggregated": (lambda df: ranked(df).groupBy("st").agg(F.count("*")), ["k", "v", "st"]),
    "two windows": (
        lambda df: ranked(df).withColumn("a", F.expr(f"avg(d) {LAST}")).select("k", "r", "a"),
        ["k", "v", "d", "ts"],
    ),
    "fields": (lambda df: ranked(df).select("k", "r", "st.b"), ["k", "v", "st"]),
    "fields above a condition": (
        lambda df: ranked(df).filter("st.a > 1").selectExpr("k", "r", "upper(st.b)"),
        ["k", "v", "st"],
    ),
    "over rows": (lambda df: df.withColumn("a", F.expr(f"avg(v) {LAST}")).select("k", "a"), ["k", "v", "ts"]),
    "a watermark": (
        lambda df: ranked(df.withWatermark("ts", "1 minute")).select("k", "r"),
        ["k", "v", "ts"],
    ),
    "of a view": (
        lambda df: ranked(df.alias("x")).select(F.col("r").alias("place"), F.upper("x.s").alias("s")),
        ["k", "s", "v"],
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_window_carries_the_columns_that_are_read(stream: DataFrame, name: str) -> None:
    make, columns = CARRIED[name]
    first = decide(make(stream), "update").operators[0]
    assert isinstance(first.spec, RankSpec | OverSpec), first.reason
    assert sorted(field.name for field in first.spec.columns) == sorted(columns)
    again = decide(make(stream), "update").operators[0].spec
    assert again == first.spec


def test_a_window_whose_columns_are_all_read_is_refused_for_their_types(stream: DataFrame) -> None:
    stream = stream.withColumn("long", F.expr("make_dt_interval(k)"))
    for df in (
        ranked(stream),
        ranked(stream).select("k", "r", "long"),
        ranked(stream).filter("long > interval '1' day").select("k"),
    ):
        (operator,) = decide(df, "update").operators
        assert operator.reason is not None
        assert operator.reason.code == "MP-INPUT-TYPE"


@pytest.mark.parametrize("time", ["ts", "coalesce(ts, timestamp'2024-01-01')"], ids=["nullable", "never null"])
def test_a_window_below_leaves_windows_of_event_time_as_they_are(stream: DataFrame, time: str) -> None:
    marked = stream.withColumn("ts", F.expr(time)).withWatermark("ts", "1 minute")
    windows = marked.groupBy(F.window("ts", "1 minute", "30 seconds"), "k")
    sums = windows.agg(F.sum("v").alias("v"))
    below, over = decide(
        sums.withColumn("a", F.expr("avg(v) over (partition by k order by v rows 2 preceding)")).select("k", "a"),
        "append",
    ).operators
    (alone,) = decide(sums, "append").operators
    assert below.spec == alone.spec
    assert isinstance(over.spec, OverSpec)
    (may_split_updates,) = decide(sums.where("k = 1"), "append").operators
    assert may_split_updates.spec == alone.spec


def test_a_column_is_read_where_a_field_of_it_is(stream: DataFrame, spark: SparkSession) -> None:
    """Right below its reader, Spark's optimiser would have the window carry the field, under an identity of its own."""
    catalyst = Catalyst(spark)
    plan = catalyst.analyzed(ranked(stream).select("k", "r", "st.b"))
    window = next(node for node in plan.walk() if node.kind == "Window")
    (result,) = window.list("windowExpressions")
    needed = needed_columns(catalyst, catalyst.project(plan.list("projectList"), window))[result.expr_id]
    assert {one.name for one in window.children[0].output if one.expr_id in needed} == {"k", "v", "st"}


@pytest.mark.parametrize(
    ("condition", "limit"),
    [
        ("r between 1 and 3", 3),
        ("r between 2 and 3", 3),
        ("r >= 1 and r <= 3", 3),
        ("r > 0 and r < 4", 3),
        ("3 >= r", 3),
        ("r = 1", 1),
        ("r between 1 and 5 and r between 0L and 4L", 4),
    ],
)
def test_bounds_of_ranks(stream: DataFrame, condition: str, limit: int) -> None:
    (operator,) = decide(ranked(stream, condition).select("k", "r"), "update").operators
    assert isinstance(operator.spec, RankSpec), operator.reason
    assert operator.spec.limit == limit


@pytest.mark.parametrize(
    ("condition", "more"),
    [
        ("r <= 3", False),
        ("r between 1 and 3", False),
        ("r > 0 and r < 4", False),
        ("r < 4 and r <= 10", False),
        ("r = 1", False),
        ("r = 2", True),
        ("r between 2 and 3", True),
        ("r <= 3 and v <= 3", True),
    ],
)
def test_whether_a_filter_leaves_out_more_than_a_top_n_does(stream: DataFrame, condition: str, more: bool) -> None:
    renamed = stream.withColumn("place", F.expr(PLACE)).selectExpr("k", "v", "place as r")
    assert may_split_updates(decide(renamed.filter(condition), "update").root) == more


def test_what_is_computed_once_stays_so(stream: DataFrame) -> None:
    """`BETWEEN` names its operand; a random one must not be drawn for each of its bounds."""
    df = ranked(stream, "r between 1 and 3 and rand() between 0.2 and 0.4").select("k", "r")
    plan = decide(df, "update").root.node
    parts = [part.kind for node in plan.walk() for expression in node.expressions for part in expression.walk()]
    assert parts.count("Rand") == 1


@pytest.mark.parametrize(("given", "limit"), [("2", 2), ("3k", 3072), ("2147483647", (1 << 31) - 1)])
def test_limits_of_batches_reach_the_functions_of_the_user(stream: DataFrame, given: str, limit: int) -> None:
    conf = stream.sparkSession.conf
    with_limits = {MAX_RECORDS: "7", MAX_BYTES: given}
    before = {name: conf.get(name) for name in with_limits}
    for name, value in with_limits.items():
        conf.set(name, value)
    try:
        found = worker_settings(Catalyst(stream.sparkSession))
    finally:
        for name, value in before.items():
            conf.set(name, value)
    assert rows_per_batch(pa.record_batch({"n": pa.array(range(100), pa.int64())}), found) == min(7, -(-limit // 8))

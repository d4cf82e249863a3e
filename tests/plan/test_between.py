"""The state schema's record of expressions between operators where rows change."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.checkpoint.state_schema import BetweenSchema
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.stable import unstable_part
from millpond.plan.catalyst.text import walk
from millpond.plan.changelog.between import between_schemas
from millpond.plan.decide import decide

BELOW = "(select k, s, count(*) n, sum(v) v, max(ts) last from {events} group by k, s)"
OTHERS = {
    "nothing": f"select s, sum(n) x from {BELOW} group by s",
    "a condition": f"select s, sum(n) x from {BELOW} where n > 1 group by s",
    "another constant": f"select s, sum(n) x from {BELOW} where n > 2 group by s",
    "another column": f"select s, sum(n) x from {BELOW} where v > 1 group by s",
    "a condition on a key": f"select s, sum(n) x from {BELOW} where k > 1 group by s",
    "an argument": f"select s, sum(n * 2) x from {BELOW} group by s",
    "another argument": f"select s, sum(v) x from {BELOW} group by s",
    "a filter of a function": f"select s, sum(n) filter (where n > 1) x from {BELOW} group by s",
    "what Spark replaces": f"select s, regr_avgx(n, v) x from {BELOW} group by s",
    "what Spark replaces by another": f"select s, regr_avgy(n, v) x from {BELOW} group by s",
    "a result": f"select s, sum(n) x from {BELOW.replace('count(*) n', 'count(*) + 1 n')} group by s",
    "columns changed places": f"select s, sum(n) x from (select s, v n, n v from {BELOW}) group by s",
    "some keys": f"select s, sum(n) x from {BELOW} where k in (1, 2) group by s",
    "more keys": f"select s, sum(n) x from {BELOW} where k in (1, 2, 3) group by s",
    "constants": f"select s, sum(n) x from {BELOW} where k in (select id from range(2)) group by s",
    "other constants": f"select s, sum(n) x from {BELOW} where k in (select * from values (1), (2)) group by s",
    "third constants": f"select s, sum(n) x from {BELOW} where k in (select * from values (1), (3)) group by s",
    "distinct rows": f"select distinct s, n x from {BELOW}",
    "other distinct rows": f"select distinct s, v x from {BELOW}",
    "first rows": "select * from (select *, row_number() over (partition by s order by n, k) r from"
    f" {BELOW}) where r < 3",
    "other first rows": "select * from (select *, row_number() over (partition by s order by n, k) r from"
    f" (select k, s, v n, n v, last from {BELOW})) where r < 3",
}


def pinned(stream: DataFrame, text: str, changes: str = "upsert") -> tuple[BetweenSchema, ...]:
    session = stream.sparkSession
    return between_schemas(Catalyst(session), decide(session.sql(text, events=stream), "update", changes))


def test_other_queries_are_others(stream: DataFrame) -> None:
    found = {name: pinned(stream, text)[0].digest for name, text in OTHERS.items()}
    assert all(found[one] != found[other] for one, other in combinations(OTHERS, 2)), found


@pytest.mark.parametrize("name", ["another argument", "some keys", "other constants", "first rows"])
def test_a_query_written_again_is_the_same(stream: DataFrame, name: str) -> None:
    assert pinned(stream, OTHERS[name]) == pinned(stream, OTHERS[name])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"select s, sum(n) x from {BELOW} a group by s", f"select s, sum(n) x from {BELOW} b group by s"),
        (OTHERS["a condition"], OTHERS["a condition"].replace("sum(n) x", "sum(n) + unix_timestamp() as y")),
        (OTHERS["a condition"], OTHERS["a condition"].replace("sum(v)", "sum(v * 2)")),
        (
            "select s, count(*) x from (select * from (select *, row_number() over (partition by s order by v) r"
            " from {events}) where r < 3 and v > 1) group by s",
            "select s, count(*) x from (select * from (select 1 as one, *, row_number() over (partition by s"
            " order by v) r from {events}) where r < 3 and v > 1) group by s",
        ),
    ],
)
def test_what_does_not_count(stream: DataFrame, one: str, other: str) -> None:
    """Names of subqueries, what is above the topmost operator and below the lowest, columns that are not read."""
    assert pinned(stream, one)[0].digest == pinned(stream, other)[0].digest


def test_it_is_told_for_people(stream: DataFrame) -> None:
    (found,) = pinned(stream, OTHERS["a condition"])
    assert (found.below, found.above) == ("aggregate by k, s", "aggregate by s")
    assert found.computes == ("Filter: (n > CAST(1 AS BIGINT))", "Aggregate: s, sum(n)")
    assert (found.time_zones, found.settings) == ((), {})


@pytest.mark.parametrize(("one", "other"), [("True", "False"), ("ANSI", "LEGACY")])
@pytest.mark.parametrize(
    "key",
    [
        "coalesce({0}.s, '{1}')",
        "concat({0}.s, ' {1} ')",
        "coalesce({0}.m['{1}'], {0}.k)",
        "to_json({0}.st, map('nullValue', '{1}'))",
    ],
)
def test_constants_in_keys_of_joins_count(stream: DataFrame, key: str, one: str, other: str) -> None:
    """They are no modes of evaluation, however they are called."""

    def found(constant: str) -> str:
        on = f"{key.format('a', constant)} = {key.format('b', constant)}"
        text = f"select a.k from {{events}} a join {{events}} b on {on}"
        decision = decide(stream.sparkSession.sql(text, events=stream), "append")
        left, right = between_schemas(Catalyst(stream.sparkSession), decision)
        assert left.digest != right.digest
        return left.digest

    assert found(one) == found(one) != found(other)


def test_modes_of_evaluation_in_keys_of_joins_do_not_count(stream: DataFrame) -> None:
    session = stream.sparkSession
    key = "coalesce(cast({0}.s as int) + {0}.arr[1] / {0}.k, element_at({0}.m, 'True'))"

    def found(ansi: str) -> tuple[BetweenSchema, ...]:
        before = session.conf.get("spark.sql.ansi.enabled")
        session.conf.set("spark.sql.ansi.enabled", ansi)
        try:
            text = f"select a.k from {{events}} a join {{events}} b on {key.format('a')} = {key.format('b')}"
            return between_schemas(Catalyst(session), decide(session.sql(text, events=stream), "append"))
        finally:
            session.conf.set("spark.sql.ansi.enabled", before)

    assert found("true")
    assert [schema.digest for schema in found("true")] == [schema.digest for schema in found("false")]


def test_settings_and_time_zones_where_they_count(stream: DataFrame) -> None:
    session = stream.sparkSession
    (found,) = pinned(stream, f"select count(*) from {BELOW} where cast(last as date) > '2020-01-01'")
    assert found.time_zones == ("UTC",)
    assert found.settings["spark.sql.ansi.enabled"] == session.conf.get("spark.sql.ansi.enabled")
    session.conf.set("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
    session.conf.set("spark.sql.legacy.castComplexTypesToString.enabled", "false")  # as it is anyway
    try:
        (found,) = pinned(stream, f"select count(*) from {BELOW} where n + 1 > 2")
    finally:
        session.conf.unset("spark.sql.mapKeyDedupPolicy")
        session.conf.unset("spark.sql.legacy.castComplexTypesToString.enabled")
    assert found.time_zones == ()
    assert found.settings["spark.sql.mapKeyDedupPolicy"] == "last_win"
    assert "spark.sql.legacy.castComplexTypesToString.enabled" not in found.settings


def test_the_time_zone_counts_in_which_functions_of_the_user_see_timestamps(stream: DataFrame) -> None:
    session = stream.sparkSession
    session.udf.register("hour_in_pandas", F.pandas_udf(lambda times: times.dt.hour, "int"))
    session.udf.register("hour_in_python", F.udf(lambda at: at.hour, "int", useArrow=False))
    session.udf.register("doubled", F.pandas_udf(lambda numbers: numbers * 2, "bigint"))
    wanted = {"hour_in_pandas(last)": ("UTC",), "hour_in_python(last)": ("/".join(time.tzname),), "doubled(n)": ()}
    for function, zones in wanted.items():
        (found,) = pinned(stream, f"select h, count(*) from (select {function} h from {BELOW}) group by h")
        assert found.time_zones == zones, function


def test_what_is_shown_counts_where_all_changes_are(stream: DataFrame) -> None:
    text = "select k, n from (select k, count(*) n from {events} group by k) where n > 1"
    assert not pinned(stream, text)
    (found,) = pinned(stream, text, "all")
    assert (found.above, found.computes) == ("the sink", ("Filter: (n > CAST(1 AS BIGINT))",))
    assert found.digest != pinned(stream, text.replace("k, n from (", "k, n, n * 2 m from ("), "all")[0].digest


def exists_over(stream: DataFrame, least: int) -> DataFrame:
    counts = stream.groupBy("k", "s").agg(F.count("*").alias("n"))
    return counts.where(F.exists(F.array("n"), lambda x: x > least)).groupBy("s").agg(F.sum("n"))


def test_variables_of_lambdas_are_numbered_by_the_application(stream: DataFrame) -> None:
    """In one application, PySpark gives the same lambda function other variables each time."""

    def found(df: DataFrame) -> tuple[BetweenSchema, ...]:
        return between_schemas(Catalyst(stream.sparkSession), decide(df, "update"))

    first = found(exists_over(stream, 1))
    assert len(first) == 1
    assert found(exists_over(stream, 1)) == first
    assert found(exists_over(stream, 2)) != first


def test_which_variable_of_a_lambda_is_read_counts(stream: DataFrame) -> None:
    def digest(place: int) -> str:
        counts = stream.groupBy("k", "s").agg(F.count("*").alias("n"))
        picked = F.aggregate(F.array("n"), F.lit(0).cast("bigint"), lambda a, b: (a, b)[place])
        sums = counts.select("s", picked.alias("x")).groupBy("s").agg(F.sum("x"))
        (found,) = between_schemas(Catalyst(stream.sparkSession), decide(sums, "update"))
        return found.digest

    first = digest(0)
    assert digest(0) == first
    assert digest(1) != first


def test_each_level_of_what_spark_replaces_is_looked_at_once(stream: DataFrame) -> None:
    """Two visits a level would be a million million in all."""
    value = F.col("v")
    for _ in range(40):
        value = F.nvl(value, F.lit(0))
    expressions = Catalyst(stream.sparkSession).analyzed(stream.select(value.alias("x"))).expressions
    kinds = [part.kind for part in walk(expressions, lambda _: None)]
    assert (kinds.count("Nvl"), kinds.count("Coalesce"), kinds.count("AttributeReference")) == (40, 40, 1)
    assert unstable_part(expressions) is None


def test_what_is_unstable_below_what_spark_replaces_is_found(stream: DataFrame) -> None:
    for text in ("nvl(ts, now())", "nvl(ts, nvl2(s, now(), ts))", "ts between ts and now()"):
        expressions = Catalyst(stream.sparkSession).analyzed(stream.selectExpr(f"{text} as x")).expressions
        assert unstable_part(expressions) == "now()"


def stored(stream: DataFrame, join: str) -> tuple[BetweenSchema, ...]:
    """Return the schemas that are recorded of a join of the views `l` and `r`, given the rest of the query."""
    for side in ("l", "r"):
        columns = [f"{column} as {side}{column}" for column in ("k", "s", "v", "ts")]
        stream.withWatermark("ts", "10 seconds").selectExpr(*columns).createOrReplaceTempView(side)
    session = stream.sparkSession
    return between_schemas(Catalyst(session), decide(session.sql(f"select lk, rk from l {join}"), "append"))


OUTER = "left join r on lk = rk and lts = rts and "


def test_operands_that_a_join_stores(stream: DataFrame) -> None:
    """Rows of earlier runs have the values that were computed then."""
    (found,) = stored(stream, OUTER + "lv * 2 < rv")
    assert (found.below, found.above) == ("the left side", "left outer join")
    assert len(found.computes) == 1
    assert "2" in found.computes[0]
    assert stored(stream, OUTER + "lv * 2 < rv") == (found,)
    others = [found.digest]
    for condition in ("lv * 3 < rv", "lv + 2 < rv"):
        (other,) = stored(stream, OUTER + condition)
        others.append(other.digest)
    assert len(set(others)) == 3
    assert [schema.below for schema in stored(stream, OUTER + "lv * 2 < rv + 1")] == ["the left side", "the right side"]


def test_keys_that_a_join_computes(stream: DataFrame) -> None:
    first = stored(stream, "join r on lower(ls) = lower(rs) and lts = rts")
    assert [schema.below for schema in first] == ["the left side", "the right side"]
    assert first != stored(stream, "join r on upper(ls) = upper(rs) and lts = rts")


def test_the_code_of_functions_whose_values_a_join_stores(stream: DataFrame) -> None:
    def found(factor: int) -> BetweenSchema:
        stream.sparkSession.udf.register("scaled", lambda v: v * factor, "bigint")
        (schema,) = stored(stream, OUTER + "scaled(lv) < rv")
        return schema

    first = found(2)
    assert [name for name, _ in first.functions] == ["scaled"]
    assert found(2) == first
    assert found(3).functions != first.functions


@pytest.mark.parametrize("join", ["join r on lk = rk and lts = rts", "join r on lk = rk and lts >= rts and lv < rv"])
def test_nothing_is_recorded_of_a_join_by_columns(stream: DataFrame, join: str) -> None:
    assert stored(stream, join) == ()
    assert stored(stream, OUTER + "lv < rv") == ()


def test_joins_that_store_the_same_value_are_told_apart(stream: DataFrame) -> None:
    """Otherwise, one of them would be compared with the other at a restart."""
    stored(stream, "join r on lk = rk and lts = rts")
    third = stream.withWatermark("ts", "10 seconds").selectExpr("s as ms", "ts as mts")
    third.createOrReplaceTempView("m")
    both = "join r on lower(ls) = lower(rs) and lts = rts join m on lower(ls) = lower(ms) and lts = mts"
    first = stored(stream, both)
    assert len({schema.digest for schema in first}) == len(first) == 4
    assert stored(stream, both) == first


@pytest.mark.parametrize(
    ("condition", "differs"),
    [("cast(ls as bigint) * 2 < rv", False), ("cast(cast(lv as decimal(10, 8)) as string) < rs", True)],
)
def test_ansi_mode_is_recorded_of_a_join_if_values_differ_by_it(
    stream: DataFrame, condition: str, differs: bool
) -> None:
    session = stream.sparkSession
    first = stored(stream, OUTER + condition)
    session.conf.set("spark.sql.ansi.enabled", "false")
    try:
        assert (stored(stream, OUTER + condition) != first) == differs
    finally:
        session.conf.unset("spark.sql.ansi.enabled")

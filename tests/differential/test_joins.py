"""Joins of two streams, run by Spark and by Millpond on the same batches, with late rows, nulls and restarts."""

from __future__ import annotations

import datetime as dt
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from tests.differential.harness import NULL_FLOATS_JOIN, Query, compare

DDL = "side int, k int, s string, t timestamp, u timestamp, v int, d double"
SCHEMA = pa.schema(
    [
        ("side", pa.int32()),
        ("k", pa.int32()),
        ("s", pa.string()),
        ("t", pa.timestamp("us", tz="UTC")),
        ("u", pa.timestamp("us", tz="UTC")),
        ("v", pa.int32()),
        ("d", pa.float64()),
    ]
)
START = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)


def events(seed: int, minute: int, rows: int = 60) -> pa.Table:
    """Rows of both sides around a minute: some late, some early, with nulls, and few keys."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(rows):
        at = START + dt.timedelta(minutes=minute, seconds=10 * int(rng.integers(-20, 12)))
        made.append(
            {
                "side": int(rng.integers(0, 2)),
                "k": None if rng.random() < 0.1 else int(rng.integers(0, 8)),
                "s": [None, "a", "b" * 20][int(rng.integers(0, 3))],
                "t": None if rng.random() < 0.05 else at,
                "u": at.replace(second=0),
                "v": None if rng.random() < 0.1 else int(rng.integers(0, 10)),
                "d": [None, 0.0, -0.0, float("nan"), 1.5][int(rng.integers(0, 5))],
            }
        )
    return pa.Table.from_pylist(made, SCHEMA)


def sides(df: DataFrame, spark: SparkSession, left: str | None = "1 minute", right: str | None = "1 minute") -> None:
    """The stream's two sides as views `l` and `r`, with watermarks."""
    for name, number, delay in (("l", 0, left), ("r", 1, right)):
        rows = df if delay is None else df.withWatermark("t", delay)
        columns = [f"{column} as {name}{column}" for column in ("k", "s", "t", "u", "v", "d")]
        rows.where(f"side = {number}").selectExpr(*columns).createOrReplaceTempView(name)


def sql(text: str, left: str | None = "1 minute", right: str | None = "1 minute") -> Query:
    def query(df: DataFrame, spark: SparkSession) -> DataFrame:
        sides(df, spark, left, right)
        return spark.sql(text)

    return query


NEAR = "lt between rt - interval 30 seconds and rt + interval 1 minute"
NOT_NULL = " and ld is not null" if NULL_FLOATS_JOIN else ""
QUERIES = {
    "inner": (sql("select * from l join r on lk = rk"), "append"),
    "inner, no watermark": (sql("select * from l join r on lk = rk and lt >= rt", None, None), "append"),
    "inner, range": (sql(f"select * from l join r on lk = rk and {NEAR}"), "append"),
    "inner, where": (
        sql(f"select lk, lv + rv, ls from l, r where lk = rk and {NEAR} and lv < rv and rv > 1"),
        "append",
    ),
    "inner, two keys": (sql(f"select * from l join r on lk = rk and ls = rs and {NEAR}"), "append"),
    "inner, time is key": (sql("select * from l join r on lk = rk and lt = rt"), "append"),
    "inner, cast time is key": (
        sql("select * from l join r on lk = rk and to_timestamp(lt) = cast(rt as timestamp)", "1 minute", None),
        "append",
    ),
    "inner, null-safe": (sql(f"select lv, rv, lk from l join r on lk <=> rk and {NEAR}"), "append"),
    "inner, one watermark": (sql(f"select * from l join r on lk = rk and {NEAR}", "1 minute", None), "append"),
    "inner, float key": (sql(f"select * from l join r on ld = rd and {NEAR}{NOT_NULL}"), "append"),
    "inner, nothing read": (sql(f"select 1 as one from l join r on lk = rk and {NEAR}"), "append"),
    "left": (sql(f"select * from l left join r on lk = rk and {NEAR}"), "append"),
    "left, one-sided": (sql(f"select * from l left join r on lk = rk and {NEAR} and ld is null and rv > 3"), "append"),
    "left, constant bound": (sql(f"select * from l left join r on lk = rk and {NEAR} and lv > 2"), "append"),
    "left, condition": (sql(f"select * from l left join r on lk = rk and {NEAR} and (lv < rv or ls <=> rs)"), "append"),
    "left, floats": (sql(f"select * from l left join r on lk = rk and {NEAR} and not ld >= rd"), "append"),
    "left, time is key": (sql("select * from l left join r on lk = rk and lt = rt"), "append"),
    "left to inner": (sql(f"select * from l left join r on lk = rk and {NEAR} where rv > 2"), "append"),
    "right": (sql(f"select * from l right join r on lk = rk and {NEAR}"), "append"),
    "right, other bounds": (
        sql(
            "select * from l right join r on lk = rk and rt > lt - interval 5 seconds and rt - lt < interval 2 minutes"
        ),
        "append",
    ),
    "full": (sql(f"select * from l full join r on lk = rk and {NEAR} and lv > 1 and rv > 1"), "append"),
    "full, time is key": (sql("select * from l full join r on lk = rk and lt = rt"), "append"),
    "semi": (sql(f"select * from l left semi join r on lk = rk and {NEAR}"), "append"),
    "semi, condition": (sql(f"select lv from l left semi join r on lk = rk and {NEAR} and lv <> rv"), "append"),
}


WRONG_IN_SPARK = {"left, constant bound", "full"}
"""Queries whose unmatched rows Spark never shows, for the constants in their conditions (`MP-OUTER-CONSTANT`)."""


@pytest.mark.parametrize("name", QUERIES)
def test_join(spark: SparkSession, tmp_path: Path, name: str) -> None:
    query, mode = QUERIES[name]
    seed = sum(map(ord, name))
    tables = [events(seed + number, minute) for number, minute in enumerate([0, 2, 3, 9, 8, 20])]
    # Plain joins restart twice, others once: the condition has no part in the state.
    runs = [tables[:3], tables[3:5], tables[5:]] if "," not in name else [tables[:4], tables[4:]]
    allowed = {"onWrongInSpark": "warn"} if name in WRONG_IN_SPARK else {}
    out = compare(spark, tmp_path, query, mode, runs, ddl=DDL, **allowed)
    assert any(out.values())


CHAINS = {
    "windows above": f"""
        select window(lt, '1 minute') as w, count(*) as n, sum(rv) as total
        from l join r on lk = rk and {NEAR} group by window(lt, '1 minute')""",
    "windows above, semi": f"""
        select window(lt, '1 minute') as w, count(*) as n, sum(lv) as total
        from l left semi join r on lk = rk and {NEAR} group by window(lt, '1 minute')""",
    "windows below": """
        select a.w, a.n, b.n as m, b.high from
          (select window(lt, '1 minute') as w, lk, count(*) as n from l group by window(lt, '1 minute'), lk) a
          join (select window(rt, '1 minute') as w, rk, count(*) as n, max(rv) as high
                from r group by window(rt, '1 minute'), rk) b
          on a.w = b.w and lk = rk""",
    "windows below, full": """
        select a.w, a.n, b.w as v, b.high from
          (select window(lt, '1 minute') as w, lk, count(*) as n from l group by window(lt, '1 minute'), lk) a
          full join (select window(rt, '1 minute') as w, rk, max(rv) as high
                     from r group by window(rt, '1 minute'), rk) b
          on a.w = b.w and lk = rk""",
    "distinct above": f"select lk, lt, lv from l join r on lk = rk and {NEAR}",
}


@pytest.mark.parametrize("name", CHAINS)
def test_operators_above_and_below(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """The output of an interval join lags behind its input: windows above close later."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        out = sql(CHAINS[name])(df, session)
        return out.dropDuplicates() if name == "distinct above" else out

    tables = [events(500 + number, minute) for number, minute in enumerate([0, 2, 4, 9, 12, 20, 30])]
    out = compare(spark, tmp_path, query, "append", [tables[:3], tables[3:5], tables[5:]], ddl=DDL)
    assert any(out.values())


def test_update_mode(spark: SparkSession, tmp_path: Path) -> None:
    query = sql(f"select * from l join r on lk = rk and {NEAR}")
    tables = [events(700 + number, minute) for number, minute in enumerate([0, 2, 9])]
    refused = pytest.raises(AnalysisException, match="not supported in Update output mode")
    with refused if pyspark.__version__.startswith("4.1.") else nullcontext():
        compare(spark, tmp_path, query, "update", [tables[:2], tables[2:]], ddl=DDL)


def test_columns_that_only_a_fields_use_needs_are_pruned(spark: SparkSession, tmp_path: Path) -> None:
    """Without its event time, the join drops no late rows: Spark prunes it once the field has its own name."""
    ddl = "side int, k int, t timestamp, n struct<a:int,b:int>"

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        for name, side in (("l", 0), ("r", 1)):
            df.where(f"side = {side}").withWatermark("t", "1 minute").createOrReplaceTempView(name)
        return session.sql("select l.n.a, r.k from l join r on l.k = r.k")

    tables = []
    for number, minute in enumerate([0, 9, 1, 20, 2]):
        rows = events(900 + number, minute).select(["side", "k", "t"])
        fields = pa.StructArray.from_arrays([pa.array(range(rows.num_rows), pa.int32())] * 2, ["a", "b"])
        tables.append(rows.append_column("n", fields))
    out = compare(spark, tmp_path, query, "append", [tables[:3], tables[3:]], ddl=ddl)
    assert all(out.values())


def test_times_in_a_struct_are_pruned_where_other_fields_are_read(spark: SparkSession, tmp_path: Path) -> None:
    """Without its event time, the join drops no late rows: Spark reads the fields without making the struct."""
    query = sql("select both.lv, rk from (select struct(lt, lv) as both, rk from l join r on lk = rk and lv = rv)")
    tables = [events(960 + number, minute) for number, minute in enumerate([0, 9, 1, 20, 2])]
    out = compare(spark, tmp_path, query, "append", [tables[:3], tables[3:]], ddl=DDL)
    assert all(out.values())


def test_streams_without_a_common_key_meet_through_a_third(spark: SparkSession, tmp_path: Path) -> None:
    """Spark joins `l` and `m` first, which have one."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        for name, side in (("l", "side = 0"), ("r", "side = 1"), ("m", "v < 3")):
            df.where(side).createOrReplaceTempView(name)
        return session.sql("select l.t, r.u, m.v from l, r, m where m.k = l.k and m.s = r.s")

    tables = [events(950 + number, minute, rows=20) for number, minute in enumerate([0, 2, 3])]
    out = compare(spark, tmp_path, query, "append", [tables[:2], tables[2:]], ddl=DDL)
    assert all(out.values())

"""Queries that Spark refuses on streams because rows change: each batch gives the batch query over all rows so far."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

import millpond
from tests.differential.harness import Batches, order, plain, run, same, stream

DDL = "id bigint, k bigint, g string, v int, d double, s string, c struct<x:int,y:string>"


def table(number: int, rows: int) -> pa.Table:
    """Rows of one batch; `id` grows from batch to batch."""
    rng = np.random.default_rng(number)
    values = [None if n % 11 == 0 else int(n) for n in rng.integers(-20, 200, rows)]
    return pa.table(
        {
            "id": pa.array(range(1000 * number, 1000 * number + rows), pa.int64()),
            "k": pa.array([None if n == 5 else int(n) for n in rng.integers(0, 12, rows)], pa.int64()),
            "g": pa.array([[None, "a", "b", "c" * 20][n] for n in rng.integers(0, 4, rows)], pa.string()),
            "v": pa.array(values, pa.int32()),
            "d": pa.array([None, 0.0, -0.0, float("nan"), 1.5, -3.25][n] for n in rng.integers(0, 6, rows)),
            "s": pa.array(["x" * int(n) for n in rng.integers(0, 30, rows)], pa.string()),
            "c": pa.array(
                [{"x": int(n), "y": "y" * int(n)} if n else None for n in rng.integers(0, 20, rows)],
                pa.struct([("x", pa.int32()), ("y", pa.string())]),
            ),
        }
    )


TOP = "select {cols} from (select *, {rank} over (partition by {by} order by {order}) rn from {{events}}) where {cond}"
LOWER = "select k, g, max(v) m, count(*) n, sum(d) d from {events} group by k, g"


def top(cond: str, *, cols: str = "*", rank: str = "row_number()", by: str = "k", order: str = "v desc, id") -> str:
    return TOP.format(cond=cond, cols=cols, rank=rank, by=by, order=order)


CASES: dict[str, tuple[str, list[str]]] = {
    "first rows": (top("rn <= 3"), ["k", "rn"]),
    "one row": (top("rn = 1", cols="k, g, v, c", by="k, g", order="s desc nulls last, id desc"), ["k", "g"]),
    "second row": (top("2 = rn", cols="k, id, rn"), ["k"]),
    "expressions": (
        top("rn < 4 and rn <= 10L", cols="*, upper(g) u, k % 3 m", by="upper(g), k % 3", order="v * 2 desc, d, id"),
        ["u", "m", "rn"],
    ),
    "between": (top("rn between 1 and 3"), ["k", "rn"]),
    "between others": (top("rn between 2 and 3"), ["k", "rn"]),
    "columns that nobody reads": (
        "select k, rn, id, v from (select *, row_number() over (partition by k order by v desc, id) rn"
        " from (select *, array(s) l, map(k, s) m from {events} where k is not null)) where rn <= 3",
        ["k", "rn"],
    ),
    "fields of columns": (
        "select k, rn, c.y from (select *, row_number() over (partition by k order by v desc, id) rn"
        " from (select *, array(c) l from {events})) where rn <= 3 and (c.x > 1 or c.x is null)",
        ["k", "rn"],
    ),
    "columns that nobody reads of aggregates": (
        "select g, k, a from (select *, sum(n) over (partition by g order by k rows between 2 preceding and current"
        f" row) a from (select *, array(m) l from ({LOWER})))",
        ["g", "k"],
    ),
    "rank": (top("rn <= 2", rank="rank()", order="v desc nulls last"), ["id"]),
    "dense rank": (top("rn <= 2", rank="dense_rank()", order="d desc, g"), ["id"]),
    "without keys": (top("rn <= 5").replace("partition by k ", ""), ["rn"]),
    "a constant partition": (top("rn <= 5", by="1"), ["rn"]),
    "constant partitions": (
        top("rn <= 4", by="1 + 1, 'x', null, cast(null as int), current_date(), 1", rank="rank()"),
        ["id"],
    ),
    "no partition": (top("rn <= 3", by="null", rank="dense_rank()", order="v desc nulls last"), ["id"]),
    "constants among keys": (top("rn <= 2", by="1, k, null, upper(g)", cols="*, upper(g) u"), ["k", "u", "rn"]),
    "constants in the order": (top("rn <= 2", rank="rank()", order="1, v desc nulls last, null"), ["id"]),
    "no order": (top("rn <= 2", rank="rank()", order="'x'"), ["id"]),
    "condition beside": (top("rn <= 3 and v > 150"), ["k", "rn"]),
    "aggregate over aggregate": (
        f"select g, avg(m) a, count(*) n, sum(m) s, avg(d) d, count(d) e from ({LOWER}) group by g",
        ["g"],
    ),
    "aggregate without keys over aggregate": (f"select sum(n) s, count(m) c from ({LOWER}) where n < 6", []),
    "groups that go": (f"select g, n, count(*) c from ({LOWER}) where n <= 3 group by g, n", ["g", "n"]),
    "three aggregates": (
        f"select c, count(*) n from (select g, count(*) c from ({LOWER}) group by g) group by c",
        ["c"],
    ),
    "first rows of aggregate": (
        "select * from (select *, row_number() over (partition by g order by n desc, k) rn from"
        f" ({LOWER})) where rn <= 2",
        ["g", "rn"],
    ),
    "aggregate over first rows": (
        f"select g, count(*) n, sum(v) s, avg(cast(v as decimal(10,2))) a from ({top('rn <= 2')}) group by g",
        ["g"],
    ),
    "distinct over aggregate": (f"select distinct g, n from ({LOWER})", ["g", "n"]),
    "over aggregate": (
        "select k, g, n, s, sum(n) over (partition by g order by s desc, k rows between 2 preceding and current row) a,"
        " min(m) over (partition by g order by s desc, k rows 1 preceding) b,"
        " avg(m) filter (where n > 2) over (partition by g order by s desc, k rows 4 preceding) c"
        " from (select k, g, max(v) m, count(*) n, sum(v) s from {events} group by k, g)",
        ["k", "g"],
    ),
    "over groups that go": (
        "select *, count(*) over (partition by g order by k nulls last rows between 3 preceding and current row) c,"
        " avg(d) over (partition by g order by k nulls last rows between 3 preceding and current row) a"
        f" from ({LOWER}) where n <= 3",
        ["k", "g"],
    ),
    "over first rows": (
        "select id, k, v, rn, c, s, cast(avg(v) over (partition by k order by id rows between 2 preceding and current"
        f" row) as bigint) a from ({top('rn <= 5')})",
        ["id"],
    ),
    "over rows of all keys": (
        "select k, g, n, sum(n) over (order by k, g rows between 5 preceding and current row) a"
        f" from ({LOWER}) where k < 9",
        ["k", "g"],
    ),
    "over rows of a constant partition": (
        "select k, g, n, sum(n) over (partition by 1, null order by k, 1, g rows 5 preceding) a"
        f" from ({LOWER}) where k < 9",
        ["k", "g"],
    ),
    "sum over rows over aggregate": (
        "select g, sum(a) a, count(*) n from (select g, k, sum(n) over (partition by g order by k rows 2 preceding) a"
        f" from ({LOWER}) where n < 8) group by g",
        ["g"],
    ),
    "first rows of results over rows": (
        "select * from (select *, row_number() over (partition by g order by a desc, k) rn from (select g, k, n,"
        f" sum(n) over (partition by g order by k rows 2 preceding) a from ({LOWER}))) where rn <= 3",
        ["g", "rn"],
    ),
    "having": (f"select g, sum(n) n from ({LOWER}) group by g having sum(n) % 3 = 0", ["g"]),
}


Query = Callable[[DataFrame], DataFrame]


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    own = spark.newSession()
    own.conf.set("spark.millpond.onUnsupported", "error")
    return own


def write(folder: Path, number: int, rows: pa.Table) -> None:
    """The file of a batch; sources take files by their times, in seconds."""
    folder.mkdir(exist_ok=True)
    hidden = folder / f".{number}"
    pq.write_table(rows, hidden)
    os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
    hidden.rename(folder / f"{number:04d}.parquet")


def so_far(session: SparkSession, folder: Path, batches: int) -> DataFrame:
    return session.read.schema(DDL).parquet(*(str(folder / f"{n:04d}.parquet") for n in range(batches)))


def keyed(names: list[str], keys: list[str]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    places = [names.index(key) for key in keys]
    return lambda row: tuple(row[place] for place in places)


def check(
    session: SparkSession,
    folder: Path,
    query: Callable[[DataFrame], DataFrame],
    keys: list[str],
    mode: str,
    changes: str,
) -> None:
    """Run three batches, and hold what a reader accumulates against the batch query.

    There is a restart where all changes are shown: what it restores does not depend on what is shown.
    """
    session.conf.set("spark.millpond.changes", changes)
    held: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    written = 0
    for batches in (2, 1) if changes == "all" else (3,):
        out: Batches = {}
        for _ in range(batches):
            write(folder / "in", written, table(written, 60))
            written += 1
        df = query(stream(session, folder / "in", DDL))
        run(df, mode, folder / "state", ours=True, into=out)
        for number in sorted(out):
            wanted_df = query(so_far(session, folder / "in", min(number + 1, written)))
            key = keyed(wanted_df.columns, keys)
            rows = out[number]
            if mode == "complete":
                held = {key(row): row for row in rows}
            elif changes == "all":
                for row in rows:
                    if row[-1] == "D":
                        assert same(held.pop(key(row)), row[:-1])
                for row in rows:
                    if row[-1] != "D":
                        assert (key(row) in held) == (row[-1] == "U")
                        held[key(row)] = row[:-1]
            else:
                held |= {key(row): row for row in rows}
            wanted = [plain(row) for row in wanted_df.collect()]
            kept = list(held.values())
            if changes == "upsert" and mode == "update":  # what is gone stays as it was last seen
                kept = [held[key(row)] for row in wanted]
            assert len(kept) == len(wanted)
            for left, right in zip(sorted(kept, key=order), sorted(wanted, key=order), strict=True):
                assert same(left, right), (number, left, right)


@pytest.mark.parametrize("changes", ["upsert", "all"])
@pytest.mark.parametrize("name", CASES)
def test_update_mode(session: SparkSession, tmp_path: Path, name: str, changes: str) -> None:
    text, keys = CASES[name]
    check(session, tmp_path, lambda df: session.sql(text, events=df), keys, "update", changes)


def test_complete_mode(session: SparkSession, tmp_path: Path) -> None:
    text, keys = CASES["groups that go"]
    check(session, tmp_path, lambda df: session.sql(text, events=df), keys, "complete", "upsert")


def test_dataframe_api(session: SparkSession, tmp_path: Path) -> None:
    rows = Window.partitionBy("k").orderBy(F.col("v").desc(), "id")

    def query(df: DataFrame) -> DataFrame:
        return df.withColumn("rn", F.row_number().over(rows)).where(F.col("rn") < 4).withColumnRenamed("rn", "place")

    check(session, tmp_path, query, ["k", "place"], "update", "upsert")


def test_columns_that_nobody_reads(session: SparkSession, tmp_path: Path) -> None:
    """They may be of any type, also where what reads them stands between the window and what leaves them out."""
    rows = Window.partitionBy("k").orderBy(F.col("v").desc(), "id")

    def query(df: DataFrame) -> DataFrame:
        wide = df.withColumn("one", F.lit("1")).withColumn("tags", F.array("s", "g"))
        ranks = wide.withColumn("r", F.rank().over(rows)).filter("r between 1 and 3")
        return ranks.withColumn("tag", F.element_at("tags", 1)).select("k", "r", "v", "id")

    check(session, tmp_path, query, ["k", "id"], "update", "all")


@pytest.mark.parametrize("mode", ["append", "update"])
def test_over_rows(session: SparkSession, tmp_path: Path, mode: str) -> None:
    text = (
        "select id, k, s, avg(v) over (partition by k order by id rows between 9 preceding and current row) a,"
        " count(v + 1) over (partition by k order by id rows between 9 preceding and current row) b,"
        " max(d) over (partition by k order by id rows 2 preceding) c,"
        " sum(cast(v as decimal(12,3))) over (partition by k order by id rows 2 preceding) e,"
        " sum(v) over (partition by 'x', 1 order by id, 1 rows 4 preceding) f,"
        " count(1) over (partition by 2, k order by id rows 4 preceding) h,"
        " corr(v, id) over (partition by k order by id rows 4 preceding) l,"
        " kurtosis(v) over (partition by k order by id rows 9 preceding) m,"
        " bit_xor(id) over (partition by k order by id rows 3 preceding) n,"
        " regr_avgx(v, id) over (partition by k order by id rows 3 preceding) o"
        " from (select *, array(s) tags from {events})"
    )
    seen: list[Any] = []
    for number in range(3):
        write(tmp_path / "in", number, table(number, 60))
        if number != 1:
            out: Batches = {}
            df = session.sql(text, events=stream(session, tmp_path / "in", DDL))
            run(df, mode, tmp_path / "state", ours=True, into=out)
            seen += [row for rows in out.values() for row in rows]
            wanted = [
                plain(row) for row in session.sql(text, events=so_far(session, tmp_path / "in", number + 1)).collect()
            ]
            assert len(seen) == len(wanted)
            for left, right in zip(sorted(seen, key=order), sorted(wanted, key=order), strict=True):
                assert same(left, right), (left, right)


@pytest.mark.parametrize(
    ("text", "mode", "code"),
    [
        ("select *, row_number() over (partition by k order by v) rn from {events}", "update", "MP-UNBOUNDED"),
        (top("rn <= 3"), "append", "MP-MODE"),
        (top("rn <= 3"), "complete", "MP-MODE"),
        (top("rn <= v"), "update", "MP-UNBOUNDED"),
        ("select *, lag(v) over (partition by k order by v) rn from {events}", "update", "MP-WINDOW"),
        ("select *, sum(v) over (partition by k order by v) rn from {events}", "update", "MP-WINDOW"),
        (f"select g, max(m) from ({LOWER}) group by g", "update", "MP-RETRACT"),
        (
            f"select *, sum(n) over (partition by g order by k rows 2 preceding) a from ({LOWER})",
            "complete",
            "MP-MODE",
        ),
        (
            "select g, max(a) from (select g, sum(n) over (partition by g order by k rows 2 preceding) a"
            f" from ({LOWER})) group by g",
            "update",
            "MP-RETRACT",
        ),
        (
            f"select *, sum(n) over (partition by g order by k) a from ({LOWER})",
            "update",
            "MP-WINDOW",
        ),
        (f"select g, count(distinct m) from ({LOWER}) group by g", "update", "MP-RETRACT"),
        (
            f"select k, count(*) from ({LOWER} union all select k, g, v, 1L, d from {{events}}) group by k",
            "update",
            "MP-CHANGES",
        ),
        (f"select k, sum(m) from (select k, m * rand() m from ({LOWER})) group by k", "update", "MP-BETWEEN"),
    ],
)
def test_what_is_refused(session: SparkSession, tmp_path: Path, text: str, mode: str, code: str) -> None:
    write(tmp_path / "in", 0, table(0, 3))
    df = session.sql(text, events=stream(session, tmp_path / "in", DDL))
    reasons = [
        operator.get("reason", {}).get("code") for operator in millpond.explain(df, mode, as_dict=True)["operators"]
    ]
    assert code in reasons
    session.conf.set("spark.millpond.onUnsupported", "spark")
    with pytest.raises(AnalysisException):  # Spark's own words
        run(df, mode, tmp_path / "state", ours=True, into={})


PAIRS = (
    " (select id, k, s, timestamp_seconds(id + 1000000) t from {events} where id % 3 = 0) a,"
    " (select id % 1000 div 9 * 3 + id div 1000 * 1000 as ref, v, id bid, timestamp_seconds(id + 1000000) u"
    " from {events}) b"
    " where a.id = b.ref and b.u between a.t - interval 1 hour and a.t + interval 1 hour"
)
OVER_JOINS = {
    "aggregate over aggregate": (
        f"select k, avg(m) m from (select max(v) m, k, id from {PAIRS} group by id, k) group by k",
        ["k"],
    ),
    "first rows": (
        "select id, s, v, bid from (select *, row_number() over (partition by id order by v desc, u, bid) rn"
        f" from {PAIRS}) where rn <= 1",
        ["id"],
    ),
}


@pytest.mark.parametrize("name", OVER_JOINS)
def test_over_joins(session: SparkSession, tmp_path: Path, name: str) -> None:
    text, keys = OVER_JOINS[name]

    def query(df: DataFrame) -> DataFrame:
        whole = text.replace("timestamp_seconds(id + 1000000) t from {events}", "t from {marked}")
        whole = whole.replace("timestamp_seconds(id + 1000000) u from {events}", "t as u from {marked}")
        marked = df.withColumn("t", F.expr("timestamp_seconds(id + 1000000)"))
        return session.sql(whole, marked=marked.withWatermark("t", "1 day") if df.isStreaming else marked)

    check(session, tmp_path, query, keys, "update", "all")

"""Shapes for which Spark gives wrong rows: each run by Spark itself on a few rows that show the loss.

A shape whose test fails with a later version of Spark is no longer wrong there.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.decide import decide
from tests.differential.data import write
from tests.differential.harness import Batches, run, stream

DDL = "side string, k int, t timestamp, u timestamp"
SCHEMA = pa.schema(
    [
        ("side", pa.string()),
        ("k", pa.int32()),
        ("t", pa.timestamp("us", tz="UTC")),
        ("u", pa.timestamp("us", tz="UTC")),
    ]
)
START = dt.datetime(2024, 5, 1, tzinfo=dt.UTC)

Batch = Sequence[tuple[str, int, int]]
"""Rows as side, key and seconds after the start."""


def found(
    spark: SparkSession, folder: Path, batches: Sequence[Batch], text: str, code: str | None, marked: str = "lr"
) -> list[tuple[object, ...]]:
    """All rows that Spark gives for a query that has a shape: views `l` and `r`, those in `marked` with a watermark."""
    files = folder / "in"
    files.mkdir()
    for number, batch in enumerate(batches):
        rows = [
            {"side": side, "k": k, "t": START + dt.timedelta(seconds=at), "u": START + dt.timedelta(seconds=2 * at)}
            for side, k, at in batch
        ]
        write(files, number, pa.Table.from_pylist(rows, SCHEMA))
    for side in "lr":
        view = stream(spark, files, DDL).where(f"side = '{side}'")  # the watermark sees rows of this side alone
        view = view.selectExpr(f"k as {side}k", f"t as {side}t", f"u as {side}u")
        (view.withWatermark(f"{side}t", "0 seconds") if side in marked else view).createOrReplaceTempView(side)
    df = spark.sql(text)
    codes = [wrong.code for wrong in decide(df, "append").wrong]
    assert (code in codes) if code is not None else not codes
    return rows_of(df, folder)


def rows_of(df: DataFrame, folder: Path) -> list[tuple[object, ...]]:
    out: Batches = {}
    run(df, "append", folder / "native", ours=False, into=out)
    return [row for batch in out.values() for row in batch]


WINDOW = "window(lt, '1 minute')"
MATCH_COMES_LATER = [[("l", 1, 10)], [("l", 2, 100)], [("l", 3, 200)], [("r", 1, 10)], [("l", 4, 300)]]


def test_an_outer_join_with_one_watermark_shows_a_row_as_unmatched(spark: SparkSession, tmp_path: Path) -> None:
    text = "select lk, rk from l left join r on lk = rk and lt = rt"
    rows = found(spark, tmp_path, MATCH_COMES_LATER, text, "MP-OUTER-WATERMARK", marked="l")
    assert (1, None) in rows
    assert (1, 1) not in rows


@pytest.mark.parametrize("kind", ["inner", "left semi"])
def test_a_join_with_one_watermark_loses_a_match(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    text = f"select lk from l {kind} join r on lk = rk and lt = rt"
    assert found(spark, tmp_path, MATCH_COMES_LATER, text, "MP-JOIN-WATERMARK", marked="l") == []


@pytest.mark.parametrize(("kind", "marked"), [("left", "r"), ("full", "lr")])
def test_unmatched_rows_of_a_side_that_is_kept_never_come(
    spark: SparkSession, tmp_path: Path, kind: str, marked: str
) -> None:
    """The left side of the first lacks its watermark; the right one of the second has no bound."""
    text = f"select lk, rk from l {kind} join r on lk = rk and lt >= rt - interval 20 seconds"
    batches = [[("l", 1, 10), ("r", 2, 10)], [("l", 3, 200), ("r", 3, 200)], [("l", 4, 300), ("r", 4, 300)]]
    rows = found(spark, tmp_path, batches, text, "MP-OUTER-UNMATCHED", marked)
    assert sorted(row for row in rows if None not in row) == [(3, 3), (4, 4)]
    assert ((1, None) if kind == "left" else (None, 2)) not in rows


@pytest.mark.parametrize("compared", ["lk > 0", "wanted"])
def test_a_constant_hides_unmatched_rows(spark: SparkSession, tmp_path: Path, compared: str) -> None:
    near = "lt between rt - interval 20 seconds and rt + interval 20 seconds"
    text = f"select lk, rk from (select *, lk > 0 as wanted from l) left join r on lk = rk and {near} and {compared}"
    batches = [[("l", 1, 10), ("r", 2, 10)], [("l", 3, 200), ("r", 3, 200)], [("l", 4, 300), ("r", 4, 300)]]
    shown = found(spark, tmp_path, batches, text, "MP-OUTER-CONSTANT" if compared != "wanted" else None)
    assert (3, 3) in shown
    assert ((1, None) in shown) == (compared == "wanted")


def test_a_bound_of_another_time_loses_a_match(spark: SparkSession, tmp_path: Path) -> None:
    """The row's other time, 200, meets a time of the right side that is not late; its event time is 100."""
    text = "select lk, rk, lt is null from l join r on lk = rk and lu >= rt and lu <= rt + interval 1 hour"
    batches = [
        [("l", 1, 100)],
        [("l", 2, 150), ("r", 2, 150)],
        [("l", 3, 160), ("r", 3, 160)],
        [("r", 1, 190)],
    ]
    rows = found(spark, tmp_path, batches, text, "MP-JOIN-TIME")
    assert (2, 2, False) in rows
    assert (1, 1, False) not in rows


def test_late_rows_of_a_side_that_is_kept_are_lost_above(spark: SparkSession, tmp_path: Path) -> None:
    """The row of 100 s meets its match when the watermark is at 400 s, less the minute of the condition."""
    join = "l join r on lk = rk and lt <= rt + interval 1 minute"
    text = f"select cast(w.start as bigint), n from (select {WINDOW} as w, count(*) as n from {join} group by {WINDOW})"
    batches = [
        [("l", 1, 100), ("l", 2, 130), ("r", 2, 130)],
        [("l", 3, 400), ("r", 3, 400)],
        [("l", 4, 410), ("r", 4, 410)],
        [("r", 1, 420)],
        [("l", 5, 900), ("r", 5, 900)],
        [("l", 6, 910), ("r", 6, 910)],
    ]
    counted = found(spark, tmp_path, batches, text, "MP-LATE-ROWS")
    assert counted == [(int(START.timestamp()) + 120, 1), (int(START.timestamp()) + 360, 2)]  # not at 60
    assert (1,) in rows_of(spark.sql(f"select lk from {join}"), tmp_path / "joined")


def test_a_watermark_on_windows_never_moves(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, at in enumerate((10, 100, 1000)):
        row = {"side": "l", "k": 1, "t": START + dt.timedelta(seconds=at), "u": START}
        write(tmp_path / "in", number, pa.Table.from_pylist([row], SCHEMA))
    windows = stream(spark, tmp_path / "in", DDL).withColumn("w", F.window("t", "1 minute"))
    df = windows.withWatermark("w", "0 seconds").groupBy("w").count()
    assert [wrong.code for wrong in decide(df, "append").wrong] == ["MP-STRUCT-WATERMARK"]
    assert rows_of(df, tmp_path) == []

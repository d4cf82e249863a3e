"""DISTINCT inside aggregates, which Spark refuses on streams: compared with batch SQL over all rows so far."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.differential.data import DDL, batch, write
from tests.differential.harness import Batches, allow_equal_values, assert_equal, plain, run, stream

ATOMIC = ["b", "i8", "i16", "i32", "i64", "f32", "f64", "dec9", "dec18", "dec38", "s", "bin", "d", "ts", "tsn"]

CASES = {
    "count": [f"count(distinct {c})" for c in ATOMIC] + ["count(distinct st)", "count(distinct b, i8)"],
    "sum": [f"sum(distinct {c})" for c in ("i8", "i16", "i32", "i64", "dec9", "dec18")],
    "avg": [f"avg(distinct {c})" for c in ("i8", "i16", "i32", "i64", "dec9", "f64")],
    "bits": [f"bit_{operation}(distinct i8)" for operation in ("and", "or", "xor")],
    "statistics": [
        "skewness(distinct i8)",
        "corr(distinct i8, i16)",
        "regr_count(distinct i8, f64)",
        "var_pop(distinct i32)",
    ],
    "filter": ["count(distinct s) filter (where b)", "sum(distinct i8) filter (where i32 > 0)", "count(distinct s)"],
    "beside others": ["count(distinct i8)", "count(*)", "sum(i32)", "max(s)", "sum(distinct i8) + count(distinct s)"],
    "listagg": ["listagg(distinct s, ',') within group (order by s desc)", "count(*)"],  # Spark fails on several
    "listagg of numbers": ["listagg(distinct i8, ',') within group (order by i8)"],
    "sketches": ["percentile_approx(distinct i8, 0.5)", "hex(count_min_sketch(distinct s, 0.1D, 0.9D, 1))"],
    "without effect": ["min(distinct i32)", "max(distinct s)", "approx_count_distinct(distinct s)"],
}


if pyspark.__version__.startswith("4.1."):  # Spark 4.1 refuses it: MISMATCH_WITH_DISTINCT_INPUT
    del CASES["listagg of numbers"]
ALONE = [name for name in ("listagg", "listagg of numbers") if name in CASES]
TOGETHER = [name for name in CASES if name not in ALONE]
SEVERAL = [*(TOGETHER[first : first + 3] for first in range(0, len(TOGETHER), 3)), *([name] for name in ALONE)]
"""Several cases a query: mode and keys change which groups come out, not how they are computed."""


@pytest.mark.parametrize("name", CASES)
def test_distinct(spark: SparkSession, tmp_path: Path, name: str) -> None:
    check(spark, tmp_path, [name], "update", "k")


@pytest.mark.parametrize("keys", ["st, b", ""])
@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize("names", SEVERAL, ids=", ".join)
def test_modes_and_keys(spark: SparkSession, tmp_path: Path, names: list[str], mode: str, keys: str) -> None:
    check(spark, tmp_path, names, mode, keys)


@pytest.mark.parametrize("names", SEVERAL, ids=", ".join)
def test_complete_mode(spark: SparkSession, tmp_path: Path, names: list[str]) -> None:
    check(spark, tmp_path, names, "complete", "k")


def check(spark: SparkSession, folder: Path, names: list[str], mode: str, keys: str) -> None:
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    if "statistics" in names:
        allow_equal_values(session)
    key = "struct(" + keys + ")" if keys else "1"
    calls = dict.fromkeys(call for name in names for call in CASES[name])
    grouping = f"group by {keys}" if keys else ""
    text = f"select {key} as key, {', '.join(calls)} from {{events}} {grouping}"
    seed = sum(map(ord, "".join(names) + mode + keys))
    tables = [batch(seed, 40), batch(seed + 1, 0), batch(seed + 2, 30)]
    actual: Batches = {}
    expected: Batches = {}
    for number, table in enumerate(tables):
        write(folder / "in", number, table)
        if number != 1:  # the restart comes after the empty batch
            stream(session, folder / "in").createOrReplaceTempView("live")
            run(session.sql(text.format(events="live")), mode, folder / "ours", ours=True, into=actual)
        expected[number] = [plain(row) for row in batch_sql(session, folder, text, number, mode, keys).collect()]
    assert_equal(actual, expected)


def batch_sql(session: SparkSession, folder: Path, text: str, number: int, mode: str, keys: str) -> DataFrame:
    """The query over all batches up to one; in update mode, the groups that this one changed."""
    files = [str(folder / "in" / f"{n:04d}.parquet") for n in range(number + 1)]
    session.read.schema(DDL).parquet(*files).createOrReplaceTempView("so_far")
    result = session.sql(text.format(events="so_far"))
    if mode == "complete" or not keys:
        return result
    session.read.schema(DDL).parquet(files[-1]).selectExpr(f"struct({keys}) as changed").createOrReplaceTempView(
        "changed"
    )
    result.createOrReplaceTempView("result")
    return session.sql("select * from result where exists (select 1 from changed where changed <=> key)")

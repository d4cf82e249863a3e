"""DISTINCT inside aggregates, which Spark refuses on streams: compared with batch SQL over all rows so far."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

import millpond
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
    "conditions": ["count_if(distinct b)", "count_if(distinct b) filter (where i8 > 0)", "count_if(distinct i8 > 0)"],
    "filter": ["count(distinct s) filter (where b)", "sum(distinct i8) filter (where i32 > 0)", "count(distinct s)"],
    "filters": [
        "count(distinct i8) filter (where b)",
        "count(distinct i8) filter (where i32 > 0)",
        "count(distinct b) filter (where b)",
        "count(distinct b)",
        "max(s) filter (where i8 > 0)",
        "size(collect_set(i8 + i16)) + count(distinct i8 + i16) filter (where f64 > 0)",
        "approx_count_distinct(i32)",
        "avg(dec9) filter (where b)",
    ],
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


@pytest.mark.parametrize("combine", ["on", "off", "switching"])
@pytest.mark.parametrize("name", CASES)
def test_distinct(spark: SparkSession, tmp_path: Path, name: str, combine: str) -> None:
    check(spark, tmp_path, [name], "update", "k", ("off", "on") if combine == "switching" else (combine,))


@pytest.mark.parametrize("keys", ["st, b", ""])
@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize("names", SEVERAL, ids=", ".join)
def test_modes_and_keys(spark: SparkSession, tmp_path: Path, names: list[str], mode: str, keys: str) -> None:
    check(spark, tmp_path, names, mode, keys)


@pytest.mark.parametrize("names", SEVERAL, ids=", ".join)
def test_complete_mode(spark: SparkSession, tmp_path: Path, names: list[str]) -> None:
    check(spark, tmp_path, names, "complete", "k")


def test_a_value_is_sent_once_per_group_and_task(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).option("numPartitions", 2).load()
    rows.createOrReplaceTempView("numbers")
    query = spark.sql(
        "select value % 3, count(*), count(distinct value % 5), max(string(value % 7)) from numbers group by value % 3"
    )
    assert millpond.explain(query, "update", as_dict=True)["operators"][0]["combined"]
    writer = millpond.writeStream(query).outputMode("update").format("noop")
    running = writer.option("checkpointLocation", str(tmp_path)).start()
    while running.isActive and (running.lastProgress is None or running.lastProgress.batchId < 2):
        running.awaitTermination(0.1)
    running.stop()
    assert running.exception() is None
    for progress in running.recentProgress:
        figures = progress.observedMetrics["millpond"]
        assert figures.input_rows == 1000
        assert figures.exchanged_rows == 2 * 3 * (5 + 7)


def check(
    spark: SparkSession, folder: Path, names: list[str], mode: str, keys: str, combine: tuple[str, ...] = ("on",)
) -> None:
    """Compare calls with batch SQL; each start takes the next of some values of `spark.millpond.combine`."""
    combines = cycle(combine)
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
            session.conf.set("spark.millpond.combine", next(combines))
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

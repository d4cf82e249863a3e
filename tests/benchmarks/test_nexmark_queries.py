"""Every NEXMark query through Millpond: the stream gives the rows of the same query in batch."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.processors import PROCESSORS
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.queries.query import EVERY_MODE
from benchmarks.nexmark.spark import numbers
from benchmarks.studies.verify import check, closed, compare, last_image
from benchmarks.workloads.dataframes import NEXMARK
from pyspark.errors import AnalysisException

from millpond.plan.catalyst.jvm import Catalyst

# A hundred seconds of event time: sessions end, and windows close.
CONFIG = NexmarkConfig(seed=5, rate=2_500)
ROWS, BATCHES = 62_500, 4


def test_all_queries_exist() -> None:
    assert {f"q{i}" for i in range(24)} | {"q5-append", "q7-append", "q7-session", "q11-median"} == set(QUERIES)


@pytest.mark.parametrize("name", list(QUERIES))
def test_spark_supports_the_declared_output_modes(spark: Any, name: str) -> None:
    catalyst, query = Catalyst(spark), QUERIES[name]
    plan = catalyst.analyzed(query.over(numbers(spark, ROWS, 2), CONFIG))
    allowed = []
    for mode in EVERY_MODE:
        try:
            catalyst.check_streaming(plan, mode)
        except AnalysisException:
            continue
        allowed.append(mode)
    assert tuple(allowed) == query.native


@pytest.mark.parametrize("name", [*QUERIES, *PROCESSORS])
def test_a_stream_gives_the_rows_of_a_batch(spark: Any, tmp_path: Path, name: str) -> None:
    spark = spark.newSession()
    spark.conf.set("spark.millpond.onUnsupported", "error")
    result = check(spark, NEXMARK[name], CONFIG, ROWS, BATCHES, tmp_path)
    assert result.rows > 0
    assert result.same, result


def test_last_image_keeps_the_last_row_of_each_key(spark: Any) -> None:
    rows = spark.createDataFrame(
        [(1, "a", 10, 0), (2, "b", 20, 0), (1, "a", 30, 1), (3, "c", 40, 1), (2, "x", 50, 2)],
        "k int, j string, v int, __batch int",
    )
    assert sorted(row.v for row in last_image(rows, ["k"]).collect()) == [30, 40, 50]
    assert sorted(row.v for row in last_image(rows, ["k", "j"]).collect()) == [20, 30, 40, 50]


def test_closed_windows_end_by_the_watermark(spark: Any) -> None:
    ends = [datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC) for second in (10, 20, 30)]
    rows = spark.createDataFrame([(end, v) for v, end in enumerate(ends)], "endtime timestamp, v int")
    assert [row.v for row in closed(rows, ends[1]).collect()] == [0, 1]


def test_missing_and_surplus_rows_are_reported(spark: Any) -> None:
    rows = spark.createDataFrame([(1, "a"), (1, "a"), (2, None)], "k int, v string")
    others = spark.createDataFrame([(1, "a"), (2, None), (2, None)], "k int, v string")
    assert compare(rows, rows).same
    differing = compare(rows, others)
    assert (differing.rows, differing.missing, differing.surplus) == (3, [(2, None)], [(1, "a")])

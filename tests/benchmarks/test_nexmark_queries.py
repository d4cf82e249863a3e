"""Every NEXMark query through Millpond: the stream gives the rows of the same query in batch."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

import millpond
from millpond.plan.catalyst import Catalyst
from millpond.workloads.nexmark import NexmarkConfig
from millpond.workloads.nexmark_spark import numbers
from millpond.workloads.queries import QUERIES
from millpond.workloads.queries.oracle import closed, final_image, in_order, oracle
from millpond.workloads.queries.query import EVERY_MODE, Query

# Fifty seconds of event time: sessions end, and windows close.
CONFIG = NexmarkConfig(seed=5, rate=1_000)
ROWS, BATCHES = 16_500, 3
# Averages over a top-1's rows, which change; and medians of sessions.
NOT_HERE = ["q6", "q11-median"]
RUN = [name for name in QUERIES if name not in NOT_HERE]


def stream(query: Query, spark: Any, rows: int) -> Any:
    return query.over(numbers(spark, rows, 2), CONFIG)


def run(frame: Any, mode: str, folder: Path) -> tuple[pa.Table, datetime | None]:
    """The rows of the first batches, in order, and the watermark of the last of them."""
    seen: dict[int, pa.Table] = {}

    def keep(batch: Any, number: int) -> None:
        if number < BATCHES:
            seen[number] = batch.toArrow()

    writer = millpond.writeStream(frame).foreachBatch(keep).outputMode(mode)
    running = writer.option("checkpointLocation", str(folder)).start()
    progress: list[Any] = []
    while not progress and running.isActive:
        running.awaitTermination(0.1)
        progress = [p for p in running.recentProgress if p.batchId == BATCHES - 1]
    if (failure := running.exception()) is not None:
        raise failure
    running.stop()
    watermark = progress[0].eventTime.get("watermark")
    return pa.concat_tables(seen[number] for number in range(BATCHES)), watermark and datetime.fromisoformat(watermark)


def test_all_are_there() -> None:
    assert {f"q{i}" for i in range(24)} | {"q5-append", "q7-append", "q7-session", "q11-median"} == set(QUERIES)


@pytest.mark.parametrize("name", list(QUERIES))
def test_spark_runs_it_in_the_modes_described(spark: Any, name: str) -> None:
    catalyst, query = Catalyst(spark), QUERIES[name]
    plan = catalyst.analyzed(stream(query, spark, ROWS))
    allowed = []
    for mode in EVERY_MODE:
        try:
            catalyst.check_streaming(plan, mode)
        except AnalysisException:
            continue
        allowed.append(mode)
    assert tuple(allowed) == query.native


@pytest.mark.parametrize("name", RUN)
def test_a_stream_gives_the_rows_of_the_batch(spark: Any, tmp_path: Path, name: str) -> None:
    query = QUERIES[name]
    spark = spark.newSession()
    spark.conf.set("spark.millpond.onUnsupported", "error")
    rows = 1_500 if query.stateless else ROWS
    found, watermark = run(stream(query, spark, rows), query.mode, tmp_path)
    wanted = oracle(spark, query, 0, rows * BATCHES, CONFIG)
    if query.mode == "update":
        found = final_image(found, query.keys)
    if query.event_time:
        assert watermark is not None
        wanted = closed(wanted, watermark)
    if name == "q12":  # its windows are those of the clock
        found, wanted = (rows.group_by("bidder").aggregate([("bid_count", "sum")]) for rows in (found, wanted))
    assert wanted.num_rows > 0
    columns = list(query.determined or found.column_names)
    assert in_order(found.select(columns)).equals(in_order(wanted.select(columns).cast(found.select(columns).schema)))


@pytest.mark.parametrize("name", ["q6"])
def test_what_spark_refuses_has_an_answer_in_batch(spark: Any, name: str) -> None:
    query = QUERIES[name]
    rows = oracle(spark, query, 0, ROWS * BATCHES, CONFIG)
    assert rows.num_rows > 0
    assert final_image(rows, query.keys).num_rows == rows.num_rows


def test_the_final_image_is_the_last_row_of_each_key() -> None:
    rows = pa.table({"k": [1, 2, 1, 3, 2], "j": ["a", "b", "a", "c", "x"], "v": [10, 20, 30, 40, 50]})
    assert final_image(rows, ["k"]).to_pydict() == {"k": [1, 3, 2], "j": ["a", "c", "x"], "v": [30, 40, 50]}
    assert final_image(rows, ["k", "j"])["v"].to_pylist() == [20, 30, 40, 50]


def test_closed_windows_end_by_the_watermark() -> None:
    ends = [datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC) for second in (10, 20, 30)]
    rows = pa.table({"endtime": pa.array(ends, pa.timestamp("us", tz="UTC")), "v": [1, 2, 3]})
    assert closed(rows, ends[1])["v"].to_pylist() == [1, 2]

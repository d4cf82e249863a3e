"""Check NEXMark queries: `python -m benchmarks.studies.verify --query all --events 100m`.

A query runs as a stream through Millpond, and in batch by Spark over the same events. The result of a stream in update
mode is the last row of each key. A stream in append mode gives the windows that its watermark has closed. Both results
are compared as multisets, by the number and two sums of hashes of their rows, so they may be of any size.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import millpond
from benchmarks.engines.session import start_session
from benchmarks.measuring.arguments import count, queries
from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.processors import built_in
from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.queries.query import Query
from benchmarks.nexmark.spark import numbers, numbers_between
from benchmarks.workloads.dataframes import NEXMARK

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

WINDOW_END = "endtime"
_BATCH = "__batch"
_PARTITIONS = 2


class Streamed(NamedTuple):
    """Output of some batches of a stream: rows, each with the number of its batch; and their last watermark."""

    rows: DataFrame
    watermark: datetime | None


class Checked(NamedTuple):
    """Number of rows that the query has to give, and up to five rows that only one side has."""

    rows: int
    missing: list[Any]
    surplus: list[Any]

    @property
    def same(self) -> bool:
        """Whether both sides have equal rows."""
        return not self.missing and not self.surplus


def check(spark: SparkSession, query: Query, config: NexmarkConfig, rows: int, batches: int, folder: Path) -> Checked:
    """Run a query over `batches` batches of `rows` events, and compare it, or a processor's equivalent, with batch.

    Args:
        folder: for the checkpoint and the rows.
    """
    streamed = stream(spark, query, config, rows, batches, folder)
    actual = streamed.rows
    if query.mode == "update":
        actual = last_image(actual, query.keys)
    expected = built_in(query).over(numbers_between(spark, 0, rows * batches, _PARTITIONS), config)
    if query.event_time:
        assert streamed.watermark is not None
        expected = closed(expected, streamed.watermark)
    return compare(determined(query, actual), determined(query, expected))


def stream(spark: SparkSession, query: Query, config: NexmarkConfig, rows: int, batches: int, folder: Path) -> Streamed:
    """Run the query as a stream, and save the rows of its first batches."""
    frame = query.over(numbers(spark, rows, _PARTITIONS), config)

    def keep(batch: DataFrame, number: int) -> None:
        if number < batches:
            batch.write.mode("overwrite").parquet(str(folder / "rows" / f"{_BATCH}={number}"))

    writer = millpond.writeStream(frame).foreachBatch(keep).outputMode(query.mode)
    running = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    last: list[Any] = []
    while not last and running.isActive:
        running.awaitTermination(0.1)
        last = [progress for progress in running.recentProgress if progress.batchId == batches - 1]
    if (failure := running.exception()) is not None:
        raise failure
    running.stop()
    watermark = last[0].eventTime.get("watermark")
    return Streamed(spark.read.parquet(str(folder / "rows")), watermark and datetime.fromisoformat(watermark))


def last_image(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Return the last row of each key. Rows have the number of their batch, and a key occurs once in a batch."""
    from pyspark.sql import functions as f

    whole = f.struct(*rows.columns)
    return rows.groupBy(*keys).agg(f.max_by(whole, _BATCH).alias("image")).select("image.*")


def closed(rows: DataFrame, watermark: datetime) -> DataFrame:
    """Return the rows of windows that a watermark has closed: a stream in append mode has given them by then."""
    from pyspark.sql import functions as f

    # The second condition is never true. It keeps Spark from filtering below the aggregate, where ends are those of
    # single rows, not of sessions.
    return rows.where((f.col(WINDOW_END) <= f.lit(watermark)) | (f.monotonically_increasing_id() < 0))


def determined(query: Query, rows: DataFrame) -> DataFrame:
    """Return the columns that the query determines. Windows by the clock differ each time; only their sums are kept."""
    if query.name == "q12":
        return rows.groupBy("bidder").agg({"bid_count": "sum"})
    return rows.select(*query.determined) if query.determined else rows.drop(_BATCH)


def compare(actual: DataFrame, expected: DataFrame) -> Checked:
    """Compare two multisets of rows."""
    actual = actual.select(*expected.columns)
    ours, theirs = digest(actual), digest(expected)
    if ours == theirs:
        return Checked(int(theirs[0]), [], [])
    missing = expected.exceptAll(actual).limit(5).collect()
    return Checked(int(theirs[0]), missing, actual.exceptAll(expected).limit(5).collect())


def digest(rows: DataFrame) -> tuple[Any, ...]:
    """Return the number of rows and two sums of their hashes, which differ if two multisets of rows do."""
    from pyspark.sql import functions as f

    def total(hashed: Column) -> Column:
        return f.sum(hashed.cast("decimal(20,0)"))

    columns = [f.col(name) for name in rows.columns]
    hashes = f.xxhash64(*columns), f.xxhash64(f.lit("again"), *columns)
    return tuple(rows.agg(f.count("*"), *(total(hashed) for hashed in hashes)).first() or ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Check queries. Return the number of queries whose rows differ."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.verify", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--query", type=queries, default=list(QUERIES), metavar="A,B", help="or all")
    parser.add_argument("--events", type=count, default=1_000_000, metavar="N")
    parser.add_argument("--rows-per-batch", type=count, default=1_000_000, metavar="N")
    parser.add_argument("--event-rate", type=count, default=10_000, help="events per second of event time")
    parser.add_argument("--driver-memory", default="4g")
    options = parser.parse_args(arguments)
    rows = min(-(-options.events // 4), options.rows_per_batch)
    settings = {
        "spark.driver.memory": options.driver_memory,
        "spark.sql.shuffle.partitions": str(_PARTITIONS),
        "spark.millpond.onUnsupported": "error",
    }
    spark = start_session("local[2]", "verify", settings)
    differing = 0
    for name in options.query:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="millpond-verify-") as folder:
            config = NexmarkConfig(rate=options.event_rate)
            result = check(spark, NEXMARK[name], config, rows, -(-options.events // rows), Path(folder))
        outcome = "the same" if result.same else f"missing {result.missing}, surplus {result.surplus}"
        print(f"{name:12} {result.rows:12,} rows: {outcome} ({time.monotonic() - begun:.0f} s)", flush=True)
        differing += not result.same
    spark.stop()
    return differing


if __name__ == "__main__":
    sys.exit(main())

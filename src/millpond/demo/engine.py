"""One of the demo's two engines, in a process of its own: `python -m millpond.demo.engine PLAN.json`.

Runs NEXMark q17 until it has done its batches, or is killed. Every batch's rows go to `rows/batch=<id>/` (a batch that
is run again overwrites its own rows: all that a sink needs for exactly-once), its figures to a file of JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.workloads.nexmark import NexmarkConfig
from millpond.workloads.nexmark_spark import numbers
from millpond.workloads.queries import QUERIES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STORE = "spark.sql.streaming.stateStore"


class Plan(msgspec.Struct, frozen=True):
    """What an engine has to do.

    Attributes:
        engine: `spark` or `millpond`.
        folder: where checkpoint, rows and figures go.
        rows_per_batch: events of a batch.
        batches: the query ends after so many, counted from the very first; 0 = never.
    """

    engine: str
    folder: str
    rows_per_batch: int
    batches: int
    cores: int
    rate: int = 1_000


class Figures(msgspec.Struct, frozen=True):
    """One batch, as its engine reports it.

    Attributes:
        start: seconds since the epoch.
        ms: how long the batch took.
        commit_ms: how long it waited for state to become durable (Spark: state commit, per partition; Millpond: the
            commit of the batch before).
        hits: share of keys that were found in memory (Spark: RocksDB's block cache); None where nothing was sought.
    """

    batch: int
    start: float
    ms: float
    rows: int
    commit_ms: float
    hits: float | None


def session(plan: Plan) -> SparkSession:
    """Spark as its manual would set it up for this: RocksDB, changelog checkpoints, format 2."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{plan.cores},4]").appName(f"millpond-demo-{plan.engine}")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(Path(plan.folder) / "local"),
        "spark.sql.warehouse.dir": str(Path(plan.folder) / "warehouse"),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(plan.cores),
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
        f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        f"{_STORE}.checkpointFormatVersion": "2",
        f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
        f"{_STORE}.rocksdb.trackTotalNumberOfRows": "false",
        "spark.millpond.onUnsupported": "error",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def figures(progress: dict[str, Any], cores: int) -> Figures:
    """A batch's figures from Spark's progress report, on either engine."""
    from datetime import datetime

    rows = int(progress["numInputRows"])
    mine = progress.get("observedMetrics", {}).get("millpond", {})
    hits: float | None = None
    if mine:
        commit = float(mine.get("commit_lag_ms") or 0)
        sought = int(mine.get("input_rows") or 0)
        hits = 1 - int(mine.get("cache_misses") or 0) / sought if sought else None
    else:
        operators = progress["stateOperators"]
        commit = sum(o["commitTimeMs"] for o in operators) / cores
        found = sum(o["customMetrics"].get("rocksdbReadBlockCacheHitCount", 0) for o in operators)
        missed = sum(o["customMetrics"].get("rocksdbReadBlockCacheMissCount", 0) for o in operators)
        hits = found / (found + missed) if found + missed else None
    start = datetime.fromisoformat(progress["timestamp"]).timestamp()
    return Figures(
        int(progress["batchId"]), start, float(progress["durationMs"]["triggerExecution"]), rows, commit, hits
    )


def run(plan: Plan) -> None:
    """Run the query, until its batches are done."""
    folder = Path(plan.folder)
    spark = session(plan)
    events = numbers(spark, plan.rows_per_batch, plan.cores)
    results = QUERIES["q17"].over(events, NexmarkConfig(rate=plan.rate))
    rows = folder / "rows"

    def keep(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").option("compression", "lz4").parquet(str(rows / f"batch={number:06d}"))

    if plan.engine == "millpond":
        import millpond

        writer = millpond.writeStream(results)
    else:
        writer = results.writeStream
    query = (
        writer.foreachBatch(keep)
        .outputMode("update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    reported = -1
    with (folder / "figures.jsonl").open("ab", buffering=0) as out:
        while query.isActive:
            time.sleep(0.1)
            for progress in (json.loads(p.json) for p in query.recentProgress):
                if progress["batchId"] > reported and progress["numInputRows"]:
                    reported = progress["batchId"]
                    out.write(msgspec.json.encode(figures(progress, plan.cores)) + b"\n")
            if plan.batches and reported + 1 >= plan.batches:
                break
    if (failure := query.exception()) is not None:
        raise failure
    query.stop()
    spark.stop()


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan))

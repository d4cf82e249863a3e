"""One of the demo's two engines, in its own process: `python -m millpond.demo.engines.engine PLAN.json PARENT`.

The process runs the job until its batches are done or it is killed. It writes the rows of each batch to
`rows/batch=<id>/`, the figures to `figures.jsonl`, and versions to `about.json`. A batch that runs again overwrites its
own rows, which is enough for exactly-once results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.demo.engines.job import find
from millpond.workloads.nexmark_spark import numbers
from millpond.workloads.peer import PEER_SETTINGS
from millpond.workloads.process import die_with_parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Plan(msgspec.Struct, frozen=True):
    """The work of an engine.

    Attributes:
        engine: `spark` or `millpond`.
        folder: the folder for checkpoint, rows and figures.
        job: the name of the job.
        rows_per_batch: the number of events in a batch.
        batches: the number of batches, counted from the very first, after which the query ends; 0: never.
        cores: the number of cores that the engine uses.
        temporary: the folder for the engine's temporary files.
    """

    engine: str
    folder: str
    job: str
    rows_per_batch: int
    batches: int
    cores: int
    temporary: str


class Figures(msgspec.Struct, frozen=True):
    """The figures of one batch, as its engine reports them.

    Attributes:
        batch: its number.
        start: its start, in seconds since the epoch.
        ms: its time in milliseconds.
        rows: its input rows.
        commit_ms: its wait for durable state in milliseconds (Spark: state commit, per partition; Millpond: the commit
            of the batch before).
    """

    batch: int
    start: float
    ms: float
    rows: int
    commit_ms: float

    @property
    def end(self) -> float:
        """The end of the batch, in seconds since the epoch."""
        return self.start + self.ms / 1000


class About(msgspec.Struct, frozen=True):
    """The versions of an engine, and where it runs the job's operators (empty for Spark, which runs all of them)."""

    versions: str
    explained: str


# Settings of both engines.
SETTINGS = {
    **PEER_SETTINGS,
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.millpond.onUnsupported": "error",
}


def session(plan: Plan) -> SparkSession:
    """Return a session with the settings of both engines; temporary files stay below the demo's folder."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{plan.cores},4]").appName(f"millpond-demo-{plan.engine}")
    for key, value in {
        **SETTINGS,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={plan.temporary}",
        "spark.local.dir": plan.temporary,
        "spark.sql.warehouse.dir": str(Path(plan.folder) / "warehouse"),
        "spark.sql.shuffle.partitions": str(plan.cores),
        "spark.sql.streaming.numRecentProgressUpdates": "100",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def figures(progress: dict[str, Any], cores: int, rows_per_batch: int) -> Figures:
    """Return a batch's figures from Spark's progress report, on either engine."""
    from datetime import datetime

    mine = progress.get("observedMetrics", {}).get("millpond", {})
    if mine:
        commit = float(mine.get("commit_lag_ms") or 0)
    else:
        commit = sum(o["commitTimeMs"] for o in progress["stateOperators"]) / cores
    start = datetime.fromisoformat(progress["timestamp"]).timestamp()
    # Spark counts a row once for each scan of the source in the query.
    rows = min(int(progress["numInputRows"]), rows_per_batch)
    return Figures(int(progress["batchId"]), start, float(progress["durationMs"]["triggerExecution"]), rows, commit)


def about(spark: SparkSession, plan: Plan, results: DataFrame, mode: str) -> About:
    """Return the versions, and where the job's operators run."""
    from millpond import __version__
    from millpond.plan.decide import decide
    from millpond.plan.explain import as_text

    jvm: Any = spark._jvm
    versions = f"Spark {spark.version} · Java {jvm.System.getProperty('java.version')}"
    if plan.engine != "millpond":
        return About(versions, "")
    return About(f"{versions} · Millpond {__version__}", as_text(decide(results, mode)))


def run(plan: Plan) -> None:
    """Run the query until its batches are done."""
    folder, job = Path(plan.folder), find(plan.job, plan.rows_per_batch)
    spark = session(plan)
    results = job.rows(numbers(spark, plan.rows_per_batch, plan.cores))
    rows = folder / "rows"
    (folder / "about.json").write_bytes(msgspec.json.encode(about(spark, plan, results, job.mode)))

    def keep(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(rows / f"batch={number:06d}"))

    if plan.engine == "millpond":
        import millpond

        writer = millpond.writeStream(results)
    else:
        writer = results.writeStream
    query = (
        writer.foreachBatch(keep)
        .outputMode(job.mode)
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
                    out.write(msgspec.json.encode(figures(progress, plan.cores, plan.rows_per_batch)) + b"\n")
            if plan.batches and reported + 1 >= plan.batches:
                break
    if (failure := query.exception()) is not None:
        raise failure
    query.stop()
    spark.stop()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan))

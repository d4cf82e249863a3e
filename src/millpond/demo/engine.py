"""One of the demo's two engines, in its own process: `python -m millpond.demo.engine PLAN.json PARENT`.

The process runs the job until its batches are done or it is killed. It writes the rows of each batch to
`rows/batch=<id>/`, the figures to `figures.jsonl`, and versions to `about.json`. A batch that runs again overwrites its
own rows, which is enough for exactly-once results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.demo.figures import Figures
from millpond.demo.jobs import find
from millpond.demo.processes import die_with_parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STORE = "spark.sql.streaming.stateStore"
PEER_SETTINGS = {
    # RocksDB with changelogs instead of a snapshot per batch, and without row counts (they cost a lookup per row).
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STORE}.checkpointFormatVersion": "2",
    f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STORE}.rocksdb.trackTotalNumberOfRows": "false",
    # For the checkpoint's own files: on a local disk, Spark's default starts processes (chmod, readlink) for each
    # file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""Tuned settings of Spark's own state store, the baseline of all comparisons."""
SETTINGS = {
    **PEER_SETTINGS,
    "spark.driver.memory": "2g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": "100",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.millpond.onUnsupported": "error",
}
"""Settings of both engines."""


class Plan(msgspec.Struct, frozen=True):
    """The work of an engine (`spark` or `millpond`): a job, by its name, and its size.

    `folder` is for checkpoint, rows and figures, `temporary` for temporary files. The query ends after `batches`
    batches, counted from the very first; 0: never.
    """

    engine: str
    folder: str
    job: str
    rows_per_batch: int
    batches: int
    cores: int
    temporary: str


def session(plan: Plan) -> SparkSession:
    """Return a session with the settings of both engines; temporary files stay below the demo's folder."""
    from pyspark.sql import SparkSession

    folders = {
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={plan.temporary}",
        "spark.local.dir": plan.temporary,
        "spark.sql.warehouse.dir": f"{plan.folder}/warehouse",
    }
    builder = SparkSession.builder.master(f"local[{plan.cores},4]").appName(f"millpond-demo-{plan.engine}")
    builder = builder.config("spark.sql.shuffle.partitions", plan.cores)
    spark = builder.config(map={**SETTINGS, **folders}).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def figures(progress: dict[str, Any], cores: int, rows_per_batch: int) -> Figures:
    """Return a batch's figures from Spark's progress report, on either engine."""
    if mine := progress.get("observedMetrics", {}).get("millpond"):
        commit = float(mine.get("commit_wait_ms") or 0)
    else:
        commit = sum(operator["commitTimeMs"] for operator in progress["stateOperators"]) / cores
    start = datetime.fromisoformat(progress["timestamp"]).timestamp()
    # Spark counts a row once for each scan of the source in the query.
    rows = min(int(progress["numInputRows"]), rows_per_batch)
    return Figures(int(progress["batchId"]), start, float(progress["durationMs"]["triggerExecution"]), rows, commit)


def run(plan: Plan) -> None:
    """Run the query until its batches are done."""
    import millpond
    from millpond.plan.decide import decide
    from millpond.plan.explain import as_text

    folder, job, spark = Path(plan.folder), find(plan.job, plan.rows_per_batch), session(plan)
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", plan.rows_per_batch)
    results = job.rows(numbers.option("numPartitions", plan.cores).load().selectExpr("value as n"))
    ours = plan.engine == "millpond"
    java = spark._jvm.System.getProperty("java.version")
    about = {
        "versions": f"Spark {spark.version} · Java {java} · Millpond {millpond.__version__}",
        "explained": as_text(decide(results, job.mode)) if ours else "",
    }
    (folder / "about.json").write_bytes(msgspec.json.encode(about))

    def keep(batch: DataFrame, number: int) -> None:
        batch.write.mode("overwrite").parquet(str(folder / "rows" / f"batch={number:06d}"))

    writer = millpond.writeStream(results) if ours else results.writeStream
    writer = writer.foreachBatch(keep).outputMode(job.mode).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(processingTime="0 seconds").start()
    reported = -1
    with (folder / "figures.jsonl").open("ab", buffering=0) as out:
        while query.isActive and not (plan.batches and reported + 1 >= plan.batches):
            time.sleep(0.1)
            for progress in (json.loads(p.json) for p in query.recentProgress):
                if progress["batchId"] > reported and progress["numInputRows"]:
                    reported = progress["batchId"]
                    out.write(msgspec.json.encode(figures(progress, plan.cores, plan.rows_per_batch)) + b"\n")
    if (failure := query.exception()) is not None:
        raise failure
    query.stop()
    spark.stop()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Plan))

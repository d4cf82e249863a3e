"""Process of the engines on Spark: one streaming query, observed until it is measured.

The harness starts it as `python -m benchmarks.engines.spark CONFIG.json EVENTS.jsonl`. It writes one JSON object a
line, each with its time: `session`, `repartitioned` (if asked for), `started`, `measuring`, `measured` (with the
batches), `stopped`. If the engine does not run the query, it writes `refused` with the reason.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import msgspec

from benchmarks.engines.events import events_alone
from benchmarks.engines.s3 import bucket, hadoop_settings
from benchmarks.engines.session import progress_reports, start_session
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.dataframes import build, output_mode
from millpond.demo.engine import PEER_SETTINGS
from millpond.errors import UnsupportedError
from millpond.setting_values import parse_size

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery
    from tests.support.cluster import Hosts


def session(config: RunConfig, cluster: str = "") -> SparkSession:
    """Start a session with an engine's settings; temporary files stay below the run's folder.

    Args:
        config: the run.
        cluster: URL of the master of `config.hosts` hosts; empty = a local session.
    """
    work = Path(config.work)
    settings = {
        "spark.driver.memory": config.driver_memory,
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={os.environ['TMPDIR']}",
        "spark.local.dir": os.environ["TMPDIR"],
        "spark.sql.warehouse.dir": str(work / "warehouse"),
        "spark.sql.shuffle.partitions": str(config.partitions),
        **PEER_SETTINGS,
        **on_s3(config),
    }
    if config.engine == "millpond":
        settings["spark.millpond.slot.memory"] = config.slot_memory
        settings["spark.millpond.commit.mode"] = config.commit_mode
        settings["spark.millpond.compaction"] = config.compaction
        settings["spark.millpond.slots"] = str(config.cores // max(1, config.hosts))
        settings["spark.millpond.onUnsupported"] = "error"
        if config.s3:
            settings["spark.millpond.state.location"] = bucket("s3", Path(config.work).name)
        elif config.store_latency_ms or config.store_bandwidth:
            settings["spark.millpond.state.location"] = store_url(config)
    if cluster:
        settings |= {"spark.executor.memory": config.driver_memory, "spark.driver.host": "127.0.0.1"}
    master = cluster or f"local[{config.cores},4]"
    spark = start_session(master, f"benchmark-{config.engine}", settings | config.settings)
    while cluster and spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() <= config.hosts:
        time.sleep(0.1)
    return spark


def cluster_of(config: RunConfig) -> AbstractContextManager[Hosts]:
    """Return a context with hosts that share the run's cores."""
    from tests.support.cluster import hosts

    # A host's worker offers more than its executor asks for.
    memory = f"{(parse_size(config.driver_memory) >> 20) + 512}m"
    cores = max(1, config.cores // config.hosts)
    return hosts(Path(config.work), config.hosts, cores=cores, memory=memory)


def on_s3(config: RunConfig) -> dict[str, str]:
    """Return Spark's settings for a checkpoint on the S3 server."""
    if not config.s3 or config.engine != "spark":
        return {}
    settings = dict(hadoop_settings(config.s3))
    if "spark.jars" in config.settings:
        del settings["spark.jars.packages"]
    return settings


def checkpoint(config: RunConfig) -> str:
    """Return the location of Spark's checkpoint."""
    if config.s3 and config.engine == "spark":
        return bucket("s3a", Path(config.work).name)
    return str(Path(config.work) / "checkpoint")


def remove_unfinished(spark: SparkSession, location: str) -> None:
    """Remove unfinished batches from a checkpoint's offset log: Spark repartitions no state beside them."""
    assert spark._jvm is not None
    path = spark._jvm.org.apache.hadoop.fs.Path
    files = path(location).getFileSystem(spark._jsc.hadoopConfiguration())
    committed, planned = (
        {str(status.getPath().getName()) for status in files.listStatus(path(f"{location}/{log}"))} - {"metadata"}
        for log in ("commits", "offsets")
    )
    for batch in planned - committed:
        files.delete(path(f"{location}/offsets/{batch}"), False)


def store_url(config: RunConfig) -> str:
    """Return the URL of a store below the run's folder, with the run's latency and bandwidth."""
    faults = {"latency_ms": f"{config.store_latency_ms:g}", "bandwidth_mb": f"{config.store_bandwidth / 1e6:g}"}
    faults |= {"hold": config.store_hold} if config.store_hold else {}
    return f"faults+file:{Path(config.work) / 'store'}?{urlencode(faults)}"


def start(spark: SparkSession, config: RunConfig) -> StreamingQuery:
    """Start the query into the sink that keeps nothing."""
    frame: DataFrame = build(spark, config)
    mode = output_mode(config)
    if config.engine == "millpond":
        import millpond

        writer = millpond.writeStream(frame)
    elif config.engine == "events":
        writer, mode = events_alone(frame, mode).writeStream, "append"
    else:
        writer = frame.writeStream
    return (
        writer.format("noop")
        .outputMode(mode)
        .option("checkpointLocation", checkpoint(config))
        .trigger(processingTime="0 seconds")
        .start()
    )


class Events:
    """Sends events to the harness."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def send(self, kind: str, **fields: object) -> None:
        self._file.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")


def observe(query: StreamingQuery, config: RunConfig, events: Events) -> None:
    """Let the query run until it has been measured for long enough."""
    left_out = config.left_out
    warm = time.time() + config.warmup_seconds
    deadline: float | None = None
    while query.isActive:
        time.sleep(0.1)
        last = query.lastProgress
        done = -1 if last is None else int(last["batchId"])
        if deadline is None and done + 1 >= left_out and time.time() >= warm:
            left_out = done + 1
            deadline = time.time() + config.seconds
            events.send("measuring")
        if deadline is not None:
            enough = config.max_batches and done + 1 >= left_out + config.max_batches
            # Slow engines get three batches at least: a median of fewer says nothing.
            if enough or (time.time() >= deadline and done >= left_out + 2):
                break
    events.send("measured", batches=progress_reports(query), left_out=left_out)


def main(arguments: list[str]) -> int:
    """Run one engine; `--restarted` measures the first batches of a restart instead."""
    config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=RunConfig)
    events = Events(Path(arguments[1]))
    restarted = "--restarted" in arguments
    with cluster_of(config) if config.hosts else nullcontext() as hosts:
        return run(config, events, session(config, hosts.url if hosts is not None else ""), restarted)


def run(config: RunConfig, events: Events, spark: SparkSession, restarted: bool) -> int:
    """Run one engine in a session, and stop it."""
    from pyspark.errors import AnalysisException

    events.send("session")
    if restarted and config.restart_partitions and config.engine == "spark":
        before = time.time()
        remove_unfinished(spark, checkpoint(config))
        spark._streamingCheckpointManager.repartition(checkpoint(config), config.restart_partitions)
        events.send("repartitioned", seconds=time.time() - before)
    try:
        query = start(spark, config)
    except (AnalysisException, UnsupportedError) as refusal:
        events.send("refused", reason=str(refusal).splitlines()[0])  # Spark adds the whole plan
        spark.stop()
        return 0
    events.send("started", version=f"Spark {spark.version}")
    if restarted:
        while query.isActive and len(progress_reports(query)) < 3:
            time.sleep(0.05)
        events.send("measured", batches=progress_reports(query))
    else:
        observe(query, config, events)
        if config.restart:
            # The harness kills everything here, in mid-stream.
            query.awaitTermination()
    query.stop()
    events.send("stopped")
    spark.stop()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    sys.exit(main(sys.argv[1:]))

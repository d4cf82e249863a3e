"""Sessions and writers of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engines.s3 import hadoop_settings
from benchmarks.engines.session import start_session
from benchmarks.misa.settings import Settings
from millpond.demo.engine import PEER_SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

_STORE = "spark.sql.streaming.stateStore"
SHIPPED = {
    f"{_STORE}.providerClass": PEER_SETTINGS[f"{_STORE}.providerClass"],
    f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "false",
}
"""RocksDB with a snapshot for each batch, and Spark's defaults for all else of state and logs."""
STORES: Mapping[str, Mapping[str, str]] = {
    "spark-shipped": SHIPPED,
    "spark-best": PEER_SETTINGS,
    "spark-async": PEER_SETTINGS,
    # zStream changes how batches are cut, and leaves Spark's state as it is shipped.
    "spark-deadline": SHIPPED,
    "millpond": {**PEER_SETTINGS, "spark.millpond.commit.mode": "async"},
    "millpond-sync": {**PEER_SETTINGS, "spark.millpond.commit.mode": "sync"},
}
"""Settings of the state store and of the logs, by engine."""


def session(settings: Settings, work: Path) -> SparkSession:
    """Start a local session with an engine's settings; temporary files stay below `work`."""
    chosen = {
        "spark.driver.memory": settings.driver_memory,
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={work}",
        "spark.local.dir": str(work / "local"),
        "spark.sql.warehouse.dir": str(work / "warehouse"),
        "spark.sql.shuffle.partitions": str(settings.cores),
        # From this number of files on, a batch begins with a job that lists them. An engine that is behind would fall
        # further behind because of the source alone.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
        **STORES[settings.engine],
        **(hadoop_settings(settings.s3) if settings.s3 else {}),
    }
    if settings.on_millpond:
        chosen["spark.millpond.slot.memory"] = settings.slot_memory
        chosen["spark.millpond.slots"] = str(settings.cores)
        chosen["spark.millpond.onUnsupported"] = "error"
    return start_session(f"local[{settings.cores},4]", f"misa-{settings.engine}", chosen | settings.settings)


def writer(frame: DataFrame, mode: str, settings: Settings, checkpoint: str) -> DataStreamWriter:
    """Write a query's rows to a sink that keeps nothing, as the engine does."""
    import millpond

    writes = millpond.writeStream(frame) if settings.on_millpond else frame.writeStream
    writes = writes.format("noop").outputMode(mode).option("checkpointLocation", checkpoint)
    if settings.engine == "spark-async":
        writes = writes.option("asyncProgressTrackingEnabled", "true")
    return writes.trigger(processingTime=f"{settings.trigger if settings.clocked else 0:g} seconds")

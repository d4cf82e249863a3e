"""Spark's own state store at its best: what everything here is compared with."""

from __future__ import annotations

_STORE = "spark.sql.streaming.stateStore"

PEER_SETTINGS = {
    # RocksDB, a changelog instead of a snapshot per batch, no counting of rows (a lookup a row).
    f"{_STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STORE}.checkpointFormatVersion": "2",
    f"{_STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    f"{_STORE}.rocksdb.trackTotalNumberOfRows": "false",
    # Spark's own files of a batch: on a local disk its default starts processes (chmod, readlink) for each.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

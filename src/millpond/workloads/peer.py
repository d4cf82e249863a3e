"""Tuned settings of Spark's own state store, the baseline of all comparisons."""

from __future__ import annotations

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

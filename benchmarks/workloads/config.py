"""Configuration of one run of one engine; travels to the engine's process as JSON."""

from __future__ import annotations

import msgspec

ENGINES = ("millpond", "spark", "flink-rocksdb", "flink-forst", "events")
"""`events` runs no engine: it makes the events, with the columns that Millpond's operators ask for."""
WORKLOADS = (
    "rmw",
    "read_write",
    "sliding",
    "session",
    "nexmark",
    "processor",
    "processor_frames",
    "processor_silent",
    "processor_reminders",
    "processor_timers",
    "group_state",
    "processor_map",
    "processor_map_async",
)
PRELOADED = ("processor_timers", "processor_map", "processor_map_async")
"""Workloads whose first rows always bring every key once."""
KEYS = {
    "read_write": 10_000_000,
    "sliding": 1_000_000,
    "session": 1_000_000,
    "processor": 1_000_000,
    "processor_frames": 1_000_000,
    "processor_silent": 1_000_000,
    "processor_reminders": 1_000_000,
    "processor_timers": 1_000_000,
    "group_state": 100_000,
    "processor_map": 100_000,
    "processor_map_async": 100_000,
}
"""Default number of keys of a workload; other workloads have five million."""


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, one workload.

    Attributes:
        rows_per_batch: rows of every micro-batch, exactly.
        keys: size of the key space (all workloads but `nexmark`).
        seconds: how long to measure, after the batches left out.
        rate: rows that arrive per second of the clock, whether the engine keeps up or not. A batch has the rows that
            have arrived; 0 = as many rows as the engine takes, in batches of `rows_per_batch`.
        warmup_batches: first batches left out of every figure.
        warmup_seconds: time for the JVM to compile. Batches that began earlier are left out as well; `rate` is reached
            after half of it.
        max_batches: stop measuring after this many batches even if `seconds` have not passed; 0 = no limit.
        preload: let the first `keys` rows bring every key once, so that the state is full before measuring starts.
            The batches that do so are left out as well.
        key_type: `long`, or `string` (20 bytes).
        zipf: exponent of a Zipf distribution of the keys; 0 = uniform.
        event_rate: events per second of event time.
        partitions: shuffle partitions (Flink: parallelism).
        hosts: hosts that share the cores, each a standalone worker with an address of its own; 0 = `local[cores]`.
        driver_memory, slot_memory: JVM heap and Millpond's memory per slot, as Spark writes sizes.
        memory_limit: bytes that the whole process tree may use, page cache included; 0 = unlimited.
        drop_cache: seconds between two drops of the page cache of the state's files; 0 = never.
        store_latency_ms, store_bandwidth: of requests to Millpond's store; bytes per second, 0 = unlimited.
        store_hold: path of a file; while it exists, Millpond's store takes nothing.
        commit_mode: Millpond's `commit.mode`.
        compaction: Millpond's `compaction`.
        compactors: processes of `millpond compactor` on the query's cores. They start with the query, and count as the
            engine's.
        s3: endpoint of an S3 server for the state, and for Spark's whole checkpoint; empty = local disk.
        count_requests: count the requests to the S3 server for state, by a proxy before it.
        restart: after measuring, kill, drop the page cache, start again and measure the first batch.
        restart_partitions: partitions of the state after the restart; 0 = as before. Spark repartitions it offline.
        lose_disk: empty the local disk before the restart.
        checkpoint_seconds: Flink's checkpoint interval.
        settings: further engine settings, passed as they are.
        work: folder of the run: checkpoint, local files, logs.
    """

    engine: str
    workload: str
    work: str
    query: str = ""
    rows_per_batch: int = 1_000_000
    rate: int = 0
    keys: int = 5_000_000
    seconds: float = 60.0
    warmup_batches: int = 10
    warmup_seconds: float = 0.0
    max_batches: int = 0
    preload: bool = False
    key_type: str = "long"
    zipf: float = 0.0
    seed: int = 1
    event_rate: int = 10_000
    partitions: int = 2
    cores: int = 2
    hosts: int = 0
    driver_memory: str = "4g"
    slot_memory: str = "1g"
    memory_limit: int = 0
    drop_cache: float = 0.0
    store_latency_ms: float = 0.0
    store_bandwidth: int = 0
    store_hold: str = ""
    commit_mode: str = "async"
    compaction: str = "local"
    compactors: int = 0
    s3: str = ""
    count_requests: bool = False
    restart: bool = False
    restart_partitions: int = 0
    lose_disk: bool = False
    checkpoint_seconds: float = 5.0
    settings: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Workload and query, e.g. `nexmark q17`."""
        return f"{self.workload} {self.query}".strip()

    @property
    def preload_batches(self) -> int:
        """Number of first batches that bring every key once."""
        return -(-self.keys // self.rows_per_batch) if self.preload and self.workload != "nexmark" else 0

    @property
    def left_out(self) -> int:
        """Least number of first batches that no figure counts."""
        return max(self.warmup_batches, self.preload_batches)

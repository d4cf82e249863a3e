"""Settings of one run: a query on an engine, at a rate; they travel to the engine's process as JSON."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

ENGINES = ("spark-shipped", "spark-best", "spark-async", "spark-deadline", "millpond", "millpond-sync")
"""Spark as shipped with RocksDB (the paper's Baseline), at its best settings, with asynchronous progress tracking, and
with batches cut to a deadline (zStream). Millpond with commits beside the next batch, and with commits that each batch
waits for."""
EVENTS = Path(tempfile.gettempdir()) / "millpond-misa"
"""The folder in which streams of records are kept by default."""
FASTEST = 60_000
"""Records in a second of event time where an engine gets as many as it takes."""
HUNG_SECONDS = 600.0
"""An engine that ends no batch for this time has hung, or cannot run the query at this rate."""
LATE = 2.0
"""A run ends after this multiple of the seconds in which its records come, even if the engine is behind."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        query: LR2, LR4, CM1, CM1-ranked or CM2. engine: one of `ENGINES`.
        rate: records that arrive a second; 0 = as many as the engine takes, in batches of `rows_per_batch`.
        trigger: seconds between two batches, and `spark-deadline`'s deadline.
        batches: to measure. warmup: first batches, left out of every figure.
        rows_per_batch: approximate size of a batch where `rate` is 0.
        cores: of the session, and the number of shuffle partitions and slots.
        s3: endpoint of an S3 server with the whole checkpoint, Millpond's state included; empty = local disk.
        driver_memory, slot_memory: the JVM's heap, and Millpond's memory for each slot, as Spark writes sizes.
        settings: further settings of Spark and Millpond, which override the engine's own.
        events: folder in which streams of records are kept.
    """

    query: str
    engine: str
    rate: int = 1500
    trigger: float = 3.0
    batches: int = 100
    warmup: int = 5
    seed: int = 1
    rows_per_batch: int = 450_000
    cores: int = 2
    s3: str = ""
    driver_memory: str = "4g"
    slot_memory: str = "1g"
    settings: dict[str, str] = {}
    events: str = str(EVENTS)

    @property
    def event_rate(self) -> int:
        """Records in a second of event time."""
        return self.rate or FASTEST

    @property
    def seconds(self) -> int:
        """Seconds of event time in the stream."""
        batches = self.batches + self.warmup
        seconds = batches * self.trigger if self.rate else batches * self.rows_per_batch / FASTEST
        return max(1, round(seconds))

    @property
    def most_seconds(self) -> float:
        """Seconds after which even a slow run has ended, its start and its last commits included."""
        running = LATE * self.seconds if self.rate else (self.batches + self.warmup) * HUNG_SECONDS
        return running + 3 * HUNG_SECONDS

    @property
    def clocked(self) -> bool:
        """Whether batches begin by the clock, with the records that have come until then."""
        return bool(self.rate) and self.engine != "spark-deadline"

    @property
    def on_millpond(self) -> bool:
        """Whether the engine is Millpond."""
        return self.engine.startswith("millpond")

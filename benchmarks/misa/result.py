"""Measurements of a run, saved as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.measuring.percentiles import percentile
from benchmarks.measuring.result import Machine, Spread
from benchmarks.misa.settings import Settings
from benchmarks.misa.streams.records import RECORD_BYTES

_KEPT_UP = 95
"""An engine keeps up if this percentile of its batches takes no longer than the trigger, so that no queue grows."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that read files.

    Attributes:
        start: seconds since the epoch. ms: its execution time.
        rows: records that it read.
        row_mean_ms, row_max_ms: time from a record's arrival to the end of the batch, on average and at most; None
            where the engine got as many records as it takes.
        log_ms: time for Spark's offset log and commit log.
        commit_ms: Spark: time of its commit, per task that runs at a time. Millpond: wait for the commit of the batch
            before; in sync mode for its own, too.
        durable_ms: time from the sealed to the durable state in Millpond's last commit, for which a batch need not
            wait; None unless state is on an object store.
        read_ms: reads of state, per task that runs at a time; None if the engine does not report it.
        cpu_seconds: of all processes, while it ran. memory_bytes: theirs at the last sample before its end.
    """

    number: int
    start: float
    ms: float
    rows: int
    row_mean_ms: float | None = None
    row_max_ms: float | None = None
    log_ms: float = 0.0
    commit_ms: float | None = None
    durable_ms: float | None = None
    read_ms: float | None = None
    cpu_seconds: float = 0.0
    memory_bytes: int = 0

    @property
    def end(self) -> float:
        """Seconds since the epoch."""
        return self.start + self.ms / 1000


class Observed(msgspec.Struct, kw_only=True):
    """Report of an engine's process.

    Attributes:
        version: of Spark. batches: all batches. refused: why the engine does not run the query, in its own words.
    """

    version: str = ""
    batches: list[Batch] = []
    refused: str | None = None


class Result(msgspec.Struct, kw_only=True):
    """Figures of the measured batches.

    Attributes:
        batches: those that were measured. batch_ms: their execution times.
        row_max_ms: latencies of batches' latest rows.
        slope_ms: change of the execution time from batch to batch, by a line through all of them.
        rows_per_second: rows ÷ wall time from the first batch's start to the last one's end.
        batch_rows_per_second: rows ÷ execution time, averaged over batches, as in the paper (MiSA, figure 13).
        kept_up: whether nearly all batches end within the trigger; None if they do not begin by the clock. A run that
            is too slow for its first batches to end does not keep up, and has no figures.
        cores: CPU seconds ÷ wall time. memory_peak_bytes: proportional set size of all processes.
        refused: why the engine does not run this query, in its own words. error: why there are no figures.
    """

    settings: Settings
    machine: Machine
    version: str = ""
    batches: list[Batch] = []
    batch_ms: Spread | None = None
    row_max_ms: Spread | None = None
    slope_ms: float = 0.0
    rows_per_second: float = 0.0
    batch_rows_per_second: float = 0.0
    kept_up: bool | None = None
    cores: float = 0.0
    memory_peak_bytes: int = 0
    refused: str | None = None
    error: str | None = None

    @property
    def kilobytes_per_second(self) -> float:
        """Throughput in the paper's unit."""
        return self.batch_rows_per_second * RECORD_BYTES / 1000


def kept_up(settings: Settings, batches: Sequence[Batch]) -> bool | None:
    """Return whether an engine kept up: not if no batch ended; None if batches do not begin by the clock."""
    if not settings.clocked:
        return None
    return bool(batches) and percentile([batch.ms for batch in batches], _KEPT_UP) <= 1000 * settings.trigger


def summarize(result: Result, batches: Sequence[Batch], cpu_seconds: float, memory_peak: int) -> None:
    """Compute a result's figures.

    Args:
        batches: one at least.
        cpu_seconds: of all processes, from the first batch's start to the last one's end.
    """
    wall = batches[-1].end - batches[0].start
    ms, rows = (np.array([getattr(batch, name) for batch in batches], float) for name in ("ms", "rows"))
    result.batches = list(batches)
    result.batch_ms = Spread.of(ms.tolist())
    result.row_max_ms = Spread.of([batch.row_max_ms for batch in batches if batch.row_max_ms is not None])
    if len(batches) > 1:
        result.slope_ms = round(float(np.polyfit(np.arange(len(ms)), ms, 1)[0]), 3)
    result.rows_per_second = round(float(rows.sum()) / wall, 1)
    result.batch_rows_per_second = round(float((rows / ms).mean() * 1000), 1)
    result.kept_up = kept_up(result.settings, batches)
    result.cores = round(cpu_seconds / wall, 2)
    result.memory_peak_bytes = memory_peak

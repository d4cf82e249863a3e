"""Measurements, as one JSON object per engine."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import ROOT
from benchmarks.measuring.percentiles import percentile


class Spread(msgspec.Struct, frozen=True):
    """Median, 95th and 99th percentile, and maximum, in milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        """Compute the spread of measured values; None if there are no values."""
        if not values:
            return None
        return cls(*(round(percentile(values, share), 2) for share in (50, 95, 99, 100)))


class Batch(msgspec.Struct, frozen=True):
    """One measured batch.

    Attributes:
        start: seconds since the epoch.
        commit_ms: the time that it waited for a commit.
        checkpoint_ms: time from its sealed to its durable state (Millpond: of the batch before, and on a store only).
    """

    start: float
    ms: float
    rows: int
    commit_ms: float | None = None
    checkpoint_ms: float | None = None

    @property
    def end(self) -> float:
        """Seconds since the epoch."""
        return self.start + self.ms / 1000


class Requests(msgspec.Struct, frozen=True):
    """Requests to the S3 server for state during the measured batches, by the kinds that S3 charges for.

    Attributes:
        puts: puts of objects, including parts and copies.
        deletes: free of charge.
        bytes: of all bodies, in both directions.
    """

    puts: int
    gets: int
    lists: int
    heads: int
    deletes: int
    bytes: int


class Restart(msgspec.Struct, frozen=True):
    """A restart after SIGKILL, page cache dropped.

    Attributes:
        first_batch_ms: the first batch after it. The JVM is cold then, for every engine.
        second_batch_ms: the batch after that.
        extra_ms: the first batch's time beyond a steady batch's median before the kill.
        ready_s: from the ready session to the end of the first batch, including a repartitioning.
        empty_s: the same at the first start, when there was no state.
        repartition_s: the part of `ready_s` in which Spark repartitioned the state offline.
    """

    first_batch_ms: float
    second_batch_ms: float | None
    extra_ms: float
    ready_s: float
    empty_s: float
    repartition_s: float | None = None


class Machine(msgspec.Struct, frozen=True):
    """Machine on which a run was measured."""

    cpu: str
    cores: int
    memory_bytes: int
    python: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine."""
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
        )
        return cls(model, os.cpu_count() or 1, psutil.virtual_memory().total, platform.python_version())


class Result(msgspec.Struct, kw_only=True):
    """Figures of one engine's run, without its first `left_out` batches.

    Attributes:
        rows_per_second: rows of the measured batches ÷ wall time from the first one's start to the last one's end.
        rate: rows that arrived per second; 0 = as many as the engine took.
        batch_ms: micro-batch times. Flink has none; its checkpoints' end-to-end times are in `commit_ms`.
        commit_ms: the part of a batch spent waiting for state to become durable. Spark: state commit time per
            partition; Millpond: the wait for the commit behind; Flink: checkpoint duration, beside the processing.
        cpu_seconds_per_million_rows: of all processes.
        memory_peak_bytes: proportional set size of all processes, mapped files included, sampled.
        memory_anonymous_peak_bytes: the same without pages that files back.
        memory_mean_bytes: the mean over the measured time.
        memory_group_peak_bytes: with `--memory-limit`: the peak as the kernel counted it, page cache included.
        state_disk_bytes: working files on local disk.
        state_store_bytes: files in the checkpoint or store; None where it is on an S3 server.
        new_objects: objects that appeared there during the measured batches; None on an S3 server.
        cpu: seconds of CPU used so far by all processes, compactors included, at times since the epoch.
        compactors_cpu: likewise, by compactors alone.
        requests: with `--count-requests`.
        extra: figures that only this engine reports.
        error: why there are no figures.
        refused: why the engine does not run this query at all, in its own words.
    """

    engine: str
    workload: str
    query: str = ""
    version: str = ""
    rows_per_batch: int = 0
    rate: int = 0
    keys: int = 0
    key_type: str = "long"
    zipf: float = 0.0
    seed: int = 1
    partitions: int = 2
    left_out: int = 0
    seconds: float = 0.0
    rows: int = 0
    rows_per_second: float = 0.0
    batch_ms: Spread | None = None
    commit_ms: Spread | None = None
    cpu_seconds_per_million_rows: float | None = None
    memory_peak_bytes: int = 0
    memory_anonymous_peak_bytes: int = 0
    memory_mean_bytes: int = 0
    memory_group_peak_bytes: int = 0
    memory_limit_bytes: int = 0
    state_disk_bytes: int = 0
    state_store_bytes: int | None = None
    new_objects: int | None = None
    cpu: list[tuple[float, float]] = []
    compactors_cpu: list[tuple[float, float]] = []
    requests: Requests | None = None
    restart: Restart | None = None
    batches: list[Batch] = []
    extra: dict[str, Any] = {}
    machine: Machine | None = None
    error: str | None = None
    refused: str | None = None


def without_paths(text: str) -> str:
    """Replace this machine's folders in an error or a reason that goes into a result."""
    folders = {ROOT, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)}
    for folder in sorted(folders, key=lambda path: -len(os.fspath(path))):
        text = text.replace(os.fspath(folder), "…")
    return text


def write(path: Path, results: Sequence[msgspec.Struct]) -> None:
    """Write results as a JSON array, one object per run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def read(path: Path) -> list[Result]:
    """Read results that `write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=list[Result])

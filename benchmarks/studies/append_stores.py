"""Measure the append stores by their settings (FlowKV, Fig. 11 and 12): `python -m benchmarks.studies.append_stores`.

Keys are active for a while, then idle for longer than the session gap. Each step appends rows, and takes the sessions
that have closed. Spark does not run. Before windows are taken, the log's files are dropped from the page cache, unless
they are in a store with latency. The result is a table, and `append_stores.png` with matplotlib.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millpond.files.formats.append_file import MappedBytes
from millpond.files.locations.opening import open_filesystem
from millpond.files.mapping import advise
from millpond.layout import Column, Rows, TableSchema
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.table_resources import TableResources
from millpond.stores.unaligned.table import UnalignedTable

_WORD = "word"
SCHEMA = TableSchema(
    (Column("key", _WORD), Column("window", _WORD)),  # type: ignore[arg-type]
    tuple(Column(f"v{n}", _WORD) for n in range(8)),  # type: ignore[arg-type]
)
_MIX = np.uint64(0x9E3779B97F4A7C15)
SEED = 17
STEP = 100
"""Milliseconds of event time between two batches."""


@dataclass
class Measurement:
    """Result of one run: rows appended and taken per second of the store's own time, and the store's statistics."""

    rows_per_second: float
    stats: dict[str, float]


def sessions(
    url: str, folder: str, *, keys: int, active: int, gap: int, rows: int, cold: bool, **options: Any
) -> Measurement:
    """Run sessions through a table.

    Args:
        url: location of the state. folder: for local files.
        keys: number of sessions. active: mean number of batches in which a session has rows.
        gap: batches of idleness that end a session.
        rows: mean number of rows of a session. cold: drop the page cache before windows are taken.
        options: of the table.
    """
    rng = np.random.default_rng(SEED)
    starts, length = rng.integers(0, 2 * active, keys), rng.integers(1, 2 * active, keys)
    last = starts + length
    budget = MemoryBudget(64 << 20)
    spent, total = 0.0, 0
    with ThreadPoolExecutor(1) as background:
        files = AppendFiles(open_filesystem(url), folder)
        table = UnalignedTable(SCHEMA, files, TableResources(budget, background), directory=folder, **options)
        for version in range(int(last.max()) + gap + 1):
            running = np.flatnonzero((starts <= version) & (version <= last))
            running = running[(rng.random(len(running)) < rows / active) | (last[running] == version)]
            closed = np.flatnonzero(last + gap == version)
            words = np.zeros((len(running), table.layout.width), np.uint64)
            words[:, 3] = running
            words[:, 0] = words[:, 3] * _MIX
            words[:, 4] = starts[running]
            words[:, 5] = version
            begun = time.perf_counter()
            table.begin(version)
            table.append(Rows(words, np.empty(0, np.uint8)), np.full(len(running), (version + gap) * STEP))
            spent += time.perf_counter() - begun
            if cold:
                drop_pages(table)
            begun = time.perf_counter()
            total += sum(piece.count for piece in table.take(closed.astype(np.uint64) * _MIX, starts[closed]))
            table.seal()
            spent += time.perf_counter() - begun
        stats = table.stats()
        table.close()
        files.close()
    return Measurement(total / spent, stats)


def drop_pages(table: UnalignedTable) -> None:
    """Drop the pages of a table's segments from the page cache."""
    for segment in table._segments.segments:
        data = segment.file.data
        if isinstance(data, MappedBytes) and segment.ref is not None:
            advise(memoryview(data.view.obj), mmap.MADV_DONTNEED)
            handle = os.open(data.place, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


SWEEPS: dict[str, tuple[str, Sequence[float]]] = {
    "read batch ratio": ("read_batch_ratio", (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)),
    "maximum space amplification": ("maximum_space_amplification", (1.1, 1.25, 1.5, 2.0, 3.0)),
    "write buffer (KB)": ("write_buffer", (256, 512, 1024, 4096)),
}


def sweep(name: str, run: Callable[..., Measurement]) -> list[tuple[float, Measurement]]:
    """Run with each value of a setting, the other settings at their defaults."""
    option, values = SWEEPS[name]
    points = []
    for value in values:
        setting = int(value) << 10 if option == "write_buffer" else value
        measurement = run(**{"write_buffer": 512 << 10, option: setting})
        points.append((value, measurement))
        rate, stats = measurement.rows_per_second, measurement.stats
        print(
            f"{name:28} {value:8g} {rate:12,.0f} rows/s  hits {stats['prefetch_hit_ratio']:.3f}  "
            f"reads {stats['batch_reads']:5g}  amplification {stats['read_amplification']:.2f}  "
            f"{stats['fetched_bytes'] / 1e6:8,.0f} MB read  {stats['compactions']:3g} compactions",
            flush=True,
        )
    return points


def plot(results: dict[str, list[tuple[float, Measurement]]], path: str) -> None:
    """Plot throughput and hit ratio by each setting."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.6))
    for axis, (name, points) in zip(np.atleast_1d(axes), results.items(), strict=True):
        values = [value for value, _ in points]
        axis.plot(values, [measurement.rows_per_second / 1e3 for _, measurement in points], "o-")
        axis.set_xlabel(name)
        axis.set_ylabel("thousand rows/s")
        axis.set_ylim(bottom=0)
        hits = axis.twinx()
        ratios = [measurement.stats["prefetch_hit_ratio"] for _, measurement in points]
        hits.plot(values, ratios, "s--", color="tab:orange")
        hits.set_ylabel("hit ratio")
        hits.set_ylim(0, 1.02)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--keys", type=int, default=8000)
    parser.add_argument("--active", type=int, default=300, help="batches that a session has rows in, on average")
    parser.add_argument("--gap", type=int, default=300, help="batches of idleness that end a session")
    parser.add_argument("--rows", type=int, default=12, help="rows of a session, on average")
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds a request of the store; 0: local disk")
    parser.add_argument("--sweep", choices=[*SWEEPS], action="append", help="a setting to vary; default: all")
    parser.add_argument("--plot", default="append_stores.png", help="where the plots go; empty for none")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)

    def run(**settings: Any) -> Measurement:
        with tempfile.TemporaryDirectory() as folder:
            remote = f"faults+memory:{folder}?latency_ms={options.latency}"
            return sessions(
                remote if options.latency else f"{folder}/store",
                folder,
                keys=options.keys,
                active=options.active,
                gap=options.gap,
                rows=options.rows,
                cold=not options.latency,
                **settings,
            )

    results = {name: sweep(name, run) for name in options.sweep or SWEEPS}
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()

"""The files of a stream: made before a run, and kept for others."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.misa.queries import QUERIES
from benchmarks.misa.streams.records import counts

FILES = 4
"""Files in a second of a stream."""


def rows_of(name: str) -> int:
    """Return the number of records in a file, by its name."""
    return int(Path(name).stem.rpartition("-")[2])


def files(folder: Path, query: str, rate: int, seconds: int, seed: int) -> list[Path]:
    """Return the files of a stream in the order of its records; make them where they are not there yet.

    Args:
        folder: where streams are kept. query: the one that reads them. rate: records a second. seconds: of event time.
    """
    made = QUERIES[query].stream(rate, seed)
    name = f"{type(made).__name__}-{rate}-{seed}"
    # A longer stream begins with the same records.
    for kept in folder.glob(f"{name}-*[0-9]"):
        if int(kept.name.rpartition("-")[2]) >= seconds:
            return sorted(kept.iterdir())[: seconds * FILES]
    half = folder / f"{name}-{seconds}.half"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for second, count in enumerate(counts(rate, seconds, seed).tolist()):
        records = made.second(second, count)
        bounds = np.linspace(0, count, FILES + 1).astype(int).tolist()
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            path = half / f"{second * FILES + part:08}-{stop - start}.parquet"
            pq.write_table(records.slice(start, stop - start), path, compression="lz4")
    return sorted(half.rename(half.with_suffix("")).iterdir())

"""Files of a stream, made before a run and kept for later runs."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import time
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.misa import streams
from benchmarks.misa.queries import QUERIES
from benchmarks.misa.streams.records import counts

FILES = 4
"""Files in a second of a stream."""
_FOLDER = re.compile(r"[A-Z]\w+-\d+-\d+-(?:(?P<code>[0-9a-f]{12})-)?\d+(?:\.half)?")
"""A folder of a stream: its name, rate, seed, the digest of the code that made it, and its seconds."""
_UNUSED_SECONDS = 86_400.0
"""Streams of other code are removed after this time without use: another source tree may use them until then."""


def rows_of(name: str) -> int:
    """Return the number of records in a file, by its name."""
    return int(Path(name).stem.rpartition("-")[2])


def files(folder: Path, query: str, rate: int, seconds: int, seed: int) -> list[Path]:
    """Return the files of a stream in the order of its records; make them if no earlier run has.

    Args:
        folder: where streams are kept. query: reads the stream. rate: records a second. seconds: of event time.
    """
    stream = QUERIES[query].stream(rate, seed)
    name = f"{type(stream).__name__}-{rate}-{seed}-{code_digest()}"
    # A longer stream begins with the same records.
    for kept in folder.glob(f"{name}-*[0-9]"):
        if int(kept.name.rpartition("-")[2]) >= seconds:
            os.utime(kept)
            return sorted(kept.iterdir())[: seconds * FILES]
    remove_old(folder)
    half = folder / f"{name}-{seconds}.half"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    for second, count in enumerate(counts(rate, seconds, seed).tolist()):
        records = stream.second(second, count)
        bounds = np.linspace(0, count, FILES + 1).astype(int).tolist()
        for part, (start, stop) in enumerate(itertools.pairwise(bounds)):
            path = half / f"{second * FILES + part:08}-{stop - start}.parquet"
            pq.write_table(records.slice(start, stop - start), path, compression="lz4")
    return sorted(half.rename(half.with_suffix("")).iterdir())


@cache
def code_digest() -> str:
    """Return a digest of the code that makes streams: other code may make other records."""
    sources = [Path(__file__), *sorted(Path(streams.__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def remove_old(folder: Path) -> None:
    """Remove the streams of other code that have not been used for a day."""
    for kept in folder.glob("*-*-*"):
        name = _FOLDER.fullmatch(kept.name)
        if name and name["code"] != code_digest() and kept.stat().st_mtime < time.time() - _UNUSED_SECONDS:
            shutil.rmtree(kept)

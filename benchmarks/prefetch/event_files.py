"""Files of NEXMark's events, made before a run and kept for later runs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet as pq

from benchmarks.nexmark.generator import Nexmark, NexmarkConfig

LOADED = 500_000
"""Events in a file that builds up the state."""
ARRIVING = 3_000
"""Events in a file that arrives by the clock."""


class Events:
    """Files of events; a missing file is made when it is asked for.

    Args:
        folder: where files are kept, in a folder for each stream. config: parameters of the stream.
        loaded: number of the first events, which build up the state.

    Attributes:
        first: number of files with these events.
    """

    def __init__(self, folder: Path, config: NexmarkConfig, loaded: int) -> None:
        name = "-".join(str(value) for value in msgspec.structs.astuple(config))
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._generator = Nexmark(config)
        self.first = loaded // LOADED
        self._loaded = self.first * LOADED

    def load(self, number: int) -> Path:
        """Return a file of the events that build up the state."""
        return self._file(number * LOADED, LOADED)

    def arriving(self, number: int) -> Path:
        """Return a file of the events that arrive by the clock."""
        return self._file(self._loaded + number * ARRIVING, ARRIVING)

    def _file(self, start: int, count: int) -> Path:
        path = self._folder / f"{start:012}-{count}.parquet"
        if not path.exists():
            half = path.with_suffix(".half")
            pq.write_table(self._generator.events(start, start + count), half, compression="lz4")
            half.rename(path)
        return path

"""Events that arrive by the clock: files that were made before, and are linked into a source's folder when due."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow.parquet as pq

from benchmarks.nexmark.generator import Nexmark, NexmarkConfig

LOADED = 500_000
"""Events in a file of those that bring state about."""
ARRIVING = 3_000
"""Events in a file of those that arrive by the clock."""


class Events:
    """Files of events, made where they are not there yet.

    Args:
        folder: where they are kept, below a folder for each stream. config: the stream.
        loaded: events that come first, to bring state about.
    """

    def __init__(self, folder: Path, config: NexmarkConfig, loaded: int) -> None:
        name = "-".join(str(value) for value in msgspec.structs.astuple(config))
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._made = Nexmark(config)
        self.first = loaded // LOADED
        self._loaded = self.first * LOADED

    def load(self, number: int) -> Path:
        """A file of the events that come first."""
        return self._file(number * LOADED, LOADED)

    def arriving(self, number: int) -> Path:
        """A file of the events that arrive by the clock."""
        return self._file(self._loaded + number * ARRIVING, ARRIVING)

    def _file(self, start: int, count: int) -> Path:
        path = self._folder / f"{start:012}-{count}.parquet"
        if not path.exists():
            half = path.with_suffix(".half")
            pq.write_table(self._made.events(start, start + count), half, compression="lz4")
            half.rename(path)
        return path


class Arrivals:
    """Puts files into a folder at a rate.

    Attributes:
        at: when each file came, in seconds since the epoch, by its name.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self.at: dict[str, float] = {}

    def put(self, file: Path) -> None:
        """Let a file come now."""
        os.link(file, self._source / file.name)
        self.at[file.name] = time.time()

    def forget(self, names: list[str]) -> None:
        """Remove files that were read, so that the source has few to list."""
        for name in names:
            (self._source / name).unlink(missing_ok=True)

    @contextmanager
    def clocked(self, files: list[Path], seconds: float) -> Iterator[threading.Event]:
        """Let files come one by one on a thread, `seconds` after each other.

        Yields:
            An event that is set when all files have come.
        """
        over, stop = threading.Event(), threading.Event()
        start = time.monotonic()

        def run() -> None:
            for number, file in enumerate(files):
                if stop.wait(max(0.0, start + (number + 1) * seconds - time.monotonic())):
                    return
                self.put(file)
            over.set()

        thread = threading.Thread(target=run, name="arrivals")
        thread.start()
        try:
            yield over
        finally:
            stop.set()
            thread.join()

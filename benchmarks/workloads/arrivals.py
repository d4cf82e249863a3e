"""Files that arrive in a query's source, at once or by the clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Arrivals:
    """Links files into a folder at a rate.

    Args:
        source: the folder that a query reads.

    Attributes:
        times: when each file came, in seconds since the epoch, by the file's name.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self.times: dict[str, float] = {}

    def put(self, file: Path) -> None:
        """Link a file into the folder now."""
        os.link(file, self._source / file.name)
        self.times[file.name] = time.time()

    def remove(self, names: list[str]) -> None:
        """Remove files that were read, so that the source has few to list; their times stay."""
        for name in names:
            (self._source / name).unlink(missing_ok=True)

    @contextmanager
    def clocked(self, files: list[Path], seconds: float) -> Iterator[threading.Event]:
        """Link files one by one on a thread, `seconds` after each other.

        Yields:
            An event that is set when all files have come.
        """
        all_came, stop = threading.Event(), threading.Event()
        start = time.monotonic()

        def run() -> None:
            for number, file in enumerate(files):
                if stop.wait(max(0.0, start + (number + 1) * seconds - time.monotonic())):
                    return
                self.put(file)
            all_came.set()

        thread = threading.Thread(target=run, name="arrivals")
        thread.start()
        try:
            yield all_came
        finally:
            stop.set()
            thread.join()

"""Times of batches and of the files that they read: when a file came, which batch read it, when that batch ended."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def batch_start(progress: Mapping[str, Any]) -> float:
    """Return when a batch started by Spark's progress report, in seconds since the epoch."""
    return datetime.fromisoformat(progress["timestamp"]).timestamp()


def batch_end(progress: Mapping[str, Any]) -> float:
    """Return when a batch ended by Spark's progress report, in seconds since the epoch."""
    return float(batch_start(progress) + progress["durationMs"]["triggerExecution"] / 1000)


def source_files(log: Callable[[str], str | None], entry: int) -> list[str]:
    """Return the names of the files in an entry of the file source's log.

    Args:
        log: returns the text of a file of the log by its name, or None if there is no such file.
        entry: number of the entry. Batches without files have none, so that batches may have higher numbers.
    """
    text = log(str(entry)) or log(f"{entry}.compact") or ""
    lines = [json.loads(line) for line in text.splitlines()[1:]]
    # A compacted file of the log repeats the entries before it.
    return [Path(unquote(urlsplit(line["path"]).path)).name for line in lines if line["batchId"] == entry]


def local_log(checkpoint: Path) -> Callable[[str], str | None]:
    """Return the `log` of `source_files` for a checkpoint on local disk."""

    def text_of(name: str) -> str | None:
        path = checkpoint / "sources" / "0" / name
        return path.read_text() if path.exists() else None

    return text_of


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

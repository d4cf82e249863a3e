"""Count the objects that an engine puts to its store."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class ObjectCounter:
    """Counts the objects that appear below folders, by listing the folders repeatedly.

    Objects are kept for much longer than `interval`, so that no listing misses one. Temporary files, which may come and
    go between two listings, are not counted.
    """

    def __init__(self, folders: list[Path], interval: float = 2.0) -> None:
        self._folders = folders
        self._seen: set[str] = set()
        self._stop = threading.Event()
        self._interval = interval
        self._thread = threading.Thread(target=self._watch, name="object-counter", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.count()

    def count(self) -> int:
        """List the folders now, and return the number of objects seen so far."""
        for folder in self._folders:
            for root, _, names in os.walk(folder):
                self._seen.update(
                    os.path.join(root, n) for n in names if not n.startswith(".") and ".tmp" not in n and "#" not in n
                )
        return len(self._seen)

    def close(self) -> None:
        """Stop listing."""
        self._stop.set()
        self._thread.join()

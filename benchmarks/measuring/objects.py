"""How many objects an engine puts to its store."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class ObjectCounter:
    """Counts the objects that appear below some folders, by looking again and again.

    Retained versions outlive the interval by far, so what is written and deleted between two looks is only what was
    never an object: temporary names, which are not counted.
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
            self.look()

    def look(self) -> int:
        """Look now; return how many objects have been seen so far."""
        for folder in self._folders:
            for root, _, names in os.walk(folder):
                self._seen.update(
                    os.path.join(root, n) for n in names if not n.startswith(".") and ".tmp" not in n and "#" not in n
                )
        return len(self._seen)

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()

"""Decoded blocks of remote files in memory, the least recently used given up first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from millpond.layout import Rows

_OVERHEAD = 300  # bytes of Python objects around a block


class BlockCache:
    """Some blocks of some files, together at most `limit` bytes. Thread-safe.

    Blocks that are in use stay alive after the cache has given them up, but are not counted any more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[tuple[str, int], Rows] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def limit(self) -> int:
        """Bytes of blocks, at most; may be set."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._shrink()

    def get(self, file: str, numbers: Sequence[int], *, once: bool = False) -> dict[int, Rows]:
        """Those of some blocks of a file that are here; with `once`, they count as used no later than they did."""
        found = {}
        with self._lock:
            for number in numbers:
                rows = self._blocks.get((file, number))
                if rows is not None:
                    if not once:
                        self._blocks.move_to_end((file, number))
                    found[number] = rows
            self.hits += len(found)
            self.misses += len(numbers) - len(found)
        return found

    def put(self, file: str, blocks: dict[int, Rows], *, once: bool = False) -> None:
        """Keep some blocks of a file, at the cost of others.

        Args:
            once: as far as there is room, and only until others need it: a scan leaves the cache as it was.
        """
        with self._lock:
            for number, rows in blocks.items():
                if (file, number) in self._blocks or (once and self.bytes + _size(rows) > self._limit):
                    continue
                self._blocks[file, number] = rows
                self.bytes += _size(rows)
                if once:
                    self._blocks.move_to_end((file, number), last=False)
            self._shrink()

    def drop(self, file: str) -> None:
        """Give up all blocks of a file."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] == file]:
                self.bytes -= _size(self._blocks.pop(key))

    def _shrink(self) -> None:
        while self.bytes > self._limit and self._blocks:
            self.bytes -= _size(self._blocks.popitem(last=False)[1])


def _size(rows: Rows) -> int:
    return rows.words.nbytes + rows.heap.nbytes + _OVERHEAD

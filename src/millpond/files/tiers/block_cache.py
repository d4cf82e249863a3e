"""Decoded blocks of remote files in memory, the least recently used given up first, and their filters beside them."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Sequence

from millpond.files.formats.blocks import RUN_BLOCK
from millpond.layout import Rows

_OVERHEAD = 300  # bytes of Python objects around a block
_FILTERS = 0.75
"""Of the limit, what filters may take: a filter saves reading blocks of a hundred times its size."""

_Name = tuple[str, int]


class BlockCache:
    """Some blocks and filters of some files, together at most `limit` bytes. Thread-safe.

    Filters go first, up to three quarters of the limit, and blocks take what they leave. Each lookup of many keys
    passes all filters in the same order, so that the least recently used one is the next to be asked for: where they do
    not all fit, those that go are chosen by lot.

    What is in use stays alive after the cache has given it up, but is not counted any more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[_Name, Rows] = OrderedDict()
        self._filters: dict[_Name, Rows] = {}
        self._lots: list[_Name] = []
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._block_bytes = 0
        self.filter_bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def bytes(self) -> int:
        """Bytes of blocks and filters."""
        return self._block_bytes + self.filter_bytes

    @property
    def limit(self) -> int:
        """Bytes of blocks and filters, at most; may be set."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._shrink()

    @property
    def filter_limit(self) -> int:
        """Bytes of filters, at most."""
        return int(_FILTERS * self._limit)

    @property
    def block_limit(self) -> int:
        """Bytes of blocks, at most, beside the filters that are here."""
        return self._limit - self.filter_bytes

    @property
    def full(self) -> bool:
        """Whether there is no room for another block of the usual size, unless others go for it."""
        return self.bytes + RUN_BLOCK > self._limit

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
            self._count(numbers, found)
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
                self._block_bytes += _size(rows)
                if once:
                    self._blocks.move_to_end((file, number), last=False)
            self._shrink()

    def get_filters(self, file: str, groups: Sequence[int]) -> dict[int, Rows]:
        """Those of some groups of a file's filters that are here."""
        with self._lock:
            found = {group: rows for group in groups if (rows := self._filters.get((file, group))) is not None}
            self._count(groups, found)
        return found

    def put_filters(self, file: str, groups: dict[int, Rows]) -> None:
        """Keep some groups of a file's filters, at the cost of blocks, and of others where there are too many."""
        with self._lock:
            for group, rows in groups.items():
                if (file, group) in self._filters or _size(rows) > self.filter_limit:
                    continue
                while self.filter_bytes + _size(rows) > self.filter_limit:
                    self._drop_filter(self._random.randrange(len(self._lots)))
                self._filters[file, group] = rows
                self._lots.append((file, group))
                self.filter_bytes += _size(rows)
            self._shrink()

    def drop(self, file: str) -> None:
        """Give up all blocks and filters of a file."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] == file]:
                self._block_bytes -= _size(self._blocks.pop(key))
            for lot in reversed(range(len(self._lots))):
                if self._lots[lot][0] == file:
                    self._drop_filter(lot)

    def _count(self, wanted: Sequence[int], found: dict[int, Rows]) -> None:
        self.hits += len(found)
        self.misses += len(wanted) - len(found)

    def _drop_filter(self, lot: int) -> None:
        self._lots[lot], self._lots[-1] = self._lots[-1], self._lots[lot]
        self.filter_bytes -= _size(self._filters.pop(self._lots.pop()))

    def _shrink(self) -> None:
        while self.filter_bytes > self.filter_limit:
            self._drop_filter(self._random.randrange(len(self._lots)))
        while self.bytes > self._limit and self._blocks:
            self._block_bytes -= _size(self._blocks.popitem(last=False)[1])


def _size(rows: Rows) -> int:
    return rows.words.nbytes + rows.heap.nbytes + _OVERHEAD

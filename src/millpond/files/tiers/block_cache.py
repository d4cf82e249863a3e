"""The in-memory cache of remote files' decoded blocks (LRU) and filters."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Sequence

from millpond.files.formats.blocks import RUN_BLOCK
from millpond.layout import Rows

_BLOCK_OVERHEAD_BYTES = 300  # bytes of Python objects per block
_MAX_FILTER_SHARE = 0.75
"""Share of the limit that filters may take: a filter saves reading blocks of a hundred times its size."""

_Name = tuple[str, int]


class BlockCache:
    """A cache of blocks and filters, together at most `limit` bytes. Thread-safe.

    Filters have priority, up to three quarters of the limit; blocks take the remaining memory. Blocks are evicted by
    LRU. Each lookup of many keys reads all filters in the same order, so the least recently used filter is the next one
    needed. Therefore filters are evicted at random.

    Evicted blocks in use stay alive, but do not count any more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[_Name, Rows] = OrderedDict()
        self._filters: dict[_Name, Rows] = {}
        self._filter_names: list[_Name] = []
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
        """Largest size of blocks and filters in bytes; may be set."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._shrink()

    @property
    def filter_limit(self) -> int:
        """Largest size of filters in bytes."""
        return int(_MAX_FILTER_SHARE * self._limit)

    @property
    def block_limit(self) -> int:
        """Largest size of blocks in bytes, given the filters in the cache."""
        return self._limit - self.filter_bytes

    @property
    def full(self) -> bool:
        """Whether another block of the usual size would evict a cached one."""
        return self.bytes + RUN_BLOCK > self._limit

    def get(self, file: str, numbers: Sequence[int], *, once: bool = False) -> dict[int, Rows]:
        """Return the cached blocks among some of a file, by number; with `once`, their LRU order does not change."""
        cached = {}
        with self._lock:
            for number in numbers:
                rows = self._blocks.get((file, number))
                if rows is not None:
                    if not once:
                        self._blocks.move_to_end((file, number))
                    cached[number] = rows
            self._count(numbers, cached)
        return cached

    def put(self, file: str, blocks: dict[int, Rows], *, once: bool = False) -> None:
        """Cache some blocks of a file, and evict others if needed.

        Args:
            file: name of the file.
            blocks: decoded blocks, by number.
            once: the blocks come from a scan. They are cached only in free room and are the first to be evicted, so
                that a scan does not displace other blocks.
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
        """Return the cached filter groups among some of a file, by number."""
        with self._lock:
            cached = {group: rows for group in groups if (rows := self._filters.get((file, group))) is not None}
            self._count(groups, cached)
        return cached

    def put_filters(self, file: str, groups: dict[int, Rows]) -> None:
        """Cache some filter groups of a file; evict other filters at `filter_limit`, and blocks at `limit`."""
        with self._lock:
            for group, rows in groups.items():
                if (file, group) in self._filters or _size(rows) > self.filter_limit:
                    continue
                while self.filter_bytes + _size(rows) > self.filter_limit:
                    self._drop_filter(self._random.randrange(len(self._filter_names)))
                self._filters[file, group] = rows
                self._filter_names.append((file, group))
                self.filter_bytes += _size(rows)
            self._shrink()

    def drop(self, file: str) -> None:
        """Drop all blocks and filters of a file."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] == file]:
                self._block_bytes -= _size(self._blocks.pop(key))
            for index in reversed(range(len(self._filter_names))):
                if self._filter_names[index][0] == file:
                    self._drop_filter(index)

    def _count(self, requested: Sequence[int], cached: dict[int, Rows]) -> None:
        self.hits += len(cached)
        self.misses += len(requested) - len(cached)

    def _drop_filter(self, index: int) -> None:
        self._filter_names[index], self._filter_names[-1] = self._filter_names[-1], self._filter_names[index]
        self.filter_bytes -= _size(self._filters.pop(self._filter_names.pop()))

    def _shrink(self) -> None:
        while self.filter_bytes > self.filter_limit:
            self._drop_filter(self._random.randrange(len(self._filter_names)))
        while self.bytes > self._limit and self._blocks:
            self._block_bytes -= _size(self._blocks.popitem(last=False)[1])


def _size(rows: Rows) -> int:
    return rows.words.nbytes + rows.heap.nbytes + _BLOCK_OVERHEAD_BYTES

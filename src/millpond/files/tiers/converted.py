"""A block source that converts the blocks of an old run file to its table's current columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import BlockSource, BlockTable, FilterTable, Numbers, Part, in_parts, shape_of
from millpond.files.formats.conversion import Conversion
from millpond.files.tiers.block_cache import BlockCache
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import gather_rows
from millpond.layout import RowLayout, Rows

_AT_ONCE = 128
"""Largest number of blocks that are converted together."""


class ConvertedSource:
    """A run file's blocks, converted on demand and cached.

    Args:
        source: the blocks as they were written.
        name: name of the file.
        layout: current layout of the table, to which the file's rows can be converted.
        cache: the cache for converted blocks.
    """

    resident = False
    distant = False

    def __init__(self, source: BlockSource, name: str, layout: RowLayout, cache: BlockCache) -> None:
        self._source = source
        self._convert = Conversion(source.layout, layout)
        self._name = f"{name} converted"
        self._cache = cache
        self.layout = layout
        self.index = source.index

    @property
    def memory(self) -> int:
        """See `BlockSource.memory`."""
        return self._source.memory

    def blocks(self, wanted: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        return self._blocks(np.unique(wanted).astype(np.int64), once=False)

    def scanned(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.scanned`."""
        return lambda: self._blocks(np.arange(begin, end), once=True)

    def _blocks(self, numbers: NDArray[np.int64], *, once: bool) -> BlockTable:
        blocks = self._cache.get(self._name, numbers.tolist())
        missing = np.array([number for number in numbers.tolist() if number not in blocks], np.int64)
        for begin in range(0, len(missing), _AT_ONCE):
            converted = self._made(missing[begin : begin + _AT_ONCE], once)
            self._cache.put(self._name, converted, once=once)
            blocks |= converted
        words_at, heap_at = np.zeros(self.index.count, np.uint64), np.zeros(self.index.count, np.uint64)
        for number, rows in blocks.items():
            words_at[number], heap_at[number] = address(rows.words), address(rows.heap)
        return BlockTable(words_at, heap_at, list(blocks.values()))

    def _made(self, numbers: NDArray[np.int64], once: bool) -> dict[int, Rows]:
        table = self._source.scanned(int(numbers[0]), int(numbers[-1]) + 1)() if once else self._source.blocks(numbers)
        before = self._source.layout
        blobs, converted = shape_of(before).blobs, {}
        for number in numbers.tolist():
            count = int(self.index.starts[number + 1] - self.index.starts[number])
            rows_at = table.words_at[number] + np.arange(count, dtype=np.uint64) * np.uint64(8 * before.width)
            heaps_at = np.full(count, table.heap_at[number], np.uint64)
            converted[number] = self._convert(Rows(*gather_rows(rows_at, heaps_at, before.width, blobs)))
        return converted

    def parts(self, wanted: NDArray[np.int64], tied: NDArray[np.bool_]) -> Iterator[Part]:
        """See `BlockSource.parts`."""
        return in_parts(self.blocks, wanted, tied, _AT_ONCE)

    def filters(self, wanted: Numbers) -> Callable[[], FilterTable]:
        """See `BlockSource.filters`: hashes do not change, so the file's own filters apply."""
        return self._source.filters(wanted)

    def expect_rows(self, places: NDArray[np.uint64]) -> None:
        """Do nothing: converted blocks are in memory."""

    def expect_blocks(self, begin: int, end: int) -> None:
        """See `BlockSource.expect_blocks`."""
        self._source.expect_blocks(begin, end)

    def close(self) -> None:
        """See `BlockSource.close`."""
        self._cache.drop(self._name)
        self._source.close()

"""A block source that converts the blocks of an old run file to its table's current columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import (
    BlockSource,
    BlockTable,
    FilterPart,
    Numbers,
    Part,
    kernel_layout,
    split_into_parts,
)
from millpond.files.formats.conversion import Conversion
from millpond.files.tiers.block_cache import BlockCache
from millpond.kernels.pointers import address
from millpond.kernels.runs.gather import gather_rows
from millpond.layout import RowLayout, Rows

_MAX_BLOCKS_AT_ONCE = 128
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
    may_read_disk = False

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

    def blocks(self, requested: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        return self._blocks(np.unique(requested).astype(np.int64), once=False)

    def begin_scan(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.begin_scan`."""
        return lambda: self._blocks(np.arange(begin, end), once=True)

    def _blocks(self, numbers: NDArray[np.int64], *, once: bool) -> BlockTable:
        blocks = self._cache.get(self._name, numbers.tolist())
        missing = np.array([number for number in numbers.tolist() if number not in blocks], np.int64)
        for begin in range(0, len(missing), _MAX_BLOCKS_AT_ONCE):
            converted = self._convert_blocks(missing[begin : begin + _MAX_BLOCKS_AT_ONCE], once)
            self._cache.put(self._name, converted, once=once)
            blocks |= converted
        words_at, heap_at = np.zeros(self.index.count, np.uint64), np.zeros(self.index.count, np.uint64)
        for number, rows in blocks.items():
            words_at[number], heap_at[number] = address(rows.words), address(rows.heap)
        return BlockTable(words_at, heap_at, list(blocks.values()))

    def _convert_blocks(self, numbers: NDArray[np.int64], once: bool) -> dict[int, Rows]:
        table = (
            self._source.begin_scan(int(numbers[0]), int(numbers[-1]) + 1)() if once else self._source.blocks(numbers)
        )
        before = self._source.layout
        blobs, converted = kernel_layout(before).blobs, {}
        for number in numbers.tolist():
            count = int(self.index.starts[number + 1] - self.index.starts[number])
            rows_at = table.words_at[number] + np.arange(count, dtype=np.uint64) * np.uint64(8 * before.width)
            heaps_at = np.full(count, table.heap_at[number], np.uint64)
            converted[number] = self._convert(Rows(*gather_rows(rows_at, heaps_at, before.width, blobs)))
        return converted

    def parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part]:
        """See `BlockSource.parts`."""
        return split_into_parts(self.blocks, requested, keep_with_previous, _MAX_BLOCKS_AT_ONCE)

    def filters(self, requested: Numbers) -> Iterator[FilterPart]:
        """See `BlockSource.filters`: hashes do not change, so the file's own filters apply."""
        return self._source.filters(requested)

    def prefetch_rows(self, places: NDArray[np.uint64]) -> None:
        """Do nothing: converted blocks are in memory."""

    def prefetch_blocks(self, begin: int, end: int) -> None:
        """See `BlockSource.prefetch_blocks`."""
        self._source.prefetch_blocks(begin, end)

    def close(self) -> None:
        """See `BlockSource.close`."""
        self._cache.drop(self._name)
        self._source.close()

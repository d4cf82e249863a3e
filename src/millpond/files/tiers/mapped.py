"""Raw run files on a local disk, mapped into memory; each block is checked before its first use."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import BlockTable, FilterPart, Numbers, Part, split_into_parts
from millpond.files.formats.codec import FILTER, HEADER, RAW, ROWS, check_block, check_references, damaged_error
from millpond.files.formats.run import read_directory
from millpond.files.mapping import advise, map_file
from millpond.kernels.pointers import address
from millpond.kernels.runs.bloom import LINE
from millpond.kernels.runs.readahead import probably_cached, request_pages, request_range
from millpond.layout import RowLayout

_REACH_ROWS = 16  # a row is seldom farther from the position that interpolation of its hash gives
_GAP_BYTES = 4 * mmap.PAGESIZE
PART_BLOCKS = 128
"""Blocks of a local file that are checked and probed together."""
_CALLS_ASSUMED_CACHED = 31
"""Calls for which pages are assumed to be in memory after a check found them there: the check costs more than a use."""


class CompressedError(ValueError):
    """A run file is compressed, so it cannot be mapped."""


class MappedSource:
    """The blocks of a raw run file, mapped in place.

    Args:
        path: path of the file.
        layout: layout of its rows.
        checked: whether blocks need no check, because this process has just written or completely checked the file.

    Attributes:
        access_times: lowest access time (tombstones excluded) and highest of its rows.
        group: number of blocks whose filters are stored together.

    Raises:
        StateDamagedError: the file is not a complete run file.
        CompressedError: the file is compressed.
    """

    may_read_disk = True

    def __init__(self, path: str, layout: RowLayout, *, checked: bool = False) -> None:
        self.path = path
        self.layout = layout
        self._view = map_file(path)
        self.size = len(self._view)
        if not self.size:
            raise damaged_error(path, "it is empty")
        # A truncated file must be detected here; otherwise rows could end beyond the mapping.
        directory = read_directory(lambda o, n: self._view[o : o + n], self.size, path, layout)
        if not directory.raw:
            raise CompressedError(f"{path} is compressed and cannot be used where it lies")
        self.index, self.access_times, self.group = directory.index, directory.access_times, directory.group
        self._base = address(np.frombuffer(self._view, np.uint8))
        base = np.uint64(self._base)
        words_at = base + directory.offsets.astype(np.uint64) + np.uint64(HEADER)
        words_bytes = np.diff(self.index.starts) * (8 * layout.width)
        heap_at = words_at + words_bytes.astype(np.uint64)
        group = np.arange(self.index.count) // self.group
        filter_at = base + (directory.filter_offsets[group] + HEADER + LINE * directory.filter_lines).astype(np.uint64)
        self._table = BlockTable(words_at, heap_at, (self._view,))
        self._filter_at = filter_at
        self._reach = _REACH_ROWS * 8 * layout.width
        # No readahead by the kernel: a page fault of a probe reads one page, and `expect_…` requests further pages.
        advise(self._view, mmap.MADV_RANDOM)
        self._checked = np.full(self.index.count, checked)
        self._checked_filters = np.full(len(directory.filter_offsets), checked)
        self._all_blocks = self._all_filters = checked
        self._calls_assumed_cached = 0
        held = (self.index.fence, self.index.starts, self.index.lines, words_at, heap_at, filter_at, self._checked)
        self.memory = sum(array.nbytes for array in held)

    @property
    def resident(self) -> bool:
        """See `BlockSource.resident`: true once all blocks and filters are checked."""
        return self._all_blocks and self._all_filters

    def blocks(self, requested: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        if not self._all_blocks:
            unchecked = np.unique(requested)
            unchecked = unchecked[~self._checked[unchecked]]
            for begin, end in _contiguous_ranges(unchecked):
                self.prefetch_blocks(begin, end)
            for block in unchecked.tolist():
                self._check(block)
            if len(unchecked):
                self._all_blocks = bool(self._checked.all())
        return self._table._replace(complete=self._all_blocks)

    def begin_scan(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.begin_scan`; as many blocks after `end` are prefetched as well."""
        self.prefetch_blocks(begin, min(begin + 2 * (end - begin), self.index.count))
        return lambda: self.blocks(np.arange(begin, end))

    def parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part]:
        """See `BlockSource.parts`."""
        return split_into_parts(self.blocks, requested, keep_with_previous, PART_BLOCKS)

    def filters(self, requested: Numbers) -> Iterator[FilterPart]:
        """Check the filters, and yield them in one part."""
        if not self._all_filters:
            unchecked = np.unique(np.asarray(requested) // self.group)
            unchecked = unchecked[~self._checked_filters[unchecked]]
            for group in unchecked.tolist():
                offset = int(self._filter_at[group * self.group]) - self._base - HEADER
                header = check_block(self._view, offset, self.path, kind=FILTER, width=LINE // 8)
                lines = int(self.index.lines[group * self.group : (group + 1) * self.group].sum())
                if header.encoding != RAW or header.stored != LINE * lines:
                    raise damaged_error(self.path, f"the filter at byte {offset} has another length")
                self._checked_filters[group] = True
            if len(unchecked):
                self._all_filters = bool(self._checked_filters.all())
        return iter([FilterPart(0, len(requested), self._filter_at, (self._view,))])

    def prefetch_rows(self, places: NDArray[np.uint64]) -> None:
        """See `BlockSource.prefetch_rows`: pages that are not in memory are requested together."""
        if self._calls_assumed_cached > 0:  # a race of two threads makes it -1, which is harmless
            self._calls_assumed_cached -= 1
        elif len(places) and probably_cached(places):
            self._calls_assumed_cached = _CALLS_ASSUMED_CACHED
        elif len(places):
            request_pages(places, self._reach, self._reach, _GAP_BYTES)

    def prefetch_blocks(self, begin: int, end: int) -> None:
        """See `BlockSource.prefetch_blocks`."""
        if begin < end:
            stop = self._offset(end) if end < self.index.count else self.size
            request_range(self._base + self._offset(begin), stop - self._offset(begin))

    def _offset(self, block: int) -> int:
        return int(self._table.words_at[block]) - self._base - HEADER

    def _check(self, block: int) -> None:
        offset = self._offset(block)
        header = check_block(self._view, offset, self.path, kind=ROWS, width=self.layout.width)
        rows = int(self.index.starts[block + 1] - self.index.starts[block])
        if header.encoding != RAW or header.rows != rows:
            raise damaged_error(self.path, f"the block at byte {offset} does not fit the footer")
        check_references(int(self._table.words_at[block]), header, self.layout, offset, self.path)
        self._checked[block] = True

    def close(self) -> None:
        """See `BlockSource.close`: the file is unmapped with its last pin."""


def _contiguous_ranges(numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ascending numbers as contiguous ranges [first, stop)."""
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) > 1)
    begins = numbers[np.append(0, breaks + 1)].tolist()
    ends = (numbers[np.append(breaks, len(numbers) - 1)] + 1).tolist()
    return list(zip(begins, ends, strict=True))

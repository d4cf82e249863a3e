"""Run files in the state location, read block by block through a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.patience import patiently
from millpond.files.formats.blocks import BlockTable, FilterTable, Numbers
from millpond.files.formats.codec import FILTER, HEADER, RAW, check_block, damaged, decode_block
from millpond.files.formats.run import Directory, footer_guess, read_directory
from millpond.files.refs import RunRef
from millpond.files.tiers.block_cache import BlockCache
from millpond.kernels.pointers import address
from millpond.kernels.runs.bloom import LINE
from millpond.layout import RowLayout, Rows

_REQUEST = 1 << 20
"""Bytes that are asked for in one request, roughly; requests of one call run side by side."""
_NO_HEAP = np.empty(0, np.uint8)


class RemoteSource:
    """The blocks of a run file in the state location.

    Args:
        files: the state location. ref: the file. layout: the layout of its rows.
        cache: keeps decoded blocks. pool: runs requests side by side; its threads must not wait for this source.

    Attributes:
        fetched: bytes of blocks and filters that were read so far, repeatedly read ones repeatedly.

    Raises:
        StateDamagedError: the file is missing or not a whole run file.
    """

    resident = False
    distant = False

    def __init__(self, files: FileSystem, ref: RunRef, layout: RowLayout, cache: BlockCache, pool: Executor) -> None:
        self._files = files
        self._cache = cache
        self._pool = pool
        self._place = files.locate(ref.name)
        self.ref = ref
        self.layout = layout
        self.directory: Directory = read_directory(
            lambda o, n: patiently(lambda: files.get_range(ref.name, o, n)),
            ref.bytes,
            self._place,
            layout,
            guess=max(65536, footer_guess(ref.rows, layout)),
        )
        if self.directory.footer.rows != ref.rows or self.directory.index.highest != ref.last:
            raise damaged(self._place, "it is not the file that the checkpoint names")
        self.index = self.directory.index
        self.fetched = 0
        self._edge: dict[int, Rows] = {}  # where a scan was last: its next piece begins in the same block
        self.memory = sum(a.nbytes for a in (self.index.fence, self.index.starts, self.index.lines)) * 2

    def blocks(self, wanted: Numbers, *, once: bool = False) -> BlockTable:
        """See `BlockSource.blocks`."""
        numbers = np.unique(wanted).tolist()
        blocks = self._bring(numbers, once=once)
        words_at = np.zeros(self.index.count, np.uint64)
        heap_at = np.zeros(self.index.count, np.uint64)
        for number, rows in blocks.items():
            words_at[number] = address(rows.words)
            heap_at[number] = address(rows.heap)
        return BlockTable(words_at, heap_at, list(blocks.values()))

    def filters(self, wanted: Numbers) -> FilterTable:
        """See `BlockSource.filters`; filters stand in the cache under the negative numbers of their groups."""
        per_group = self.directory.footer.group
        groups = np.unique(np.asarray(wanted) // per_group)
        found = self._bring((-1 - groups).tolist())
        filter_at = np.zeros(self.index.count, np.uint64)
        for group in groups.tolist():
            part = slice(group * per_group, (group + 1) * per_group)
            lines = self.directory.filter_lines[part].astype(np.uint64)
            filter_at[part] = np.uint64(address(found[-1 - group].words)) + np.uint64(LINE) * lines
        return FilterTable(filter_at, list(found.values()))

    def pieces(self) -> Iterator[Rows]:
        """All blocks in order, each read once and not kept in the cache."""
        count = self.index.count
        per_piece = max(1, 8 * _REQUEST // max(1, int(self.directory.sizes.max(initial=1))))
        for begin in range(0, count, per_piece):
            yield from self._fetch(list(range(begin, min(begin + per_piece, count)))).values()

    def _bring(self, numbers: Sequence[int], *, once: bool = False) -> dict[int, Rows]:
        found = self._cache.get(self.ref.name, numbers, once=once)
        edge = self._edge
        found |= {number: edge[number] for number in numbers if number in edge and number not in found}
        missing = [number for number in numbers if number not in found]
        if missing:
            fetched = self._fetch(missing)
            self._cache.put(self.ref.name, fetched, once=once)
            found |= fetched
        if once:
            self._edge = {number: found[number] for number in numbers[-1:]}
        return found

    def _fetch(self, numbers: Sequence[int]) -> dict[int, Rows]:
        requests: list[list[int]] = [[]]
        size = 0
        for number in numbers:
            if size >= _REQUEST:
                requests.append([])
                size = 0
            requests[-1].append(number)
            size += self._range(number)[1]
        if len(requests) == 1:
            return self._request(requests[0])
        return {number: rows for part in self._pool.map(self._request, requests) for number, rows in part.items()}

    def _range(self, number: int) -> tuple[int, int]:
        if number < 0:
            return int(self.directory.filter_offsets[-1 - number]), self.directory.filter_size(-1 - number)
        return int(self.directory.offsets[number]), int(self.directory.sizes[number])

    def _request(self, numbers: Sequence[int]) -> dict[int, Rows]:
        ranges = [self._range(number) for number in numbers]
        self.fetched += sum(length for _, length in ranges)  # a race loses a count, which does no harm
        parts = patiently(lambda: self._files.get_ranges(self.ref.name, ranges))
        return {
            n: self._decode(n, memoryview(p).cast("B"), r[0]) for n, p, r in zip(numbers, parts, ranges, strict=True)
        }

    def _decode(self, number: int, data: memoryview, offset: int) -> Rows:
        if number < 0:
            header = check_block(data, 0, self._place, kind=FILTER, width=LINE // 8)
            if header.encoding != RAW or HEADER + header.stored != len(data):
                raise damaged(self._place, f"the filter at byte {offset} has another length")
            lines = np.frombuffer(data, np.uint64, header.stored // 8, HEADER)
            return Rows(lines.reshape(-1, LINE // 8), _NO_HEAP)
        rows, _ = decode_block(data, 0, self.layout, self._place)
        if rows.count != int(self.index.starts[number + 1] - self.index.starts[number]):
            raise damaged(self._place, f"the block at byte {offset} does not fit the footer")
        return rows

    def expect_rows(self, places: NDArray[np.uint64]) -> None:
        """They are here: `blocks` has brought them."""

    def expect_blocks(self, begin: int, end: int) -> None:
        """`blocks` brings them, side by side."""

    def close(self) -> None:
        """See `BlockSource.close`."""
        self._edge = {}
        self._cache.drop(self.ref.name)

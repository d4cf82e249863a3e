"""Run files in a remote state location, read by blocks through a cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.backends.retry import with_retries
from millpond.files.formats.blocks import RUN_BLOCK, BlockTable, FilterPart, Numbers, Part, cut_positions
from millpond.files.formats.codec import FILTER, HEADER, RAW, Decoded, check_block, damaged_error, decode_blocks
from millpond.files.formats.run import Directory, estimate_footer_size, read_directory
from millpond.files.refs import RunRef
from millpond.files.tiers.block_cache import BlockCache
from millpond.files.tiers.read_budget import ReadBudget
from millpond.kernels.pointers import address
from millpond.kernels.runs.bloom import LINE
from millpond.layout import RowLayout, Rows

MAX_GAP_BYTES = 256 << 10
"""Largest gap in bytes between two blocks that are fetched in one request, including the gap."""
_REQUEST_BYTES = 1 << 20
"""Largest size of one request in bytes, unless a block is larger; requests of one call run concurrently."""
_NO_HEAP = np.empty(0, np.uint8)

T = TypeVar("T")


class RemoteSource:
    """The blocks of a run file in the state location.

    Args:
        files: the state location.
        ref: the file.
        layout: layout of its rows.
        cache: cache of decoded blocks and of filters.
        pool: runs requests concurrently; its threads must not wait for this source.
        read_budget: memory budget for blocks and filters in flight to lookups.

    Attributes:
        fetched: bytes of blocks and filters that were read so far, including repeated reads.

    Raises:
        StateDamagedError: the file is missing or not a complete run file.
    """

    resident = False
    may_read_disk = False

    def __init__(
        self,
        files: FileSystem,
        ref: RunRef,
        layout: RowLayout,
        cache: BlockCache,
        pool: Executor,
        read_budget: ReadBudget,
    ) -> None:
        self._files = files
        self._cache = cache
        self._pool = pool
        self._read_budget = read_budget
        self._place = files.locate(ref.name)
        self.ref = ref
        self.layout = layout
        self.directory: Directory = read_directory(
            lambda o, n: with_retries(lambda: files.get_range(ref.name, o, n)),
            ref.bytes,
            self._place,
            layout,
            guess=max(65536, estimate_footer_size(ref, layout)),
        )
        if self.directory.index.rows != ref.rows or self.directory.index.highest != ref.last:
            raise damaged_error(self._place, "it is not the file that the checkpoint names")
        self.index = self.directory.index
        self._counts = np.diff(self.index.starts)
        self.fetched = 0
        # Last block of the last scan: the scan's next range begins in the same block.
        self._scan_edge: dict[int, Rows] = {}
        directory = self.directory
        held = (self.index.fence, self.index.starts, self.index.lines, self._counts)
        self.memory = sum(array.nbytes for array in (*held, directory.offsets, directory.sizes, directory.filter_lines))

    def blocks(self, requested: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        numbers = np.unique(requested).astype(np.int64)
        cached = self._cached(numbers, once=False)
        read = self._read_all(self._spans(_exclude(numbers, cached)))
        self._cache_blocks(read, once=False)
        table = self._empty_table()
        return table._replace(pins=self._fill(table, cached, read))

    def begin_scan(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.begin_scan`."""
        numbers = np.arange(begin, end)
        hits = self._cached(numbers, once=True)
        awaited = [(span, self._pool.submit(self._fetch, span)) for span in self._spans(_exclude(numbers, hits))]

        def wait() -> BlockTable:
            read = [(span, self._decode(span, future.result())) for span, future in awaited]
            awaited.clear()
            self._cache_blocks(read, once=True)
            table = self._empty_table()
            pins = self._fill(table, hits, read)
            if len(numbers):
                last = end - 1
                self._scan_edge = {
                    last: hits[last] if last in hits else _copied(read[-1][1].block(len(read[-1][0]) - 1))
                }
            return table._replace(pins=pins)

        return wait

    def parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part]:
        """See `BlockSource.parts`; the next parts are prefetched as far as the memory budget allows."""
        return _begun(self._parts(requested, keep_with_previous))

    def _parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part | None]:
        # A lookup of more blocks than the cache holds would evict its own blocks before the next lookup needs them.
        once = len(requested) * RUN_BLOCK > self._cache.block_limit // 2
        table = self._empty_table()

        def send(step: _Step) -> None:
            step.cached = self._cached(step.numbers, once=once)
            for span in self._spans(_exclude(step.numbers, step.cached)):
                step.requests.append((span, self._pool.submit(self._fetch, span)))

        for step in self._in_flight(self._steps(requested, keep_with_previous, self._block_memory), send):
            if step is None:
                yield None
                continue
            read = [(span, self._decode(span, request.result())) for span, request in step.requests]
            step.requests.clear()
            self._cache_blocks(read, once=once)
            yield Part(step.begin, step.end, table._replace(pins=self._fill(table, step.cached, read)))
            del read
            table.words_at[step.numbers] = table.heap_at[step.numbers] = 0

    def _in_flight(self, steps: Iterable[_Step], send: Callable[[_Step], None]) -> Iterator[_Step | None]:
        """Send steps as far as the memory budget allows, and yield each in order once it was sent.

        The first item is None. A generator runs nothing until its first `next`, so `_begun` takes the None to send the
        first requests in the call. The memory of a step is released when the next one is requested.
        """
        waiting, started = deque(steps), deque[_Step]()

        def send_more() -> None:
            while waiting and self._read_budget.reserve(waiting[0].size, force=not started):
                started.append(waiting.popleft())
                send(started[-1])

        try:
            send_more()
            yield None
            while started:
                yield started[0]
                self._read_budget.release(started.popleft().size)
                send_more()
        finally:
            for step in started:
                for _, request in step.requests:
                    request.cancel()
                self._read_budget.release(step.size)

    def _block_memory(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of memory for some blocks (ascending): the bytes read with gaps, and the decoded blocks."""
        offsets, sizes = self.directory.offsets[numbers], self.directory.sizes[numbers]
        gaps = np.append(np.diff(offsets), sizes[-1:]) - sizes
        memory: NDArray[np.int64] = sizes + np.where(gaps <= MAX_GAP_BYTES, gaps, 0) + np.maximum(RUN_BLOCK, sizes)
        return memory

    def _steps(
        self,
        requested: NDArray[np.int64],
        keep_with_previous: NDArray[np.bool_],
        memory: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    ) -> list[_Step]:
        """Divide a lookup's blocks or filter groups into steps of the read budget's size.

        Args:
            requested, keep_with_previous: see `BlockSource.parts`.
            memory: returns the bytes of memory that each of some distinct numbers takes.
        """
        new = np.diff(requested, prepend=-1) > 0
        numbers, position = requested[new], np.cumsum(new) - 1
        total = np.append(0, np.cumsum(memory(numbers)))
        steps = []
        for begin, end in pairwise(cut_positions(keep_with_previous, total[position] // self._read_budget.step)):
            low, high = int(position[begin]), int(position[end - 1]) + 1
            steps.append(_Step(begin, end, numbers[low:high], int(total[high] - total[low])))
        return steps

    def filters(self, requested: Numbers) -> Iterator[FilterPart]:
        """See `BlockSource.filters`; the next parts are prefetched as far as the memory budget allows."""
        return _begun(self._filter_parts(np.asarray(requested, np.int64) // self.directory.group))

    def _filter_parts(self, requested: NDArray[np.int64]) -> Iterator[FilterPart | None]:
        """Yield the filters of some groups (ascending, with repetitions) in parts."""
        per_group = self.directory.group
        cached = self._cache.get_filters(self.ref.name, np.flatnonzero(np.bincount(requested)).tolist())

        def memory(groups: NDArray[np.int64]) -> NDArray[np.int64]:
            sizes = [0 if group in cached else self.directory.filter_size(group) for group in groups.tolist()]
            return np.array(sizes, np.int64)

        def send(step: _Step) -> None:
            step.cached = {group: cached[group] for group in step.numbers.tolist() if group in cached}
            for group in _exclude(step.numbers, step.cached).tolist():
                step.requests.append((group, self._pool.submit(self._read_filter, group)))

        filter_at = np.zeros(self.index.count, np.uint64)
        for step in self._in_flight(self._steps(requested, np.zeros(len(requested), np.bool_), memory), send):
            if step is None:
                yield None
                continue
            read = {group: request.result() for group, request in step.requests}
            step.requests.clear()
            self._cache.put_filters(self.ref.name, read)
            filters = step.cached | read
            for group, rows in filters.items():
                blocks = slice(group * per_group, (group + 1) * per_group)
                lines = self.directory.filter_lines[blocks].astype(np.uint64)
                filter_at[blocks] = np.uint64(address(rows.words)) + np.uint64(LINE) * lines
            yield FilterPart(step.begin, step.end, filter_at, list(filters.values()))
            del read, filters, rows
            filter_at[step.numbers[0] * per_group : (step.numbers[-1] + 1) * per_group] = 0

    def pieces(self) -> Iterator[Rows]:
        """Yield all blocks in order; each is read once and not cached."""
        group = self.directory.offsets // (8 * _REQUEST_BYTES)
        for numbers in np.split(np.arange(self.index.count), np.flatnonzero(np.diff(group)) + 1):
            for span, decoded in self._read_all(self._spans(numbers)):
                for position in range(len(span)):
                    yield decoded.block(position)

    def _empty_table(self) -> BlockTable:
        return BlockTable(np.zeros(self.index.count, np.uint64), np.zeros(self.index.count, np.uint64), ())

    def _cached(self, numbers: NDArray[np.int64], *, once: bool) -> dict[int, Rows]:
        requested = numbers.tolist()
        cached = self._cache.get(self.ref.name, requested, once=once)
        edge = self._scan_edge
        return cached | {number: rows for number, rows in edge.items() if number in requested}

    def _cache_blocks(self, read: _Read, *, once: bool) -> None:
        """Cache fetched blocks. They are copied, so that the cache can evict each block independently."""
        if not self._cache.limit or (once and self._cache.full):
            return
        for span, decoded in read:
            blocks = {number: _copied(decoded.block(position)) for position, number in enumerate(span.tolist())}
            self._cache.put(self.ref.name, blocks, once=once)

    def _fill(self, table: BlockTable, cached: dict[int, Rows], read: _Read) -> list[Any]:
        """Enter the addresses of blocks into a table; return the pins that keep their memory alive."""
        for number, rows in cached.items():
            table.words_at[number], table.heap_at[number] = address(rows.words), address(rows.heap)
        for span, decoded in read:
            table.words_at[span], table.heap_at[span] = decoded.words_at, decoded.heap_at
        return [*cached.values(), *(decoded.rows for _, decoded in read)]

    def _spans(self, numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Group blocks (ascending numbers) into requests: near ones together, up to about `_REQUEST_BYTES` bytes."""
        if not len(numbers):
            return []
        begins = self.directory.offsets[numbers]
        gaps = begins[1:] - begins[:-1] - self.directory.sizes[numbers[:-1]]
        cuts = (np.flatnonzero((gaps > MAX_GAP_BYTES) | (np.diff(begins // _REQUEST_BYTES) > 0)) + 1).tolist()
        return [numbers[begin:end] for begin, end in pairwise([0, *cuts, len(numbers)])]

    def _read_all(self, spans: list[NDArray[np.int64]]) -> _Read:
        fetched = self._pool.map(self._fetch, spans) if len(spans) > 1 else map(self._fetch, spans)
        return [(span, self._decode(span, data)) for span, data in zip(spans, fetched, strict=True)]

    def _fetch(self, span: NDArray[np.int64]) -> Buffer:
        offsets, sizes = self.directory.offsets[span], self.directory.sizes[span]
        begin, end = int(offsets[0]), int(offsets[-1] + sizes[-1])
        self.fetched += int(sizes.sum())  # a race between threads can lose a count, which is harmless
        return with_retries(lambda: self._files.get_range(self.ref.name, begin, end - begin))

    def _decode(self, span: NDArray[np.int64], data: Buffer) -> Decoded:
        # Decoded by the thread that waits: many pool threads that decode a little would mostly wait for each other.
        offsets = self.directory.offsets[span]
        begin = int(offsets[0])
        return decode_blocks(
            memoryview(data).cast("B"), offsets - begin, self._counts[span], self.layout, self._place, begin
        )

    def _read_filter(self, group: int) -> Rows:
        offset, size = int(self.directory.filter_offsets[group]), self.directory.filter_size(group)
        self.fetched += size
        data = memoryview(with_retries(lambda: self._files.get_range(self.ref.name, offset, size))).cast("B")
        header = check_block(data, 0, self._place, kind=FILTER, width=LINE // 8)
        if header.encoding != RAW or HEADER + header.stored != len(data):
            raise damaged_error(self._place, f"the filter at byte {offset} has another length")
        # Copied, because the answer's buffer may be larger than the filter and would stay in memory with it.
        lines = np.frombuffer(data, np.uint64, header.stored // 8, HEADER).copy()
        return Rows(lines.reshape(-1, LINE // 8), _NO_HEAP)

    def prefetch_rows(self, places: NDArray[np.uint64]) -> None:
        """Do nothing: `blocks` has fetched them into memory."""

    def prefetch_blocks(self, begin: int, end: int) -> None:
        """Do nothing: `blocks` fetches them concurrently."""

    def close(self) -> None:
        """See `BlockSource.close`."""
        self._scan_edge = {}
        self._cache.drop(self.ref.name)


_Read = list[tuple[NDArray[np.int64], Decoded]]


@dataclass(eq=False)
class _Step:
    """A part of the blocks or filters of a lookup.

    Attributes:
        begin, end: positions [begin, end) in the lookup's request.
        numbers: int64, numbers of blocks or of filter groups.
        size: bytes of memory that the part takes.
        cached: blocks or filters that were in the cache.
        requests: requests in flight for the others, each with the numbers or the number that it is for.
    """

    begin: int
    end: int
    numbers: NDArray[np.int64]
    size: int
    cached: dict[int, Rows] = field(default_factory=dict)
    requests: list[tuple[Any, Future[Any]]] = field(default_factory=list)


def _begun(parts: Iterator[T | None]) -> Iterator[T]:
    """Return an iterator of parts whose first requests are sent: the None before the first part is taken."""
    next(parts)
    return cast(Iterator[T], parts)


def _exclude(numbers: NDArray[np.int64], cached: dict[int, Rows]) -> NDArray[np.int64]:
    return numbers[[number not in cached for number in numbers.tolist()]] if cached else numbers


def _copied(rows: Rows) -> Rows:
    return Rows(rows.words.copy(), rows.heap.copy())

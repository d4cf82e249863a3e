"""An immutable hash-ordered run, and the search for keys in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import RUN_BLOCK, BlockSource, BlockTable, MemorySource, kernel_layout
from millpond.files.refs import RunRef, range_of
from millpond.kernels.hot_table.state import ACCESS_TIME_SHIFT
from millpond.kernels.pointers import data_of
from millpond.kernels.runs.bloom import admit
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.kernels.runs.search import (
    DELETED,
    KEY_PLACES,
    PrefetchKeys,
    RunBlocks,
    likely_places,
    locate,
    probe,
    remaining,
    walk,
)
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, META, NULLS, HashRange, RowLayout, Rows, Words
from millpond.stores.runs.merge import View, merge

_USELESS_FILTER_SHARE = 0.9
"""Share of keys that pass a filter from which the filter is skipped for the next `_FILTER_SKIPS` searches."""
_FILTER_SKIPS = 7
_ROWS_PER_KEY = 64
"""Rows per searched key from which probing is faster than reading all rows (measured on rows of 48 bytes)."""
_NO_STAMP = 1 << 48  # later than every stamp: the run has no rows
_BLOCKS_PER_STEP = 64
"""Blocks probed at a time while the next ones are read from disk."""
_MAX_CONCURRENT_RUNS = 4
"""Remote runs that are searched concurrently."""

Search = Generator[None, None, NDArray[np.int32]]
"""A search that pauses after each request; its result is the keys to search in older runs."""


@dataclass(eq=False)
class Query:
    """Keys looked up together, in hash order, and their rows found so far.

    Attributes:
        keys: the key table; keys_at: the address of its words, the words of a row, and the address of its heap.
        probes: the hashes, and the addresses of rows found.
        pins: objects that keep the addressed memory alive.
        places: places of the key columns, if they differ from the layout's.
    """

    keys: Rows
    keys_at: tuple[int, int, int]
    probes: PrefetchKeys
    pins: list[Any] = field(default_factory=list)
    places: NDArray[Any] | None = None

    @classmethod
    def of(cls, keys: Rows, pending: NDArray[np.int64]) -> Query:
        """Create a query for the pending rows of a key table."""
        keys = keys.contiguous()
        hashes, order = order_by_hash(keys.words[pending, HASH])
        count = len(hashes)
        keys_at = (data_of(keys.words), keys.words.strides[0] // 8, data_of(keys.heap))
        return cls(
            keys, keys_at, PrefetchKeys(hashes, pending[order], np.zeros(count, np.uint64), np.zeros(count, np.uint64))
        )

    def without_results(self) -> Query:
        """Copy the query, without any rows found."""
        probes, nothing = self.probes, np.zeros((2, len(self.probes.hashes)), np.uint64)
        return Query(self.keys, self.keys_at, PrefetchKeys(probes.hashes, probes.order, *nothing), places=self.places)

    @classmethod
    def by_hash(cls, hashes: Words) -> Query:
        """Create a query for one row of each hash (ascending, each once), whatever its key."""
        words = np.zeros((len(hashes), NULLS + 1), np.uint64)
        words[:, HASH] = hashes
        query = cls.of(Rows(words, np.empty(0, np.uint8)), np.arange(len(hashes)))
        query.places = np.zeros(1, KEY_PLACES)
        return query


class Run:
    """One immutable hash-ordered run, in memory or in a file.

    Args:
        source: source of its blocks.
        ref: its file, if it has one.
        range_: the hash range that it is opened for; the run may hold other rows, which no look-up asks for.
        axis: index of the word by which rows belong to a partition (see `stores.hash_filter`).

    Attributes:
        view: the run as input of merges. range: the hash range of rows that count.
    """

    def __init__(
        self,
        source: BlockSource,
        ref: RunRef | None = None,
        range_: HashRange = HashRange(),  # noqa: B008
        axis: int = HASH,
    ) -> None:
        self.source = source
        self.layout = source.layout
        self.ref = ref
        self.view = View(source, range_of(ref.visible if ref is not None else None), axis)
        self.range = range_.meet(self.view.visible) if axis == HASH else range_
        self._filter_skips = 0
        self._due_stamp: int | None = None

    @property
    def due_stamp(self) -> int:
        """Lower bound of the stamps of expiring rows that were not read into memory yet; may exceed 48 bits."""
        if self._due_stamp is None:
            self._due_stamp = self.ref.oldest if self.ref is not None else _oldest_stamp(self.view)
        return self._due_stamp

    @due_stamp.setter
    def due_stamp(self, stamp: int) -> None:
        self._due_stamp = stamp

    def inherit_due_stamp(self, inputs: Sequence[Run]) -> None:
        """Inherit `due_stamp` from the runs whose rows, or newest rows, this run holds."""
        if any(run._due_stamp is not None for run in inputs):
            self._due_stamp = max(self.due_stamp, min(run.due_stamp for run in inputs))

    @property
    def rows(self) -> int:
        """Number of rows, tombstones included; of a restricted run, those of the blocks in its range."""
        index = self.source.index
        begin, end = index.span(self.range.lo, self.range.hi - 1)
        return int(index.starts[end] - index.starts[begin])

    @property
    def bytes(self) -> int:
        """Bytes of the file; of a file that partitions share, those of the rows in its range, roughly.

        If rows belong to partitions by their group's hash, which has no order in the file, the whole file counts.
        """
        assert self.ref is not None
        if self.ref.visible is None or self.view.axis != HASH:
            return self.ref.bytes
        return self.ref.bytes * self.rows // max(1, self.ref.rows)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory with its long values, roughly."""
        index = self.source.index
        # Files may be compressed, but blocks are cut by their uncompressed bytes; a larger row has a block of its own.
        held = self.memory if self.ref is None else max(self.ref.bytes, index.count * RUN_BLOCK)
        return max(8 * self.layout.width, held // max(1, index.rows))

    @property
    def remote(self) -> bool:
        """Whether its blocks are read by remote requests."""
        return not self.source.resident and not self.source.may_read_disk

    @property
    def memory(self) -> int:
        """Bytes of memory that the run holds."""
        return self.source.memory

    def close(self) -> None:
        """Release caches and files."""
        self.source.close()

    def search(self, query: Query, select: NDArray[np.int32]) -> NDArray[np.int32]:
        """Look up the selected keys of a query, record the rows found, and return the keys to search in older runs."""
        return _run_to_end(self.search_steps(query, select))

    def search_steps(self, query: Query, select: NDArray[np.int32]) -> Search:
        """Search as `search`, pausing after each request, so that several searches can wait concurrently."""
        if self.view.visible.whole:
            return (yield from self._search(query, select))
        values = query.keys.words[query.probes.order[select], self.view.axis]
        count = self.view.visible.covers(values)
        left = yield from self._search(query, select[count])
        # Keys outside `visible`: the run may have rows of other partitions for them, so older runs are searched.
        return np.sort(np.concatenate([select[~count], left]))

    def _search(self, query: Query, select: NDArray[np.int32]) -> Search:
        index = self.source.index
        if not index.count or not len(select):
            return select
        wanted = query.probes.hashes[select]
        begin = int(np.searchsorted(wanted, index.fence[0], "left"))
        end = int(np.searchsorted(wanted, np.uint64(index.highest), "right"))
        inside = select[begin:end]
        count = len(inside)
        if not count:
            return select
        blocks = np.empty(count, np.int32)
        locate(query.probes.hashes, inside, count, index.fence, blocks)
        admitted = yield from self._admitted(query.probes.hashes, inside, blocks)
        done = np.zeros(count, np.uint8)
        table = self.source.blocks(blocks[admitted]) if self.source.resident else None
        if table is not None and table.complete:
            self._probe(query, inside, blocks, admitted, done, table)
        else:
            yield from self._probe_by_blocks(query, inside, blocks, admitted, done)
        left = np.empty(count, np.int32)
        kept = remaining(inside, count, done, left)
        return np.concatenate([select[:begin], left[:kept], select[end:]])

    def _admitted(self, hashes: Words, select: NDArray[np.int32], blocks: NDArray[np.int32]) -> Search:
        """Return the positions in `select` of the hashes that the filters of their blocks do not exclude."""
        admitted = np.arange(len(select), dtype=np.int32)
        if self._filter_skips > 0:  # not exact: two threads may both decrement it
            self._filter_skips -= 1
            return admitted
        parts = self.source.filters(blocks)
        yield
        # The requests are under way: the searches of other runs send theirs before this one waits.
        index, count = self.source.index, 0
        for part in parts:
            own = slice(part.begin, part.end)
            size, kept = part.end - part.begin, admitted[count:]
            new = admit(hashes, select[own], size, blocks[own], index.fence, index.lines, part.addresses, kept)
            kept[:new] += part.begin  # `admit` counts from the part's first hash
            count += new
            del part
        if count > _USELESS_FILTER_SHARE * len(select):
            self._filter_skips = _FILTER_SKIPS
        return admitted[:count]

    def _probe_by_blocks(
        self,
        query: Query,
        select: NDArray[np.int32],
        blocks: NDArray[np.int32],
        admitted: NDArray[np.int32],
        done: NDArray[np.uint8],
    ) -> Iterator[None]:
        """Probe block by block, so that few blocks are in memory at a time; rows found are copied."""
        if not len(admitted):
            return
        first = blocks[admitted].astype(np.int64)
        fence = self.source.index.fence
        hashes = query.probes.hashes[select[admitted]]
        last = first.copy()
        # Rows of one hash may continue in the next blocks.
        continued = np.flatnonzero(fence[np.minimum(first + 1, len(fence) - 1)] == hashes)
        last[continued] = np.searchsorted(fence, hashes[continued], "right") - 1
        last = np.maximum(last, first)
        # Group keys by their first block, with the blocks of each group. Its last block may be the next group's first.
        begins = np.flatnonzero(np.diff(first, prepend=-1))
        counts = np.maximum.reduceat(last, begins) - first[begins] + 1
        group_at = np.cumsum(counts) - counts
        group_of_key = np.repeat(group_at, np.diff(np.append(begins, len(first))))
        block_in_group = np.arange(int(counts.sum())) - np.repeat(group_at, counts)
        shape = kernel_layout(self.layout)
        parts = self.source.parts(np.repeat(first[begins], counts) + block_in_group, block_in_group > 0)
        yield
        for part in parts:
            begin, end = np.searchsorted(group_of_key, (part.begin, part.end)).tolist()
            self._probe(query, select, blocks, admitted[begin:end], done, part.table)
            positions = select[admitted[begin:end]]
            found_at, found_heap = query.probes.found_at, query.probes.found_heap
            positions = positions[found_at[positions] > DELETED]
            rows = gather_rows(found_at[positions], found_heap[positions], shape.width, shape.blobs)
            found_at[positions], found_heap[positions] = addresses(*rows)
            # The copies replace the blocks that `_probe` has pinned, which frees their memory.
            query.pins[-1] = rows
            del part
            yield

    def _probe(
        self,
        query: Query,
        select: NDArray[np.int32],
        blocks: NDArray[np.int32],
        admitted: NDArray[np.int32],
        done: NDArray[np.uint8],
        table: BlockTable,
    ) -> None:
        index = self.source.index
        query.pins.append(table.pins)
        count = len(admitted)
        if not count:
            return
        run = RunBlocks(index.fence, index.starts, table.words_at, table.heap_at)
        rows_between = index.starts[blocks[admitted[-1]] + 1] - index.starts[blocks[admitted[0]]]
        dense = count * _ROWS_PER_KEY > rows_between
        if self.source.may_read_disk and not dense:
            places_at = np.empty(count, np.uint64)
            width = self.layout.width
            likely_places(query.probes.hashes, select, blocks, admitted, run, index.highest, width, places_at)
            self.source.prefetch_rows(places_at)
        places = kernel_layout(self.layout).places
        if query.places is not None:
            places = query.places.copy()
            places["width"] = self.layout.width
        for part in self._in_steps(blocks, admitted) if self.source.may_read_disk and dense else (admitted,):
            look = walk if dense else probe
            look(query.probes, select, blocks, part, run, index.highest, *query.keys_at, places, done)

    def _in_steps(self, blocks: NDArray[np.int32], admitted: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        """Yield the keys of some blocks at a time, while the next blocks are being read."""
        first = blocks[admitted]
        cuts = np.flatnonzero(np.diff(first // _BLOCKS_PER_STEP)) + 1
        bounds = [0, *cuts.tolist(), len(admitted)]
        ranges = [(int(first[begin]), int(first[end - 1]) + 1) for begin, end in pairwise(bounds)]
        self.source.prefetch_blocks(*ranges[0])
        for number, (begin, end) in enumerate(pairwise(bounds)):
            if number + 1 < len(ranges):
                self.source.prefetch_blocks(*ranges[number + 1])
            yield admitted[begin:end]


def discard_result(result: Future[Any]) -> None:
    """Cancel background work, or close the runs that it writes once they are written: they are not used."""
    if not result.cancel():
        result.add_done_callback(_close_runs_of)


def _close_runs_of(done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is None:
        close_runs(done.result())


def close_runs(result: object) -> None:
    """Close a merge's result that is not used: one run or several. Other results, as append files, are not closed."""
    for run in result if isinstance(result, list) else [result]:
        if isinstance(run, Run):
            run.close()


def search_through(runs: Sequence[Run], query: Query, select: NDArray[np.int32]) -> NDArray[np.int32]:
    """Look up the selected keys of a query in runs, newest first, and return those that no run holds.

    Remote runs are searched concurrently, and the newest that has a key counts. Some keys are then read in vain, but
    the look-up does not wait for one run after the other.
    """
    for number, run in enumerate(runs):
        if not len(select):
            break
        remaining_runs = runs[number:]
        if run.remote and len(remaining_runs) > 1:
            queries = [query.without_results() for _ in remaining_runs]
            _search_concurrently(
                [older.search_steps(other, select) for older, other in zip(remaining_runs, queries, strict=True)]
            )
            for other in queries:
                # Runs come newest first: the first that has a key decides, even if it has a tombstone.
                new = np.flatnonzero((query.probes.found_at == 0) & (other.probes.found_at != 0))
                query.probes.found_at[new] = other.probes.found_at[new]
                query.probes.found_heap[new] = other.probes.found_heap[new]
                query.pins += other.pins
            left: NDArray[np.int32] = select[query.probes.found_at[select] == 0]
            return left
        select = run.search(query, select)
    return select


def _run_to_end(search: Search) -> NDArray[np.int32]:
    """Run a search to its end, and return its result."""
    while True:
        try:
            next(search)
        except StopIteration as end:
            left: NDArray[np.int32] = end.value
            return left


def _search_concurrently(searches: Sequence[Search]) -> None:
    """Run searches to their ends on this thread, several of them waiting for requests at a time."""
    waiting, active = deque(searches), deque[Search]()
    try:
        while waiting or active:
            while waiting and len(active) < _MAX_CONCURRENT_RUNS:
                active.append(waiting.popleft())
            search = active.popleft()
            with suppress(StopIteration):
                next(search)
                active.append(search)
    finally:
        for search in active:
            # If one search fails, the others release the memory that they have reserved for their blocks.
            search.close()


def _oldest_stamp(run: View) -> int:
    """Return the lowest stamp of a run's rows, tombstones excluded."""
    pieces = merge([run], run.source.layout, drop_tombstones=True)
    return min((int(rows.words[:, META].min() >> np.uint64(ACCESS_TIME_SHIFT)) for rows in pieces), default=_NO_STAMP)


def memory_run(rows: Rows, layout: RowLayout, *, filtered: bool = True) -> Run:
    """Create a run in memory from rows in hash order, each key once (see `sort_rows`)."""
    return Run(MemorySource(rows, layout, filtered=filtered))

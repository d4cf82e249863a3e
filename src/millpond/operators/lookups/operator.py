"""A lookup join on one partition: no state, but a cache in front of the table.

A piece of the batch is looked up in the cache. Missing keys are requested, many keys at a time and several requests
side by side. The piece waits, and the next piece is looked up meanwhile. A key that is on its way is not requested
again. A piece holds the results of its own keys, so that the cache may evict anything at any time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HashRange, Ints
from millpond.lookup.fetch import FAILED
from millpond.lookup.rows import (
    KeyedValues,
    all_values,
    distinct_keys,
    join_in_parts,
    raise_if_failed,
    values_at,
)
from millpond.metrics import LOOKUP_METRICS
from millpond.operators.columns.encode import hashes_of
from millpond.operators.kind import Opening
from millpond.operators.lookups.cache import Cache
from millpond.operators.lookups.fetchers import acquire, release
from millpond.operators.lookups.requests import Request, Requests
from millpond.operators.protocol import MAX_OUTPUT_ROWS, MakeTable, Times
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.stores.memory.spool import Spool

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_QUEUED_PER_CONNECTION = 4
"""Maximum open requests per connection; beyond it, prefetch hints are dropped."""


_RequestedKeys = tuple[NDArray[np.int64], Request, NDArray[np.int64]]
"""Positions of keys, the request that asks for them, and their positions in it."""


class _KeyLookup(NamedTuple):
    """The state of the keys of some rows.

    Attributes:
        hashes: the hashes of the distinct keys.
        keys: the columns of the distinct keys.
        numbers: for each row the position of its key, -1 for a null key.
        cached: positions of keys that the cache has, and their results.
        requested: keys that are in open requests.
        missing: positions of keys that are neither.
    """

    hashes: Ints
    keys: list[pa.Array]
    numbers: NDArray[np.int64]
    cached: list[KeyedValues]
    requested: list[_RequestedKeys]
    missing: NDArray[np.int64]


class _Piece(NamedTuple):
    """Rows that wait for their lookups.

    Attributes:
        columns: the columns of the rows.
        numbers: for each row the position of its key, -1 for a null key.
        keys: the distinct keys.
        cached: positions of keys that the cache had, and their results.
        requested: keys that are in requests.
        bytes: the size of the rows.
    """

    columns: list[pa.Array]
    numbers: NDArray[np.int64]
    keys: pa.RecordBatch
    cached: list[KeyedValues]
    requested: list[_RequestedKeys]
    bytes: int


def open_lookup(spec: EnrichSpec, opening: Opening) -> LookupOperator:
    """Open a lookup join."""
    return LookupOperator(spec, opening.make_table, opening.memory // 16, opening.is_closed)


class LookupOperator:
    """An `EnrichSpec` on one partition.

    Args:
        spec: the lookup join.
        make_table: opens the cache.
        memory: bytes of waiting rows, and bytes of output rows, that are kept in memory.
        is_closed: see `Opening`.

    Raises:
        UsageError: the table cannot be loaded here.
    """

    def __init__(self, spec: EnrichSpec, make_table: MakeTable, memory: int, is_closed: Callable[[], bool]) -> None:
        self.spec = spec
        self._memory = memory
        self._is_closed = is_closed
        self._cache = Cache(spec, make_table)
        try:
            self._fetcher = acquire(spec)
        except BaseException:
            self._cache.close()
            raise
        self._requests = Requests()
        self._waiting: deque[_Piece] = deque()
        self._output = Spool(None, memory)
        self._version = 0
        # Counts since the last batch ended, because hints of the next batch may come before it begins.
        self._counts = Counter[str]()
        self._extra_metrics: dict[str, float] = {}
        self.late_rows = 0

    @property
    def tables(self) -> dict[str, Table]:
        """Empty: there is no state."""
        return {}

    @property
    def extra_metrics(self) -> dict[str, float]:
        """The batch's cache accesses and requests."""
        return self._extra_metrics

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._waiting.clear()
        self._output.clear()
        self._cache.begin()

    def passes(self, rows: int) -> int:
        """Return 1: rows are processed in any order."""
        return 1

    def restrict(self, range_: HashRange) -> None:
        """Do nothing: rows are processed in any order."""

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Do nothing: Spark keeps no state of a lookup join either (see `AdoptsSparkState`)."""

    def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """Request keys ahead of their rows (see `KeyPrefetchable`), as long as connections will soon be free."""
        # Without a cache nothing would hold the answers until the rows come.
        if not self._cache.is_enabled:
            return
        lookup = self._find(hashes_of(keys), keys.columns[1:], needed)
        self._request(lookup, needed, hint=True)

    def process(self, batch: pa.RecordBatch) -> None:
        """Look up the keys of rows: the column `__hash`, then those of the spec."""
        for start in range(0, batch.num_rows, MAX_OUTPUT_ROWS):
            self._look_up(batch.slice(start, MAX_OUTPUT_ROWS))
            self._emit_ready()
            # Waiting rows are bounded: beyond the limit, wait for the answers of the oldest piece.
            while sum(piece.bytes for piece in self._waiting) > self._memory:
                self._emit(self._waiting.popleft())

    def _look_up(self, batch: pa.RecordBatch) -> None:
        columns = batch.columns[1:]
        lookup = self._find(hashes_of(batch), [columns[position] for position in self.spec.keys], self._version)
        hits = sum(len(positions) for positions, _ in lookup.cached)
        self._counts["cache_hits"] += hits
        self._counts["cache_misses"] += len(lookup.hashes) - hits
        requested = lookup.requested + self._request(lookup, self._version)
        keys = pa.RecordBatch.from_arrays(lookup.keys, names=list(self.spec.named))
        self._waiting.append(_Piece(columns, lookup.numbers, keys, lookup.cached, requested, batch.nbytes))

    def _find(self, hashes: Ints, columns: list[pa.Array], stamp: int) -> _KeyLookup:
        """Look for the keys of rows in the cache and in open requests."""
        self._cache_answers()
        firsts, numbers = distinct_keys(columns)
        hashes, keys = hashes[firsts], _take_columns(columns, firsts)
        cached = self._cache.find(self._cache.encode_keys(hashes, keys), stamp, _milliseconds(time.monotonic()))
        absent = np.ones(len(hashes), np.bool_)
        for positions, _ in cached:
            absent[positions] = False
        requested: list[_RequestedKeys] = []
        missing = np.flatnonzero(absent)
        if len(missing) and len(self._requests):
            for which, request, places in self._requests.find(hashes[missing], _take_columns(keys, missing)):
                requested.append((missing[which], request, places))
                absent[missing[which]] = False
        return _KeyLookup(hashes, keys, numbers, cached, requested, np.flatnonzero(absent))

    def _request(self, lookup: _KeyLookup, stamp: int, *, hint: bool = False) -> list[_RequestedKeys]:
        """Request missing keys; for hints, no more requests than the connections serve soon."""
        sent: list[_RequestedKeys] = []
        hashes = lookup.hashes
        for start in range(0, len(lookup.missing), self.spec.request):
            if hint and len(self._requests) >= _QUEUED_PER_CONNECTION * self.spec.concurrency:
                break
            chunk = lookup.missing[start : start + self.spec.request]
            # `Request.positions_of` bisects the hashes.
            chunk = chunk[np.argsort(hashes[chunk], kind="stable")]
            columns = _take_columns(lookup.keys, chunk)
            request_keys = pa.RecordBatch.from_arrays(columns, names=list(self.spec.named))
            rows = self._cache.encode_keys(hashes[chunk], columns)
            request = Request(hashes[chunk], request_keys, rows, self._fetcher.fetch(request_keys), stamp)
            self._requests.add(request)
            self._counts["fetches"] += 1
            self._counts["fetched_keys"] += len(chunk)
            self._counts["announced_keys"] += len(chunk) if hint else 0
            sent.append((chunk, request, np.arange(len(chunk))))
        return sent

    def _cache_answers(self) -> None:
        """Add the answers that have come to the cache."""
        for request in self._requests.answered():
            answer = request.answer.result()
            self._counts["fetch_ms"] = max(self._counts["fetch_ms"], round(answer.seconds * 1000))
            # A value counts as old as its request, so that the time to live is a bound of its age.
            self._cache.add(request.rows, all_values(answer), request.stamp, _milliseconds(answer.requested_at))

    def _emit_ready(self) -> None:
        """Emit the pieces at the head of the queue whose requests are answered, in order."""
        while self._waiting and all(request.answer.done() for _, request, _ in self._waiting[0].requested):
            self._emit(self._waiting.popleft())

    def _emit(self, piece: _Piece) -> None:
        """Wait for the requests of a piece, and emit it."""
        parts = piece.cached + [
            (which, values_at(self._fetcher.wait(request.answer, self._is_closed), places))
            for which, request, places in piece.requested
        ]
        self._counts["failed_keys"] += sum(int(np.count_nonzero(values.states == FAILED)) for _, values in parts)
        raise_if_failed(self.spec, parts, piece.keys)
        for joined in join_in_parts(self.spec, piece.columns, piece.numbers, parts, piece.keys.num_rows):
            self._output.add(joined)

    def finish(self) -> dict[str, TableDelta]:
        """Wait for all requests. There is nothing to seal."""
        while self._waiting:
            self._emit(self._waiting.popleft())
        self._cache_answers()
        self._extra_metrics = {
            name: float(self._counts[name]) for name in ("cache_hits", "cache_misses", *LOOKUP_METRICS)
        }
        self._extra_metrics["hot_bytes"] = float(self._cache.memory)
        self._counts.clear()
        return {}

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the enriched rows."""
        return self._output.read()

    def close(self) -> None:
        """Release all memory."""
        self._requests.cancel()
        self._waiting.clear()
        self._output.clear()
        self._cache.close()
        release(self.spec, self._fetcher)


def _take_columns(columns: list[pa.Array], which: NDArray[np.int64]) -> list[pa.Array]:
    positions = pa.array(which)
    return [column.take(positions) for column in columns]


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)

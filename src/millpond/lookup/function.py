"""The lookup join as a function over record batches, for queries or operators that Spark runs itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import MAX_BATCH_BYTES
from millpond.lookup.fetch import FAILED, Fetcher, looked_up_schema
from millpond.lookup.rows import (
    KeyedValues,
    Values,
    all_values,
    bytes_of,
    concat_values,
    distinct_keys,
    join_in_parts,
    no_values,
    raise_if_failed,
)
from millpond.spec.kinds.enrich import EnrichSpec

_MAX_CACHED_KEYS = 10_000
"""Limit of keys that a worker caches: each batch is compared with all of them."""

_MAX_WORKERS = 8

PREFIX = "enrich by "
"""Prefix of the names of these functions in Spark's plans."""

_workers: dict[EnrichSpec, _Worker] = {}
_lock = threading.Lock()


class Lookup:
    """A function for `DataFrame.mapInArrow` that joins rows with an external table.

    Args:
        spec: the lookup join.
    """

    def __init__(self, spec: EnrichSpec) -> None:
        self.spec = spec
        self.__name__ = f"{PREFIX}{', '.join(field.name for field in spec.key_fields)} from {spec.name}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Enrich the rows of each batch.

        Raises:
            MillpondError: the lookup failed.
        """
        for batch in batches:
            yield from _worker_of(self.spec).enrich(batch)


def _worker_of(spec: EnrichSpec) -> _Worker:
    with _lock:
        worker = _workers.pop(spec, None)
        if worker is None:
            worker = _Worker(spec)
            if len(_workers) >= _MAX_WORKERS:
                _workers.pop(next(iter(_workers))).fetcher.close()
        # At the end, so that the first worker is the one that was not used for longest.
        _workers[spec] = worker
        return worker


class _CachedKeys(NamedTuple):
    """Cached keys with their values, and the times by the monotonic clock at which they expire."""

    keys: pa.RecordBatch
    values: Values
    until: NDArray[np.float64]


class _Worker:
    """State of a lookup join in a Spark Python worker: connections, and a cache of the keys used last."""

    def __init__(self, spec: EnrichSpec) -> None:
        self._spec = spec
        self.fetcher = Fetcher(spec)
        self._max_keys = min(_MAX_CACHED_KEYS, spec.most)
        self._cache: _CachedKeys | None = None

    def enrich(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Join a batch's rows with the values of their keys."""
        spec = self._spec
        unique = distinct_keys([batch.column(index) for index in spec.keys])
        firsts = pa.array(unique.firsts)
        # Cast before the comparison with cached keys, which may come from a query with another time zone.
        columns = self.fetcher.cast_keys(batch.column(index).take(firsts) for index in spec.keys)
        keys = pa.RecordBatch.from_arrays(columns, names=list(spec.named))
        parts = self._look_up(keys)
        raise_if_failed(spec, parts, keys)
        yield from join_in_parts(spec, batch.columns, unique.numbers, parts, keys.num_rows)

    def _look_up(self, keys: pa.RecordBatch) -> list[KeyedValues]:
        # Before the requests, so that no value is used for longer than its time to live.
        now = time.monotonic()
        places = self._cache_positions(keys, now)
        missing = np.flatnonzero(places < 0)
        requests = [missing[start : start + self._spec.request] for start in range(0, len(missing), self._spec.request)]
        answers = [self.fetcher.fetch(keys.take(pa.array(chunk))) for chunk in requests]
        parts = [
            (chunk, all_values(self.fetcher.wait(answer))) for chunk, answer in zip(requests, answers, strict=True)
        ]
        requested_bytes = bytes_of(parts)
        cached = np.flatnonzero(places >= 0)
        if len(cached):
            assert self._cache is not None
            parts.append((cached, self._cache.values.take(places[cached])))
        if not parts:
            return [no_values(looked_up_schema(self._spec))]
        if self._has_room(requested_bytes):
            self._update_cache(keys, parts, places, now)
        else:  # Arrow's 32-bit offsets: too large to concatenate
            self._cache = None
        return parts

    def _cache_positions(self, keys: pa.RecordBatch, now: float) -> NDArray[np.int64]:
        """Return the position of each key in the cache; -1 if it is not cached or has expired."""
        if self._cache is None:
            return np.full(keys.num_rows, -1)
        both = pa.concat_batches([self._cache.keys, keys])
        numbers = distinct_keys(both.columns).numbers
        count = self._cache.keys.num_rows
        positions = np.full(len(numbers), -1)
        valid = np.flatnonzero(self._cache.until > now)
        positions[numbers[valid]] = valid
        return positions[numbers[count:]]

    def _has_room(self, requested_bytes: int) -> bool:
        """Return whether requested values fit into the cache. A batch of hits adds nothing."""
        cached_bytes = 0 if self._cache is None else self._cache.values.columns.nbytes
        return not requested_bytes or requested_bytes + cached_bytes <= MAX_BATCH_BYTES

    def _update_cache(
        self, keys: pa.RecordBatch, parts: list[KeyedValues], places: NDArray[np.int64], now: float
    ) -> None:
        """Update the cache with a batch's keys, and evict the oldest beyond the limit."""
        ttl = self._spec.ttl_ms
        if ttl == 0 or not self._max_keys:
            return
        cached = self._cache
        until = np.full(keys.num_rows, np.inf if ttl < 0 else now + ttl / 1000)
        values = concat_values(parts, keys.num_rows)
        if cached is not None:
            hits = places >= 0
            # A hit does not prolong a key's life: the value is as old as its request.
            until[hits] = cached.until[places[hits]]
            # In the order of their last use, so that the cut below evicts the oldest.
            older = np.setdiff1d(np.arange(cached.keys.num_rows), places)
            keys = pa.concat_batches([cached.keys.take(pa.array(older)), keys])
            remaining = cached.values.take(older)
            parts = [(np.arange(len(older)), remaining), (np.arange(len(values.states)) + len(older), values)]
            values = concat_values(parts, keys.num_rows)
            until = np.concatenate([cached.until[older], until])
        kept = np.flatnonzero((values.states != FAILED) & (until > now))[-self._max_keys :]
        self._cache = _CachedKeys(keys.take(pa.array(kept)), values.take(kept), until[kept])

"""The lookup join as a function over a stream's record batches, for Spark alone: what runs where Millpond does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.lookup.fetch import FAILED, Fetcher, wanted
from millpond.lookup.rows import Values, check, distinct, enriched, put_together, whole
from millpond.spec.kinds.enrich import EnrichSpec

_MOST = 10_000
"""Keys that a worker keeps, at most: each batch is compared with all of them."""

_MOST_TABLES = 8

PREFIX = "enrich by "
"""What the names of these functions begin with, in Spark's plans."""

_kept: dict[EnrichSpec, _Worker] = {}
_lock = threading.Lock()


class Lookup:
    """A function for `DataFrame.mapInArrow`: rows with what a table has of their keys.

    Args:
        spec: what is looked up.
    """

    def __init__(self, spec: EnrichSpec) -> None:
        self.spec = spec
        self.__name__ = f"{PREFIX}{', '.join(field.name for field in spec.key_fields)} from {spec.name}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Enrich the rows of each batch.

        Raises:
            MillpondError: the table cannot be asked.
        """
        for batch in batches:
            yield _worker(self.spec).enrich(batch)


def _worker(spec: EnrichSpec) -> _Worker:
    with _lock:
        worker = _kept.pop(spec, None)
        if worker is None:
            worker = _Worker(spec)
            if len(_kept) >= _MOST_TABLES:
                _kept.pop(next(iter(_kept))).fetcher.close()
        _kept[spec] = worker
        return worker


class _Known(NamedTuple):
    """Keys that were looked up: themselves, what was found, and until when that is good."""

    keys: pa.RecordBatch
    values: Values
    until: NDArray[np.float64]


class _Worker:
    """What one of Spark's Python workers keeps of a lookup join: connections, and the keys that it asked for last."""

    def __init__(self, spec: EnrichSpec) -> None:
        self._spec = spec
        self.fetcher = Fetcher(spec)
        self._most = min(_MOST, spec.most)
        self._known: _Known | None = None

    def enrich(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with what was found of their keys."""
        spec = self._spec
        found = distinct([batch.column(at) for at in spec.keys])
        firsts = pa.array(found.firsts)
        asked = [batch.column(at).take(firsts) for at in spec.keys]
        keys = pa.RecordBatch.from_arrays(asked, names=list(spec.named))
        values = self._look_up(keys)
        check(spec, values, keys)
        return enriched(spec, batch.columns, found.numbers, values)

    def _look_up(self, keys: pa.RecordBatch) -> Values:
        now = time.monotonic()
        places = self._places(keys, now)
        missing = np.flatnonzero(places < 0)
        requests = [missing[start : start + self._spec.request] for start in range(0, len(missing), self._spec.request)]
        sent = [self.fetcher.fetch(keys.take(pa.array(some))) for some in requests]
        parts = []
        known = np.flatnonzero(places >= 0)
        if len(known):
            assert self._known is not None
            parts.append((known, _some(self._known.values, places[known])))
        for some, answer in zip(requests, sent, strict=True):
            parts.append((some, whole(self.fetcher.wait(answer))))
        if not parts:
            columns = wanted(self._spec)
            return Values(pa.RecordBatch.from_pylist([], columns), np.empty(0, np.uint8), {})
        values = put_together(parts, keys.num_rows)
        self._keep(keys, values, places, now)
        return values

    def _places(self, keys: pa.RecordBatch, now: float) -> NDArray[np.int64]:
        """Where each key stands among those that are known, -1 for none."""
        if self._known is None:
            return np.full(keys.num_rows, -1)
        both = pa.concat_batches([self._known.keys, keys])
        numbers = distinct(both.columns).numbers
        count = self._known.keys.num_rows
        at = np.full(len(numbers), -1)
        good = np.flatnonzero(self._known.until > now)
        at[numbers[good]] = good
        return at[numbers[count:]]

    def _keep(self, keys: pa.RecordBatch, values: Values, places: NDArray[np.int64], now: float) -> None:
        """Keep what is known of the last keys."""
        ttl = self._spec.ttl_ms
        if ttl == 0 or not self._most:
            return
        until = np.full(keys.num_rows, np.inf if ttl < 0 else now + ttl / 1000)
        known = self._known
        if known is not None:
            hits = places >= 0
            until[hits] = known.until[places[hits]]
            others = np.setdiff1d(np.arange(known.keys.num_rows), places)
            keys = pa.concat_batches([known.keys.take(pa.array(others)), keys])
            left = _some(known.values, others)
            parts = [(np.arange(len(others)), left), (np.arange(len(values.states)) + len(others), values)]
            values = put_together(parts, keys.num_rows)
            until = np.concatenate([known.until[others], until])
        good = np.flatnonzero((values.states != FAILED) & (until > now))[-self._most :]
        self._known = _Known(keys.take(pa.array(good)), _some(values, good), until[good])


def _some(values: Values, places: NDArray[np.int64]) -> Values:
    """Values of some keys, none of which failed."""
    return Values(values.columns.take(pa.array(places)), values.states[places], {})

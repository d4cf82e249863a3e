"""A lookup join on one partition: no state, but a cache in front of the table.

A piece of the batch is looked up in the cache. What is not there is asked for, many keys at a time and several requests
at a time; the piece waits, and the next one is looked at meanwhile. A key that is on its way is not asked for again. A
piece holds what was found of its keys itself, so that the cache may forget anything at any time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HashRange, Ints
from millpond.lookup.fetch import FAILED
from millpond.lookup.rows import Values, check, distinct, enriched, part_of, put_together, whole
from millpond.metrics import LOOKUPS
from millpond.operators.columns.encode import hashes_of
from millpond.operators.kind import Opening
from millpond.operators.lookups.cache import Cache
from millpond.operators.lookups.fetchers import give_back, take
from millpond.operators.lookups.requests import Request, Requests
from millpond.operators.protocol import PIECE, MakeTable, Times
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.stores.memory.spool import Spool

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_AHEAD = 4
"""Requests that may wait for a connection, for each that has one."""


_Asked = tuple[NDArray[np.int64], Request, NDArray[np.int64]]
"""Numbers of keys, the request that they are in, and where in it."""


class _Found(NamedTuple):
    """What there is of the keys of some rows.

    Attributes:
        hashes, keys: of the different keys. numbers: for each row that of its key, -1 for none.
        known: numbers of keys, and what was found of them. coming: what has been asked for. missing: what has not.
    """

    hashes: Ints
    keys: list[pa.Array]
    numbers: NDArray[np.int64]
    known: tuple[NDArray[np.int64], Values]
    coming: list[_Asked]
    missing: NDArray[np.int64]


class _Piece(NamedTuple):
    """Rows that wait for what is looked up.

    Attributes:
        columns: of the rows. numbers: of each row's key, -1 for none. keys: the different keys.
        known: numbers of keys, and what was found of them. asked: what was asked for. bytes: of the rows.
    """

    columns: list[pa.Array]
    numbers: NDArray[np.int64]
    keys: pa.RecordBatch
    known: tuple[NDArray[np.int64], Values]
    asked: list[_Asked]
    bytes: int


def open_lookup(spec: EnrichSpec, opening: Opening) -> LookupOperator:
    """Open a lookup join."""
    return LookupOperator(spec, opening.make_table, opening.memory // 16)


class LookupOperator:
    """An `EnrichSpec` on one partition.

    Args:
        spec: what it is. make_table: opens the cache.
        memory: bytes of rows that wait, and of rows that come out, which are kept in memory.

    Raises:
        UsageError: the table cannot be loaded here.
    """

    def __init__(self, spec: EnrichSpec, make_table: MakeTable, memory: int) -> None:
        self.spec = spec
        self._memory = memory
        self._cache = Cache(spec, make_table)
        try:
            self._fetcher = take(spec)
        except BaseException:
            self._cache.close()
            raise
        self._requests = Requests()
        self._waiting: deque[_Piece] = deque()
        self._shown = Spool(None, memory)
        self._version = 0
        self._counts = Counter[str]()  # since the last batch was over: keys may be asked for ahead of the next
        self._figures: dict[str, float] = {}
        self.late_rows = 0

    @property
    def tables(self) -> dict[str, Table]:
        """None: there is no state."""
        return {}

    @property
    def figures(self) -> dict[str, float]:
        """What was looked for and asked for."""
        return self._figures

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._waiting.clear()
        self._shown.close()
        self._shown = Spool(None, self._memory)
        self._cache.begin()

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch: one, in any order."""
        return 1

    def narrow(self, range_: HashRange) -> None:
        """Nothing: rows are taken in any order."""

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Nothing: Spark keeps no state of a lookup join either (see `Adopting`)."""

    def announce_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """Ask for keys ahead of their rows (see `KeysAnnounced`), as far as they are asked for in good time."""
        if not self._cache.keeps:
            return
        found = self._find(hashes_of(keys), keys.columns[1:], needed)
        self._ask(found, needed, announced=True)

    def process(self, batch: pa.RecordBatch) -> None:
        """Look up the keys of some rows: the column `__hash`, then those of the spec."""
        for start in range(0, batch.num_rows, PIECE):
            self._look_up(batch.slice(start, PIECE))
            self._show_ready()
            while sum(piece.bytes for piece in self._waiting) > self._memory:
                self._show(self._waiting.popleft())

    def _look_up(self, batch: pa.RecordBatch) -> None:
        columns = batch.columns[1:]
        found = self._find(hashes_of(batch), [columns[at] for at in self.spec.keys], self._version)
        self._counts["cache_hits"] += len(found.known[0])
        self._counts["cache_misses"] += len(found.hashes) - len(found.known[0])
        asked = found.coming + self._ask(found, self._version)
        keys = pa.RecordBatch.from_arrays(found.keys, names=list(self.spec.named))
        self._waiting.append(_Piece(columns, found.numbers, keys, found.known, asked, batch.nbytes))

    def _find(self, hashes: Ints, columns: list[pa.Array], stamp: int) -> _Found:
        """Look for the keys of some rows among what is known, and what is on its way."""
        self._take_answers()
        firsts, numbers = distinct(columns)
        hashes, keys = hashes[firsts], _taken(columns, firsts)
        known = self._cache.find(self._cache.keys(hashes, keys), stamp, _milliseconds(time.monotonic()))
        left = np.ones(len(hashes), np.bool_)
        left[known[0]] = False
        coming: list[_Asked] = []
        if len(known[0]) < len(hashes) and len(self._requests):
            missing = np.flatnonzero(left)
            for which, request, places in self._requests.find(hashes[missing], _taken(keys, missing)):
                coming.append((missing[which], request, places))
                left[missing[which]] = False
        return _Found(hashes, keys, numbers, known, coming, np.flatnonzero(left))

    def _ask(self, found: _Found, stamp: int, *, announced: bool = False) -> list[_Asked]:
        """Ask for keys that are missing; if they were announced, for no more than there are connections for soon."""
        sent: list[_Asked] = []
        hashes = found.hashes
        for start in range(0, len(found.missing), self.spec.request):
            if announced and len(self._requests) >= _AHEAD * self.spec.concurrency:
                break
            some = found.missing[start : start + self.spec.request]
            some = some[np.argsort(hashes[some], kind="stable")]
            columns = _taken(found.keys, some)
            asked = pa.RecordBatch.from_arrays(columns, names=list(self.spec.named))
            rows = self._cache.keys(hashes[some], columns)
            request = Request(hashes[some], asked, rows, self._fetcher.fetch(asked), stamp)
            self._requests.add(request)
            self._counts["fetches"] += 1
            self._counts["fetched_keys"] += len(some)
            self._counts["announced_keys"] += len(some) if announced else 0
            sent.append((some, request, np.arange(len(some))))
        return sent

    def _take_answers(self) -> None:
        """Keep what has come."""
        for request in self._requests.answered():
            answer = request.answer.result()
            self._counts["fetch_ms"] = max(self._counts["fetch_ms"], round(answer.seconds * 1000))
            self._cache.add(request.rows, whole(answer), request.stamp, _milliseconds(answer.asked))

    def _show_ready(self) -> None:
        """Let those go out that wait for nothing any more, in their order."""
        while self._waiting and all(request.answer.done() for _, request, _ in self._waiting[0].asked):
            self._show(self._waiting.popleft())

    def _show(self, piece: _Piece) -> None:
        """Wait for what a piece has asked for, and let it go out."""
        parts = [piece.known] + [(which, part_of(self._fetcher.wait(one.answer), at)) for which, one, at in piece.asked]
        values = put_together(parts, piece.keys.num_rows)
        self._counts["failed_keys"] += int(np.count_nonzero(values.states == FAILED))
        check(self.spec, values, piece.keys)
        self._shown.add(enriched(self.spec, piece.columns, piece.numbers, values))

    def finish(self) -> dict[str, TableDelta]:
        """Wait for all that was asked for. There is nothing to seal."""
        while self._waiting:
            self._show(self._waiting.popleft())
        self._take_answers()
        self._figures = {name: float(self._counts[name]) for name in ("cache_hits", "cache_misses", *LOOKUPS)}
        self._figures["hot_bytes"] = float(self._cache.memory)
        self._counts.clear()
        return {}

    def output(self) -> Iterator[pa.RecordBatch]:
        """The rows, enriched."""
        return self._shown.read()

    def close(self) -> None:
        """Give all memory back."""
        self._requests.forget()
        self._waiting.clear()
        self._shown.close()
        self._cache.close()
        give_back(self.spec)


def _taken(columns: list[pa.Array], which: NDArray[np.int64]) -> list[pa.Array]:
    at = pa.array(which)
    return [column.take(at) for column in columns]


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)

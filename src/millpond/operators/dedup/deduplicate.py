"""Deduplication: passes the first row of every key, over all batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HashRange, Words
from millpond.operators.columns.encode import hashes_of, portions
from millpond.operators.dedup.tables import seen_table
from millpond.operators.event_time_slices import SlicedState, UnslicedState, times_of
from millpond.operators.functions.accumulators import BLOCK
from millpond.operators.protocol import MAIN, MAX_OUTPUT_ROWS, NO_EXTRA_METRICS, MakeRmwTable, Times
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.types import parse_type
from millpond.stores.memory.spool import Spool

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta
    from millpond.stores.rmw.table import RmwTable


class Seen:
    """The keys that were seen.

    Args:
        spec: columns and keys.
        make_table: opens the partition's tables.
        suffix: the suffix of the table's name.
    """

    def __init__(self, spec: DeduplicateSpec, make_table: MakeRmwTable, suffix: str = "") -> None:
        self._main = seen_table(spec)
        self._positions = spec.keys
        self._name = MAIN + suffix
        self.table = make_table(self._name, self._main.layout.schema, self._main.initial)
        self._version = 0

    @property
    def tables(self) -> Mapping[str, RmwTable]:
        """The table by name."""
        return {self._name: self.table}

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self.table.begin(version)

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys (see `Prefetchable`)."""
        self.table.prefetch(hashes, needed, needed)

    def first_rows(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose key is new; the batch has the column `__hash`, then those of the spec."""
        for portion in portions(batch, self.table.portion_bytes, self.table.portion_keys):
            new = self._insert(portion)
            if new.any():
                rows = pa.RecordBatch.from_arrays(portion.columns[1:], names=portion.schema.names[1:])
                yield rows if new.all() else rows.filter(pa.array(new))

    def _insert(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        keys = self._main.encode(batch, self._positions)
        self.table.preload(keys, self._version)
        new = np.empty(batch.num_rows, dtype=np.bool_)
        for start in range(0, batch.num_rows, BLOCK):
            block = slice(start, start + BLOCK)
            # Of equal keys in a block only the first creates a row, so only the first passes.
            new[block] = self.table.upsert(keys.take(block), self._version, touch="created").created
        return new

    def seal(self) -> dict[str, TableDelta]:
        """End the batch: seal the table."""
        return {self._name: self.table.seal()}

    def close(self) -> None:
        """Release all memory."""
        self.table.close()


class DeduplicateOperator:
    """A `DeduplicateSpec` on one partition. Keys with event time are dropped when the watermark has passed it.

    Args:
        spec: columns and keys.
        make_table: opens the partition's tables.
        existing: the names of the tables that the state has.
        first_rows: holds the rows of a batch whose keys are new.
    """

    extra_metrics = NO_EXTRA_METRICS

    def __init__(
        self, spec: DeduplicateSpec, make_table: MakeRmwTable, existing: Iterable[str], first_rows: Spool
    ) -> None:
        self.spec = spec
        self._first_rows = first_rows
        self._late_micros = 0
        self.late_rows = 0
        self._parts: SlicedState[Seen] | UnslicedState[Seen]
        if spec.time is not None and spec.time.column in spec.keys:
            self._parts = SlicedState(spec.time, lambda suffix: Seen(spec, make_table, suffix), existing)
        else:
            self._parts = UnslicedState(Seen(spec, make_table))

    @property
    def tables(self) -> Mapping[str, Table]:
        """The operator's tables by name."""
        return self._parts.tables

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._first_rows.clear()
        self._late_micros = times.late * 1000
        self.late_rows = 0
        self._parts.begin(version, times)

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys without event time (see `Prefetchable`); hashes alone do not give the slice."""
        if isinstance(self._parts, UnslicedState):
            self._parts.part.prefetch(hashes, needed)

    def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """Prefetch the state of keys with event time (see `KeyPrefetchable`)."""
        if isinstance(self._parts, SlicedState) and self.spec.time is not None:
            times = times_of(keys.column(1), parse_type(self.spec.columns[self.spec.time.column].type))
            hashes = hashes_of(keys).view(np.uint64)
            for seen, rows in self._parts.prefetch_targets(times):
                seen.prefetch(hashes[rows], needed)

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        return self._parts.passes(rows)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self._parts.restrict(range_)

    def process(self, batch: pa.RecordBatch) -> None:
        """Keep the rows whose key is new; the batch has the column `__hash`, then those of the spec."""
        times = self._times(batch)
        if self.spec.time is not None:
            # As in Spark, a row whose time equals the watermark is late.
            on_time = times > self._late_micros
            if not on_time.all():
                self.late_rows += int(np.count_nonzero(~on_time))
                batch, times = batch.filter(pa.array(on_time)), times[on_time]
        for seen, rows in self._parts.divide(batch, times):
            for first_rows in seen.first_rows(rows):
                self._first_rows.add(first_rows)

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt keys from Spark's state: rows as in `process`, null beside their keys."""
        for seen, rows in self._parts.divide(batch, self._times(batch)):
            # The rows were emitted by Spark already: only their keys count.
            for _ in seen.first_rows(rows):
                pass

    def _times(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the event times of rows in microseconds; empty without event time."""
        if self.spec.time is None:
            return np.zeros(0, np.int64)
        position = self.spec.time.column
        return times_of(batch.column(1 + position), parse_type(self.spec.columns[position].type))

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal what it changed, and drop what is closed."""
        return self._parts.finish()

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose key was new in this batch."""
        for rows in self._first_rows.read():
            for start in range(0, rows.num_rows, MAX_OUTPUT_ROWS):
                yield rows.slice(start, MAX_OUTPUT_ROWS)

    def close(self) -> None:
        """Release all memory."""
        self._first_rows.clear()
        self._parts.close()

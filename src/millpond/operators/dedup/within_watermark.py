"""Deduplication within the watermark: passes the first row of every key, until the watermark has passed its expiry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HashRange, Words
from millpond.operators.columns.encode import numbers, plain, portions, validity
from millpond.operators.dedup.tables import within_table
from millpond.operators.functions.accumulators import BLOCK
from millpond.operators.protocol import MAIN, MAX_OUTPUT_ROWS, NO_EXTRA_METRICS, MakeRmwTable, Times
from millpond.spec.kinds.deduplicate import WithinSpec
from millpond.spec.types import parse_type
from millpond.stores.memory.spool import Spool
from millpond.stores.rmw.expiry import Expiry

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable


class WithinWatermarkOperator:
    """A `WithinSpec` on one partition.

    As in Spark, a key that has expired still stops rows of the batch that drops it. A null time is never late and
    counts as the epoch.

    Args:
        spec: columns and keys.
        make_table: opens the partition's tables.
        first_rows: holds the rows of a batch whose keys are new.
    """

    extra_metrics = NO_EXTRA_METRICS

    def __init__(self, spec: WithinSpec, make_table: MakeRmwTable, first_rows: Spool) -> None:
        self.spec = spec
        self._main = within_table(spec)
        self._table = make_table(MAIN, self._main.layout.schema, self._main.initial)
        self.tables: dict[str, RmwTable] = {MAIN: self._table}
        self._expiry_offset = self._main.values[0].offset
        self._expiry = self._table.expire_by(self._expiry_offset)
        self._time_type = parse_type(spec.columns[spec.time.column].type)
        self._times = Times()
        self._first_rows = first_rows
        self.late_rows = 0

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._times = times
        self._first_rows.clear()
        self.late_rows = 0
        self._table.begin(version)

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        return self._table.passes(rows)

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys (see `Prefetchable`)."""
        self._table.prefetch(hashes, needed, needed)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self._table.restrict(range_)

    def process(self, batch: pa.RecordBatch) -> None:
        """Keep the rows whose key is new; the batch has the column `__hash`, then those of the spec."""
        for portion in portions(batch, self._table.portion_bytes, self._table.portion_keys):
            column = plain(portion.column(1 + self.spec.time.column))
            times, valid = numbers(column, self._time_type), validity(column).astype(np.bool_)
            late = times <= self._times.late * 1000
            if valid.size:
                # A row without event time is never late; its key expires as if it came at the epoch.
                late &= valid
                times = np.where(valid, times, 0)
            if late.any():
                self.late_rows += int(np.count_nonzero(late))
                portion, times = portion.filter(pa.array(~late)), times[~late]
            if portion.num_rows:
                # Rounded up to milliseconds: rounded down, a key would expire before Spark's.
                new = self._insert(portion, -(-times // 1000) + self.spec.delay_ms)
                if new.any():
                    rows = pa.RecordBatch.from_arrays(portion.columns[1:], names=portion.schema.names[1:])
                    self._first_rows.add(rows if new.all() else rows.filter(pa.array(new)))

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt keys from Spark's state: rows as in `process`, whose time is the expiry of their key."""
        for portion in portions(batch, self._table.portion_bytes, self._table.portion_keys):
            times = numbers(plain(portion.column(1 + self.spec.time.column)), self._time_type)
            self._insert(portion, -(-times // 1000))

    def _insert(self, batch: pa.RecordBatch, expiries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Insert the keys of rows, and return a mask of the rows whose key is new."""
        keys = self._main.encode(batch, self.spec.keys)
        stamps = Expiry.stamps(expiries)
        self._table.preload(keys, stamps)
        new = np.empty(batch.num_rows, dtype=np.bool_)
        for start in range(0, batch.num_rows, BLOCK):
            block = slice(start, start + BLOCK)
            rows, created = self._table.upsert(keys.take(block), stamps[block], touch="created")
            new[block] = created
            fresh = rows[created]
            self._table.words[fresh, self._expiry_offset] = expiries[block][created].view(np.uint64)
            self._expiry.file(fresh)
        return new

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: drop the keys that have expired, and seal the table."""
        # Keys expire in the whole range of hashes, not only in that of the last pass.
        self._table.unrestrict()
        # After the rows of the batch: in Spark, too, an expired key still stops rows of the batch that drops it.
        for rows in self._expiry.due(self._times.closed):
            self._table.remove(rows)
        return {MAIN: self._table.seal()}

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose key was new in this batch."""
        for rows in self._first_rows.read():
            for start in range(0, rows.num_rows, MAX_OUTPUT_ROWS):
                yield rows.slice(start, MAX_OUTPUT_ROWS)

    def close(self) -> None:
        """Release all memory."""
        self._first_rows.clear()
        self._table.close()

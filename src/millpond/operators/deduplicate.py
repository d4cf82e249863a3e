"""Deduplication: of every key the first row passes, whatever batch it comes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.accumulators import BLOCK
from millpond.operators.encode import flatten, hashes_of, key_rows, portions
from millpond.operators.protocol import MAIN, PIECE, MakeTable
from millpond.operators.spec import DeduplicateSpec
from millpond.operators.tables import main_table

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw import RmwTable


class DeduplicateOperator:
    """A `DeduplicateSpec` on one partition."""

    def __init__(self, spec: DeduplicateSpec, make_table: MakeTable) -> None:
        self.spec = spec
        self._main, _ = main_table(spec)
        self._table = make_table(MAIN, self._main.layout.schema, self._main.initial)
        self.tables: dict[str, RmwTable] = {MAIN: self._table}
        self._key_types = self._main.types
        self._new: list[pa.RecordBatch] = []
        self._version = 0

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._new = []
        self._table.begin(version)

    def process(self, batch: pa.RecordBatch) -> None:
        """Keep the rows whose key is new; the batch has the column `__hash`, then those of the spec."""
        for portion in portions(batch, self._table.portion, self._table.ahead):
            self._pass_on(portion)

    def _pass_on(self, batch: pa.RecordBatch) -> None:
        count = batch.num_rows
        leaves = [
            leaf
            for position, dtype in zip(self.spec.keys, self._key_types, strict=True)
            for leaf in flatten(batch.column(1 + position), dtype)
        ]
        keys = key_rows(hashes_of(batch), leaves, self._main.keys, self._main.layout.key_stop)
        self._table.prepare(keys, self._version)
        new = np.empty(count, dtype=np.bool_)
        for start in range(0, count, BLOCK):
            block = Rows(keys.words[start : start + BLOCK], keys.heap)
            new[start : start + BLOCK] = self._table.upsert(block, self._version, touch="created").created
        if new.any():
            rows = pa.RecordBatch.from_arrays(batch.columns[1:], names=batch.schema.names[1:])
            self._new.append(rows if new.all() else rows.filter(pa.array(new)))

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal the table."""
        return {MAIN: self._table.seal()}

    def output(self) -> Iterator[pa.RecordBatch]:
        """The rows whose key was new in this batch."""
        for rows in self._new:
            for start in range(0, rows.num_rows, PIECE):
                yield rows.slice(start, PIECE)

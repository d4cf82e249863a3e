"""Aggregates over each key's last rows: of every row, its result over itself and so many rows before it.

A key's rows follow each other batch by batch, those of one batch in the order that the query asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.pointers import address
from millpond.kernels.ranking.grouping import order_rows
from millpond.kernels.ranking.packed_rows import read_slots, write_slots
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HashRange, Rows, Words
from millpond.operators.columns.encode import NO_HEAP, Operand, flatten, hashes_of, key_rows, operand
from millpond.operators.protocol import MAIN, NO_FIGURES, PIECE, MakeRows, Times
from millpond.operators.ranking.frames import Frames
from millpond.operators.ranking.packed_rows import PackedRows
from millpond.operators.ranking.tables import rows_table
from millpond.spec.kinds.over import OverSpec
from millpond.spec.operators import Order
from millpond.spec.types import parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable

BLOCK = 8192
"""Rows worked on at a time, or those of one key if they are more."""


class OverRowsOperator:
    """An `OverSpec` over rows that only come, on one partition.

    A batch is held in memory until it is complete: its rows are put in order.
    """

    figures = NO_FIGURES
    late_rows = 0

    def __init__(self, spec: OverSpec, make_table: MakeRows) -> None:
        self.spec = spec
        self._main = rows_table(spec)
        self._table = make_table(MAIN, self._main.layout.schema, self._main.initial)
        self.tables: dict[str, RmwTable] = {MAIN: self._table}
        keys = [Order(position) for position in spec.keys]
        self._rows = PackedRows(spec.columns, [*keys, *(each for each in spec.order if each.column not in spec.keys)])
        self._frames = Frames(spec)
        self._inputs = self._frames.inputs
        self._kept = PackedRows([spec.columns[position] for position in self._inputs], ())
        self._place = self._main.values[0].offset
        self._types = [parse_type(field.type) for field in spec.columns]
        self._batches: list[pa.RecordBatch] = []
        self._out: list[pa.RecordBatch] = []
        self._version = 0

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._batches, self._out = [], []
        self._table.begin(version)

    def passes(self, rows: int) -> int:
        """One: what a batch brings is held until it is complete."""
        return 1

    def announce(self, hashes: Words, needed: int) -> None:
        """Let the state of some keys be read (see `Announced`)."""
        self._table.announce(hashes, needed, needed)

    def narrow(self, range_: HashRange) -> None:
        """Until the next call, or the next batch, all rows will have hashes of this range."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Take up rows of the batch: the column `__hash`, then those of the spec."""
        if batch.num_rows:
            self._batches.append(batch)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: compute, and seal the table."""
        if self._batches:
            (whole,) = pa.Table.from_batches(self._batches).combine_chunks().to_batches()
            self._batches = []
            self._compute(whole)
        return {MAIN: self._table.seal()}

    def _compute(self, batch: pa.RecordBatch) -> None:
        rows = self._rows.pack(batch.columns[1:], batch.num_rows)
        hashes, positions = order_by_hash(hashes_of(batch).view(np.uint64).copy())
        starts = np.empty(batch.num_rows + 1, dtype=np.int64)
        at = (address(rows.words), self._rows.stride, address(rows.heap))
        descriptor = self._rows.descriptor
        found = order_rows(hashes.view(np.int64), positions, *at, descriptor, len(self.spec.keys), starts)
        ordered = batch.take(pa.array(positions))
        first = 0
        while first < found:  # whole keys at a time
            last = max(first + 1, int(np.searchsorted(starts[: found + 1], starts[first] + BLOCK, "right")) - 1)
            piece = ordered.slice(starts[first], starts[last] - starts[first])
            self._block(piece, starts[first : last + 1] - starts[first])
            first = last

    def _block(self, batch: pa.RecordBatch, starts: NDArray[np.int64]) -> None:
        """Results of the rows of some keys, in order; `starts` says where each key begins."""
        ids = self._locate(batch, starts[:-1])
        new = np.diff(starts)
        table: Words = self._table.words[ids]
        held = table[:, self._place + 2].astype(np.int64)
        old_starts, lengths = _running(held), held + new
        sequence = _running(lengths)
        total, olds = int(sequence[-1]), int(old_starts[-1])
        # Where, among what is held and then what is new, each row of the sequences is.
        of = np.repeat(np.arange(len(new)), lengths)
        inside = np.arange(total) - sequence[of]
        fresh = inside >= held[of]
        source = np.where(fresh, olds + starts[of] + inside - held[of], old_starts[of] + inside)
        columns = self._sequences(table, held, old_starts, batch, source)
        results = self._frames.results(columns, np.flatnonzero(fresh), inside[fresh])
        names = [field.name for field in self.spec.output_fields]
        self._out.append(pa.RecordBatch.from_arrays([*batch.columns[1:], *results], names=names))
        self._keep(batch, ids, inside >= (lengths - self._frames.most)[of], fresh, source - olds, inside, of)

    def _locate(self, batch: pa.RecordBatch, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        heads = batch.take(pa.array(firsts))
        pairs = zip(self.spec.keys, self._main.types, strict=True)
        leaves = [leaf for position, dtype in pairs for leaf in flatten(heads.column(1 + position), dtype)]
        keys = key_rows(hashes_of(heads), leaves, self._main.keys, self._main.layout.key_stop)
        rows: NDArray[np.int64] = self._table.upsert(keys, self._version).rows
        return rows

    def _sequences(
        self,
        table: Words,
        held: NDArray[np.int64],
        old_starts: NDArray[np.int64],
        batch: pa.RecordBatch,
        source: NDArray[np.int64],
    ) -> dict[int, Operand]:
        """The inputs of the calls, for every key what is held and then what is new."""
        of = np.repeat(np.arange(len(held)), held)
        which = np.arange(len(of)) - old_starts[of]
        heap = address(self._table.heap.data)
        out: Words = np.empty((len(of), self._kept.layout.width), dtype=np.uint64)
        read_slots(table, heap, self._place, self._kept.stride, self._kept.blobs, of, which, out, NO_HEAP.copy())
        old = [*self._kept.unpack(Rows(out, NO_HEAP), [], self._kept.fields)] if self._inputs else []
        taken = pa.array(source)
        operands = {}
        for number, position in enumerate(self._inputs):
            both_ = pa.concat_arrays([old[0].column(number), batch.column(1 + position)])
            operands[position] = operand(both_.take(taken), self._types[position])
        return operands

    def _keep(
        self,
        batch: pa.RecordBatch,
        ids: NDArray[np.int64],
        stays: NDArray[np.bool_],
        fresh: NDArray[np.bool_],
        position: NDArray[np.int64],
        inside: NDArray[np.int64],
        of: NDArray[np.int64],
    ) -> None:
        """Store the last rows of each key."""
        rows = self._kept.pack([batch.column(1 + p) for p in self._inputs], batch.num_rows)
        sources = np.where(fresh, position, -1 - inside)[stays]
        counts = np.bincount(of[stays], minlength=len(ids))
        ends = np.cumsum(counts)
        places = np.concatenate([[0], ends * self._kept.stride])
        out = np.empty(int(places[-1]) + 8, dtype=np.uint8)
        pairs: Words = np.empty((len(ids), 2), dtype=np.uint64)
        words = self._table.words
        write_slots(
            *(address(words), words.strides[0], address(self._table.heap.data), self._place, np.arange(len(ids)), ids),
            *(ends - counts, ends, np.zeros(len(sources), dtype=np.int8), sources),
            *(address(rows.words), self._kept.stride, address(rows.heap), self._kept.blobs, self._version),
            *(address(out), pairs, places),
        )
        self._table.put_bytes(ids, self._place, pairs, out)
        self._table.words[ids, self._place + 2] = counts

    def output(self) -> Iterator[pa.RecordBatch]:
        """The batch's rows with their results."""
        for rows in self._out:
            for start in range(0, rows.num_rows, PIECE):
                yield rows.slice(start, PIECE)

    def close(self) -> None:
        """Give all memory back."""
        self._table.close()


def _running(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)])

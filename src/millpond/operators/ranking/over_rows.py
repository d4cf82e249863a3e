"""Aggregates over each key's last rows: the result of every row over itself and a number of rows before it.

A key's rows are in the order of their batches, and within a batch in the order that the query asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.pointers import address
from millpond.kernels.ranking.grouping import order_rows
from millpond.kernels.ranking.packed_rows import read_slots, write_slots
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HashRange, Rows, Words
from millpond.operators.columns.decode import LIMIT
from millpond.operators.columns.encode import NO_HEAP, Operand, hashes_of, operand
from millpond.operators.columns.nested import cast_exact
from millpond.operators.columns.offsets import bounds_of
from millpond.operators.protocol import MAIN, MAX_OUTPUT_ROWS, NO_EXTRA_METRICS, MakeRmwTable, Times
from millpond.operators.ranking.frames import Frames
from millpond.operators.ranking.packed_rows import MAX_BYTES, PackedRows, key_too_large
from millpond.operators.ranking.tables import rows_table
from millpond.spec.kinds.over import OverSpec
from millpond.spec.operators import Order
from millpond.spec.types import parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable

BLOCK = 8192
"""Rows processed at a time, unless one key has more."""


class OverRowsOperator:
    """An `OverSpec` over an insert-only input, on one partition.

    A batch is held in memory until it is complete, because its rows have to be sorted.
    """

    extra_metrics = NO_EXTRA_METRICS
    late_rows = 0

    def __init__(self, spec: OverSpec, make_table: MakeRmwTable) -> None:
        self.spec = spec
        self._main = rows_table(spec)
        self._table = make_table(MAIN, self._main.layout.schema, self._main.initial)
        self.tables: dict[str, RmwTable] = {MAIN: self._table}
        keys = [Order(position) for position in spec.keys]
        self._rows = PackedRows(spec.columns, [*keys, *(part for part in spec.order if part.column not in spec.keys)])
        self._frames = Frames(spec)
        self._inputs = self._frames.inputs
        self._stored_rows = PackedRows([spec.columns[position] for position in self._inputs], ())
        self._slots_offset = self._main.values[0].offset
        self._types = [parse_type(field.type) for field in spec.columns]
        self._batches: list[pa.RecordBatch] = []
        self._output: list[pa.RecordBatch] = []
        self._version = 0

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._batches, self._output = [], []
        self._table.begin(version)

    def passes(self, rows: int) -> int:
        """Return 1: the whole batch is held until it is complete."""
        return 1

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys (see `Prefetchable`)."""
        self._table.prefetch(hashes, needed, needed)

    def restrict(self, range_: HashRange) -> None:
        """Do nothing: the whole batch is held until it is complete."""

    def process(self, batch: pa.RecordBatch) -> None:
        """Collect rows of the batch: the column `__hash`, then those of the spec."""
        if batch.num_rows:
            self._batches.append(batch)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: compute its results, and seal the table."""
        if self._batches:
            # The order within a batch is the query's, so no result is known before the last row has come.
            batches, self._batches = self._batches, []
            self._compute(batches)
        return {MAIN: self._table.seal()}

    def _compute(self, batches: list[pa.RecordBatch]) -> None:
        """Compute the results of whole keys, in halves by hash where Arrow does not hold a column of all their rows.

        Raises:
            UsageError: the rows of one key are too large.
        """
        columns = [batch.columns for batch in batches]
        if all(sum(column.nbytes for column in parts) <= LIMIT for parts in zip(*columns, strict=True)):
            (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
            self._compute_whole(whole)
            return
        hashes = np.unique(np.concatenate([hashes_of(batch) for batch in batches]))
        if len(hashes) < 2:
            key = tuple(batches[0].column(1 + position)[0].as_py() for position in self.spec.keys)
            raise UsageError(
                f"A batch has more than 2 GiB in one column for the key {key!r}, which is more than Arrow holds.",
                action="Make batches smaller, or partition by more columns.",
            )
        middle = hashes[len(hashes) // 2]
        for below in (True, False):
            half = [batch.filter(pa.array((hashes_of(batch) < middle) == below)) for batch in batches]
            self._compute([batch for batch in half if batch.num_rows])

    def _compute_whole(self, batch: pa.RecordBatch) -> None:
        rows = self._rows.pack(batch.columns[1:], batch.num_rows)
        hashes, positions = order_by_hash(hashes_of(batch).view(np.uint64).copy())
        starts = np.empty(batch.num_rows + 1, dtype=np.int64)
        rows_args = (address(rows.words), self._rows.stride, address(rows.heap))
        descriptor = self._rows.descriptor
        keys = order_rows(hashes.view(np.int64), positions, *rows_args, descriptor, len(self.spec.keys), starts)
        ordered = batch.take(pa.array(positions))
        first = 0
        while first < keys:  # whole keys at a time
            last = max(first + 1, int(np.searchsorted(starts[: keys + 1], starts[first] + BLOCK, "right")) - 1)
            piece = ordered.slice(starts[first], starts[last] - starts[first])
            self._block(piece, starts[first : last + 1] - starts[first])
            first = last

    def _block(self, batch: pa.RecordBatch, starts: NDArray[np.int64]) -> None:
        """Compute the results of the rows of whole keys, in order; `starts` has the first row of each key."""
        ids = self._locate(batch, starts[:-1])
        new = np.diff(starts)
        table: Words = self._table.words[ids]
        stored = table[:, self._slots_offset + 2].astype(np.int64)
        old_starts, lengths = bounds_of(stored), stored + new
        sequence = bounds_of(lengths)
        total, olds = int(sequence[-1]), int(old_starts[-1])
        # For each row of the sequences, its position among the stored rows followed by the new ones.
        owners = np.repeat(np.arange(len(new)), lengths)
        inside = np.arange(total) - sequence[owners]
        fresh = inside >= stored[owners]
        source = np.where(fresh, olds + starts[owners] + inside - stored[owners], old_starts[owners] + inside)
        columns = self._sequences(table, stored, old_starts, batch, source)
        results = self._frames.results(columns, np.flatnonzero(fresh), inside[fresh])
        names = [field.name for field in self.spec.output_fields]
        self._output.append(pa.RecordBatch.from_arrays([*batch.columns[1:], *results], names=names))
        # Only rows that the frame of a later row can reach are kept.
        self._store_last(
            batch, ids, inside >= (lengths - self._frames.max_preceding)[owners], fresh, source - olds, inside, owners
        )

    def _locate(self, batch: pa.RecordBatch, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = self._main.encode(batch.take(pa.array(firsts)), self.spec.keys)
        rows: NDArray[np.int64] = self._table.upsert(keys, self._version).rows
        return rows

    def _sequences(
        self,
        table: Words,
        stored: NDArray[np.int64],
        old_starts: NDArray[np.int64],
        batch: pa.RecordBatch,
        source: NDArray[np.int64],
    ) -> dict[int, Operand]:
        """Return the inputs of the calls: for every key the stored rows, then the new ones.

        Args:
            table: the table's rows of the keys.
            stored: the number of stored rows of each key.
            old_starts: the first stored row of each key, among the stored rows of all keys.
            batch: the new rows.
            source: for each row of the sequences, its position among the stored rows followed by the new ones.
        """
        owners = np.repeat(np.arange(len(stored)), stored)
        which = np.arange(len(owners)) - old_starts[owners]
        heap = address(self._table.heap.data)
        out: Words = np.empty((len(owners), self._stored_rows.layout.width), dtype=np.uint64)
        read_slots(
            table,
            heap,
            self._slots_offset,
            self._stored_rows.stride,
            self._stored_rows.blobs,
            owners,
            which,
            out,
            NO_HEAP.copy(),
        )
        old = [*self._stored_rows.unpack(Rows(out, NO_HEAP), [], self._stored_rows.fields)] if self._inputs else []
        taken = pa.array(source)
        operands = {}
        for number, position in enumerate(self._inputs):
            dtype = self._types[position]
            new = cast_exact(batch.column(1 + position), dtype)  # Spark gives times in the session's time zone
            candidates = pa.concat_arrays([old[0].column(number), new])
            operands[position] = operand(candidates.take(taken), dtype)
        return operands

    def _store_last(
        self,
        batch: pa.RecordBatch,
        ids: NDArray[np.int64],
        stays: NDArray[np.bool_],
        fresh: NDArray[np.bool_],
        position: NDArray[np.int64],
        inside: NDArray[np.int64],
        owners: NDArray[np.int64],
    ) -> None:
        """Store the last rows of each key.

        Args:
            batch: the new rows.
            ids: the row ids of the keys.
            stays: a mask of the sequences' rows to store.
            fresh: a mask of the sequences' rows that are new.
            position: for each new row, its position in the batch.
            inside: for each row, its position in its sequence.
            owners: for each row, the number of its key.
        """
        rows = self._stored_rows.pack([batch.column(1 + p) for p in self._inputs], batch.num_rows)
        sources = np.where(fresh, position, -1 - inside)[stays]
        counts = np.bincount(owners[stays], minlength=len(ids))
        ends = np.cumsum(counts)
        places = np.concatenate([[0], ends * self._stored_rows.stride])
        too_large = np.flatnonzero(np.diff(places) > MAX_BYTES)
        if len(too_large):
            raise key_too_large(self._main, Rows(self._table.words[ids[too_large[:1]]], self._table.heap.data))
        out = np.empty(int(places[-1]) + 8, dtype=np.uint8)
        pairs: Words = np.empty((len(ids), 2), dtype=np.uint64)
        words = self._table.words
        write_slots(
            *(
                address(words),
                words.strides[0],
                address(self._table.heap.data),
                self._slots_offset,
                np.arange(len(ids)),
                ids,
            ),
            *(ends - counts, ends, np.zeros(len(sources), dtype=np.int8), sources),
            *(
                address(rows.words),
                self._stored_rows.stride,
                address(rows.heap),
                self._stored_rows.blobs,
                self._version,
            ),
            *(address(out), pairs, places),
        )
        self._table.put_bytes(ids, self._slots_offset, pairs, out)
        self._table.words[ids, self._slots_offset + 2] = counts

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the batch's rows with their results."""
        for rows in self._output:
            for start in range(0, rows.num_rows, MAX_OUTPUT_ROWS):
                yield rows.slice(start, MAX_OUTPUT_ROWS)

    def close(self) -> None:
        """Release all memory."""
        self._table.close()

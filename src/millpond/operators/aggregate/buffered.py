"""Grouped aggregation over whole windows: appends rows as they come, and aggregates them when their window closes.

This serves functions that need all values of a group at once (FlowKV's append pattern). A row is stored once, in its
pane, even where windows overlap. When the watermark closes windows, their panes are read together, gradually and in
hash order, so that a piece has all rows of its keys. A piece is aggregated like a small batch, in tables of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, META, Rows
from millpond.operators.aggregate.groups import Groups
from millpond.operators.aggregate.windowed import WindowedAggregate, in_windows
from millpond.operators.columns.encode import portions
from millpond.operators.event_time_slices import SlicedState, times_of
from millpond.operators.hash_ranges import key_groups
from millpond.operators.protocol import MAIN, MakeTable, Times, scratch
from millpond.operators.tables.input_rows import StoredRows
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.stores.aligned.hash_intervals import read_gradually
from millpond.stores.aligned.table import AlignedTable

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta


_ARRIVAL = "__arrival"
_ROW_NUMBER_BITS = 32  # bits of an arrival that number the rows of a batch; the bits above number the batch


class _Appended:
    """The rows of one slice of event time; if `in_order`, the arrival in their last column goes to the word `META`."""

    def __init__(self, stored: StoredRows, make_table: MakeTable, suffix: str, *, in_order: bool) -> None:
        self._stored = stored
        self._in_order = in_order
        self._name = MAIN + suffix
        self.table = make_table(self._name, stored.layout.schema, stored.initial, kind="aligned")

    @property
    def tables(self) -> Mapping[str, AlignedTable]:
        """The single table, by name."""
        return {self._name: self.table}

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""
        self.table.begin(version)

    def fold(self, batch: pa.RecordBatch) -> None:
        """Append the rows of a batch."""
        for portion in portions(batch, self.table.portion_bytes, self.table.portion_keys):
            rows = self._stored.encode(portion)
            if self._in_order:
                rows.words[:, META] = portion.column(portion.num_columns - 1)
            self.table.append(rows)

    def seal(self) -> dict[str, TableDelta]:
        """End the batch."""
        return {self._name: self.table.seal()}

    def close(self) -> None:
        """Release all memory."""
        self.table.close()


class BufferedAggregate(WindowedAggregate):
    """An `AggregateSpec` with `time` in append mode on one partition, which keeps rows until their windows close.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables, and temporary ones for a piece of rows.
        existing: the names of the tables that exist.
    """

    def __init__(self, spec: AggregateSpec, make_table: MakeTable, existing: Iterable[str]) -> None:
        self._stored = StoredRows(spec.key_fields, spec.inputs)
        self._make_table = make_table
        self._in_order = spec.in_order
        super().__init__(spec, make_table, existing)
        self._next_arrival = 0  # the batch, and in the low bits the number of its rows so far

    def _sliced(self, make_table: MakeTable, existing: Iterable[str]) -> SlicedState[_Appended]:  # type: ignore[override]
        assert self.spec.time is not None
        # Panes are read when their first window closes, and dropped with their last.
        reach = 0 if self._windows is None else self._windows.size - self._windows.slide

        def make(suffix: str) -> _Appended:
            return _Appended(self._stored, make_table, suffix, in_order=self._in_order)

        return SlicedState(self.spec.time, make, existing, reach=reach)

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        super().begin(version, times)
        # Arrivals grow from batch to batch, and a repeated batch numbers its rows as the first attempt did.
        self._next_arrival = version << _ROW_NUMBER_BITS

    def process(self, batch: pa.RecordBatch) -> None:
        """Append rows of the batch: the column `__hash`, then keys and inputs in the order of the spec."""
        times = times_of(batch.column(self._column), self._type)
        if self._in_order:
            until = self._next_arrival + batch.num_rows
            batch = batch.append_column(_ARRIVAL, pa.array(np.arange(self._next_arrival, until)))
            self._next_arrival = until
        kept, begins = self._on_time(batch, times, count=True)
        for part, rows in self._parts.divide(kept, begins):
            part.fold(rows)

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the groups of the windows that the batch's watermark closed."""
        tables: list[Any] = [self._parts.closing[slice_].table for slice_ in sorted(self._parts.closing)]
        if not tables:
            return
        files = [table.all_segments() for table in tables]
        for rows in read_gradually(files, self._stored.layout, max(1, tables[0].portion_bytes // 2)):
            yield from self._aggregate_piece(_in_arrival_order(rows) if self._in_order else rows)

    def _aggregate_piece(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        """Yield the results of all keys of a piece."""
        batch = self._stored.decode(rows)
        times = times_of(batch.column(self._column), self._type)
        for low, high in self._window_groups(times):
            # A piece has all rows of its keys, so each group is complete within these tables.
            groups = Groups(self.spec, scratch(self._make_table), whole=True)
            try:
                groups.begin(0)
                groups.restrict(key_groups(rows))
                groups.table.size_index(rows.count)
                for placed in self._rows_of_windows(batch, times, low, high):
                    groups.fold(placed)
                for result in groups.scan():
                    yield from self._decoded(groups, result)
            finally:
                groups.close()

    @property
    def _overlap(self) -> int:
        return 1 if self._windows is None else self._windows.overlap

    def _rows_of_windows(
        self, batch: pa.RecordBatch, times: NDArray[np.int64], low: int, high: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield a batch's rows as rows of the windows that begin from `low` to `high`."""
        placed = []
        for begins in self._window_starts(times, self._overlap):
            chosen = np.flatnonzero((begins >= low) & (begins <= high))
            if len(chosen):
                placed.append((chosen, begins[chosen]))
        if self._in_order:  # row by row, each into all its windows
            chosen, begins = (np.concatenate(arrays) for arrays in zip(*placed, strict=True))
            turns = np.argsort(chosen, kind="stable")
            placed = [(chosen[turns], begins[turns])]
        for chosen, begins in placed:
            every = len(chosen) == len(times) and not self._in_order
            kept = batch if every else batch.take(pa.array(chosen))
            yield in_windows(kept, self._column, begins) if self._sliding else kept

    def _window_groups(self, times: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """Yield closing windows in groups that hold about every row once, as their first and last beginnings."""
        if not self._sliding:
            if self._parts.closing_now(times).any():
                yield self._parts.closing_times
            return
        closing = [begins[self._parts.closing_now(begins)] for begins in self._window_starts(times, self._overlap)]
        windows, counts = np.unique(np.concatenate(closing), return_counts=True)
        turns = (np.cumsum(counts) - counts) // max(1, len(times))
        for group in np.split(windows, np.flatnonzero(np.diff(turns)) + 1):
            if len(group):
                yield int(group[0]), int(group[-1])


def _in_arrival_order(rows: Rows) -> Rows:
    """Sort rows in hash order by arrival within each hash, whatever their panes."""
    hashes, arrivals = rows.word(HASH), rows.word(META)
    if ((hashes[:-1] != hashes[1:]) | (arrivals[:-1] < arrivals[1:])).all():
        return rows
    _, by_arrival = order_by_hash(arrivals)
    _, order = order_by_hash(hashes[by_arrival])
    return rows.take(by_arrival[order])

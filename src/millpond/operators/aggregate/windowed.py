"""Grouped aggregation by event time: drops late rows, and closes groups by the watermark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HashRange, Rows
from millpond.operators.aggregate.groups import Groups, combined_rows
from millpond.operators.aggregate.panes import merge_panes, spread_by_time
from millpond.operators.columns.encode import hashes_of
from millpond.operators.event_time_slices import SlicedState, times_of
from millpond.operators.protocol import NO_EXTRA_METRICS, MakeTable, Times
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import Windows
from millpond.spec.types import DataType, leaves, parse_type

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta

_MAX_COPIES = 1 << 17
"""Maximum rows folded at once, counted in each of their windows, where the order of rows matters."""


class WindowedAggregate:
    """An `AggregateSpec` with `time` on one partition, with one part of the state per slice of event time.

    In append mode a group is emitted when the watermark passes its time, in update mode whenever it changes. A closed
    group is dropped with its whole slice.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables.
        existing: the names of the tables that exist.
    """

    def __init__(self, spec: AggregateSpec, make_table: MakeTable, existing: Iterable[str]) -> None:
        assert spec.time is not None
        self.spec = spec
        self._column = 1 + spec.time.column
        self._windows = spec.time.windows
        keys = [parse_type(field.type) for field in spec.key_fields]
        self._type = keys[spec.time.column]
        self._time_leaf = sum(1 for key in keys[: self._column] for _ in leaves(key)) - 1
        self._window_type = parse_type(spec.keys[spec.time.column].type)
        self._parts = self._sliced(make_table, existing)
        self._sliding = self._windows is not None and self._windows.overlap > 1
        self._shared = self._windows is not None and self._windows.shared
        self._in_order = spec.in_order
        self.late_rows = 0

    def _sliced(self, make_table: MakeTable, existing: Iterable[str]) -> SlicedState[Groups]:
        assert self.spec.time is not None
        return SlicedState(self.spec.time, lambda suffix: Groups(self.spec, make_table, suffix), existing)

    @property
    def tables(self) -> Mapping[str, Table]:
        """The operator's tables by name."""
        return self._parts.tables

    @property
    def extra_metrics(self) -> Mapping[str, float]:
        """The operator's own metrics: none."""
        return NO_EXTRA_METRICS

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._parts.begin(version, times)
        self.late_rows = 0

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        return self._parts.passes(rows)

    def prefetch_keys(self, keys: pa.RecordBatch, needed: int) -> None:
        """Prefetch groups in the slices of their event times, but not for late rows (see `KeyPrefetchable`)."""
        times = times_of(keys.column(1), self._type)
        for begins in self._window_starts(times, self._copies):
            hashes = hashes_of(keys)
            if self._sliding:
                hashes = spread_by_time(hashes, begins)
            for part, rows in self._parts.prefetch_targets(begins):
                part.prefetch(hashes[rows].view(np.uint64), needed)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self._parts.restrict(range_)

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then keys and inputs in the order of the spec."""
        times = times_of(batch.column(self._column), self._type)
        if self._in_order and not self._shared:
            # The copies below repeat a row for each window, so late rows are counted before.
            self._on_time(batch, times, count=True)
            self._process_in_order(batch, times)
            return
        for number, begins in enumerate(self._window_starts(times, self._copies)):
            # A row that is late for its last window is late for all, so only that window counts it.
            self._fold_rows(*self._on_time(batch, begins, count=number == 0))

    def process_combined(self, batch: pa.RecordBatch) -> int:
        """Fold in combined rows (see `Combining`), whose event time is in their key."""
        times = times_of(batch.column(self._column), self._type)
        for number, begins in enumerate(self._window_starts(times, self._copies)):
            on_time = self._parts.on_time(begins)
            rows = batch if on_time.all() else batch.filter(pa.array(on_time))
            if number == 0:
                # A combined row stands for several input rows, and Spark counts late input rows.
                self.late_rows += combined_rows(batch) - combined_rows(rows)
            for part, share in self._divide(rows, begins[on_time]):
                part.merge(share)
        return combined_rows(batch)

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt partial results of windows: the column `__hash`, then keys and the state columns of all calls."""
        for part, rows in self._divide(batch, times_of(batch.column(self._column), self._type)):
            part.adopt(rows)

    @property
    def _copies(self) -> int:
        """Number of windows that each row is folded into one by one; rows of shared panes are folded once."""
        return 1 if self._windows is None or self._shared else self._windows.overlap

    def _window_starts(self, times: NDArray[np.int64], count: int) -> Iterator[NDArray[np.int64]]:
        """Yield the beginnings of the last window that has each time, of the window before, … (`count` windows)."""
        for number in range(count):
            yield times if self._windows is None else times - number * self._windows.slide

    def _process_in_order(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> None:
        """Fold each row into all its windows before the next row."""
        assert self._windows is not None
        overlap = self._windows.overlap
        rows = max(1, _MAX_COPIES // overlap)
        lags = np.arange(overlap) * self._windows.slide
        for start in range(0, len(times), rows):
            chunk = times[start : start + rows]
            copies = batch.take(pa.array(np.repeat(np.arange(start, start + len(chunk)), overlap)))
            self._fold_rows(*self._on_time(copies, (chunk[:, None] - lags).ravel(), count=False))

    def _fold_rows(self, batch: pa.RecordBatch, begins: NDArray[np.int64]) -> None:
        for part, rows in self._divide(batch, begins):
            part.fold(rows)

    def _divide(self, batch: pa.RecordBatch, begins: NDArray[np.int64]) -> Iterator[tuple[Groups, pa.RecordBatch]]:
        """Split rows by slice, as rows of the windows or panes that begin at the given times."""
        if self._sliding:
            batch = in_windows(batch, self._column, begins)
        yield from self._parts.divide(batch, begins)

    def _on_time(
        self, batch: pa.RecordBatch, times: NDArray[np.int64], *, count: bool
    ) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        on_time = self._parts.on_time(times)
        if on_time.all():
            return batch, times
        if count:
            self.late_rows += int(np.count_nonzero(~on_time))
        return batch.filter(pa.array(on_time)), times[on_time]

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: drop what is closed, and seal the other changes."""
        return self._parts.finish()

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the groups that the batch's watermark closed, or in update mode those that it changed."""
        if self.spec.output_mode == "update":
            # Parts that began for maintenance alone have no touched rows.
            for part in self._parts.active.values():
                for rows in part.touched():
                    yield from self._decoded(part, rows)
            return
        if self._windows is not None and self._shared:
            parts = [self._parts.closing[slice_] for slice_ in sorted(self._parts.closing)]
            place = parts[0].main.keys[self._time_leaf].offset if parts else 0
            for rows in merge_panes(parts, self._windows, place, *self._parts.closing_times):
                yield from self._decoded(parts[0], rows)
            return
        for slice_, part in self._parts.closing.items():
            # A slice of several windows closes in parts: only then each row is compared with the watermark.
            whole = self._parts.closes_whole(slice_)
            for rows in part.scan():
                yield from self._decoded(part, rows if whole else self._closing_now(part, rows))

    def _closing_now(self, part: Groups, rows: Rows) -> Rows:
        place = part.main.keys[self._time_leaf]
        times = rows.words[:, place.offset].view(np.int64)
        return rows.take(self._parts.closing_now(times))

    def _decoded(self, part: Groups, rows: Rows) -> Iterator[pa.RecordBatch]:
        for batch in decode_rows(part.main, part.calls, self.spec.output_fields, rows):
            if self._windows is None:
                yield batch
            else:
                position = self._column - 1
                yield batch.set_column(
                    position,
                    self.spec.keys[position].name,
                    _windows(batch.column(position), self._windows, self._window_type),
                )

    def close(self) -> None:
        """Release all memory."""
        self._parts.close()


def in_windows(batch: pa.RecordBatch, column: int, begins: NDArray[np.int64]) -> pa.RecordBatch:
    """Return the rows with the beginning of their window or pane as event time.

    The hash, which covers the other keys only, is spread by this beginning.
    """
    names = batch.schema.names
    batch = batch.set_column(column, names[column], pa.array(begins))
    return batch.set_column(0, names[0], pa.array(spread_by_time(hashes_of(batch), begins)))


def _windows(begins: pa.Array, windows: Windows, dtype: DataType) -> pa.Array:
    """Build windows as Spark shows them, from their beginnings in microseconds."""
    times = [dtype.fields[0][1].arrow, dtype.fields[1][1].arrow]
    ends = np.asarray(begins) + windows.size
    return pa.StructArray.from_arrays(
        [begins.cast(times[0]), pa.array(ends).cast(times[1])], names=[name for name, _ in dtype.fields]
    )

"""State by slices of event time: assigns rows to slices, and drops slices that the watermark closes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import NEVER, HashRange
from millpond.operators.columns.encode import and_masks, numbers, plain, validity
from millpond.operators.protocol import Times
from millpond.operators.slice_assigner import SliceAssigner
from millpond.spec.operators import EventTime
from millpond.spec.types import DataType
from millpond.stores.aligned.table import AlignedTable
from millpond.time_slices import SLICE, TimeSlice

if TYPE_CHECKING:
    from millpond.stores.protocol import SlicedTable, TableDelta

_SECOND_MICROS = 1_000_000
_MAINTAINED_PER_BATCH = 4  # slices that each batch begins even if no rows come to them


class SliceState(Protocol):
    """The state that an operator keeps for one slice of event time."""

    @property
    def table(self) -> SlicedTable:
        """The main table."""

    @property
    def tables(self) -> Mapping[str, SlicedTable]:
        """The tables by name."""

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""

    def seal(self) -> dict[str, TableDelta]:
        """End the batch: seal all tables."""

    def close(self) -> None:
        """Release all memory."""


P = TypeVar("P", bound=SliceState)


class SlicedState(Generic[P]):
    """An operator's state, divided into one part per slice of event time.

    Args:
        time: the column of event time.
        make: makes a part; its argument is the suffix of the part's table names.
        existing: the names of the tables that exist.
        reach: microseconds from the beginning of a window to that of the last slice that has rows of it.

    Attributes:
        active: the parts that take part in the running batch, some of them only for maintenance.
        dropped: the parts that the running batch's watermark has closed; they live until the next batch.
        closing: the parts that it has closed in full or in part, those of `dropped` included.
    """

    def __init__(self, time: EventTime, make: Callable[[str], P], existing: Iterable[str], *, reach: int = 0) -> None:
        self._windows = time.windows
        self._reach = reach
        self._make_part = make
        live = {TimeSlice.parse(name.partition(SLICE)[2]) for name in existing}
        if time.windows is None:  # windows usually end on whole seconds, so a window that closes ends its slice
            self._assigner = SliceAssigner(_SECOND_MICROS, 1, live)
        else:
            self._assigner = SliceAssigner(time.windows.slide, time.windows.offset, live)
        self._parts = {slice_: make(SLICE + slice_.name) for slice_ in self._assigner.live}
        self.active: dict[TimeSlice, P] = {}
        self.dropped: dict[TimeSlice, P] = {}
        self.closing: dict[TimeSlice, P] = {}
        self._version = 0
        self._restricted: HashRange | None = None
        self._row_counts: dict[TimeSlice, int] = {}  # rows that each part got in this batch
        self._previous_row_counts: dict[TimeSlice, int] = {}  # the same of the last batch that had any rows
        self._restricted_ranges: dict[TimeSlice, HashRange] = {}  # the hash range that each table is restricted to
        self._hinted: set[TimeSlice] = set()  # parts with prefetch hints since the last batch began
        self._late = self._closed = 0

    @property
    def tables(self) -> dict[str, SlicedTable]:
        """The tables of all live parts, by name."""
        return {name: table for part in self._parts.values() for name, table in part.tables.items()}

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`; close the parts that were over before it."""
        # Their output is read after `finish`, and may be read again, so they close only now.
        for part in self.dropped.values():
            for table in part.tables.values():
                if isinstance(table, AlignedTable):
                    table.drop_copies()
            part.close()
        self.active, self.dropped, self.closing = {}, {}, {}
        self._version = version
        self._restricted = None
        # A batch without data says nothing about where the next rows come.
        self._previous_row_counts, self._row_counts = self._row_counts or self._previous_row_counts, {}
        self._restricted_ranges = {}
        self._late, self._closed = times.late * 1000, times.closed * 1000
        self._begin_maintenance()

    def _begin_maintenance(self) -> None:
        """Begin parts that may get no rows, because their tables have work to finish between two batches."""
        live = self._assigner.live
        for slice_ in live:  # a file is garbage to the collector if no manifest names it soon after it was written
            if any(table.in_flight or table.over_budget for table in self._parts[slice_].tables.values()):
                self.open(slice_)
        for slice_ in self._hinted:  # the end of the batch drops what was prefetched in vain
            if slice_ in self._parts:
                self.open(slice_)
        self._hinted.clear()
        for number in range(
            min(_MAINTAINED_PER_BATCH, len(live))
        ):  # in turn, so that every part releases memory and starts to write
            self.open(live[(self._version * _MAINTAINED_PER_BATCH + number) % len(live)])

    def closing_watermarks(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the watermarks that close state of these times, in microseconds."""
        return times if self._windows is None else times + self._windows.size

    def on_time(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the times that are not late."""
        # As in Spark, a time that equals the watermark is late.
        return self.closing_watermarks(times) > self._late

    @property
    def closing_times(self) -> tuple[int, int]:
        """The first and the last time that this batch's watermark closes and the one before did not."""
        size = 0 if self._windows is None else self._windows.size
        return self._late - size + 1, self._closed - size

    def closing_now(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the times that this batch's watermark closes and the one before did not."""
        first, last = self.closing_times
        return (times >= first) & (times <= last)

    @property
    def _until(self) -> int:
        """The time up to which slices are over."""
        if self._windows is None:
            return self._closed
        # Slices hold the beginnings of windows, and end before the beginning of the next one.
        slide, origin = self._windows.slide, self._windows.offset
        return (self._closed - self._windows.size - origin) // slide * slide + origin + slide - 1

    def closes(self, slice_: TimeSlice) -> bool:
        """Return whether a slice is over by this batch's watermark, so that `finish` drops it."""
        return slice_.last <= self._until

    def closes_whole(self, slice_: TimeSlice) -> bool:
        """Return whether this batch's watermark closes all times of a slice, and earlier ones closed no time of it."""
        return self.closes(slice_) and slice_.low >= self.closing_times[0]

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes.

        The rows are expected in the slices that got the last batch's rows, or evenly in all if no batch had any.
        """
        total = sum(self._previous_row_counts.values())
        shares = {slice_: count / total for slice_, count in self._previous_row_counts.items()} or dict.fromkeys(
            self._parts, 1.0
        )
        live = [(self._parts[slice_].table, share) for slice_, share in shares.items() if slice_ in self._parts]
        return max((table.passes(math.ceil(rows * share)) for table, share in live), default=1)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self._restricted = range_

    def divide(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> Iterator[tuple[P, pa.RecordBatch]]:
        """Split a batch by the part that its rows belong to, given their times."""
        for slice_, rows in self._assigner.divide(times):
            part = self.open(slice_)
            if slice_ not in self._row_counts:
                _set_idle(part, False)
                self._row_counts[slice_] = 0
            if self._restricted is not None and self._restricted_ranges.get(slice_) != self._restricted:
                self._restricted_ranges[slice_] = self._restricted
                part.table.restrict(self._restricted)  # tables that get no rows keep their range
            self._row_counts[slice_] += len(times) if rows is None else len(rows)
            yield part, batch if rows is None else batch.take(pa.array(rows))

    def prefetch_targets(self, times: NDArray[np.int64]) -> Iterator[tuple[P, NDArray[np.int64]]]:
        """Yield the parts that rows of these times will read, each with the positions of its times.

        Late rows read nothing, and a slice without a part has nothing to read.
        """
        on_time = np.flatnonzero(self.on_time(times))
        for slice_, rows in self._assigner.divide_existing(times[on_time]):
            self._hinted.add(slice_)
            # The part must begin with the next batch, even if no row follows, so that it drops what was read in vain.
            yield self._parts[slice_], on_time[rows]

    @property
    def live(self) -> Mapping[TimeSlice, P]:
        """The live parts, by slice."""
        return self._parts

    def open(self, slice_: TimeSlice) -> P:
        """Return the part of a slice and begin it for the running batch; make it if it does not exist."""
        part = self.active.get(slice_)
        if part is None:
            part = self._parts.get(slice_)
            if part is None:
                part = self._parts[slice_] = self._make_part(SLICE + slice_.name)
            self.active[slice_] = part
            part.begin(self._version)
        return part

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: drop the parts that are over and seal the changes of the others."""
        until = self._until
        if self._closed > self._late:
            # State by pane is read when the first window of a pane closes, and dropped with the last.
            ahead = self._reach
            if self._windows is not None and self._windows.shared:
                ahead = self._windows.size - self._windows.slide
            self.closing = {slice_: part for slice_, part in self._parts.items() if slice_.low <= until + ahead}
        self.dropped = {slice_: self._parts.pop(slice_) for slice_ in self._assigner.drop(until)}
        sealed: dict[str, TableDelta] = {}
        if self._row_counts:  # the next batch's rows mostly come to the slices of this batch's rows
            for slice_, part in (self._parts | self.dropped).items():
                _set_idle(part, slice_ not in self._row_counts or slice_ in self.dropped)
        # The next manifest leaves out the tables of closed slices, so what this batch changed of them needs no delta.
        for slice_, part in self.active.items():
            if slice_ not in self.dropped:
                # A part that began for maintenance alone has no changes, and needs no delta.
                sealed |= {name: delta for name, delta in part.seal().items() if delta.rows}
        return sealed

    def close(self) -> None:
        """Release all memory."""
        for part in (*self._parts.values(), *self.dropped.values()):
            part.close()


def _set_idle(part: SliceState, idle: bool) -> None:
    for table in part.tables.values():
        table.set_idle(idle)


class UnslicedState(Generic[P]):
    """The state of an operator without event time: a single part behind the interface of `SlicedState`.

    Attributes:
        part: the single part.
    """

    def __init__(self, part: P) -> None:
        self.part = part

    @property
    def tables(self) -> Mapping[str, SlicedTable]:
        """All tables by name."""
        return self.part.tables

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self.part.begin(version)

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        return self.part.table.passes(rows)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self.part.table.restrict(range_)

    def divide(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> Iterator[tuple[P, pa.RecordBatch]]:
        """Yield the single part with all rows."""
        yield self.part, batch

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal all tables."""
        return self.part.seal()

    def close(self) -> None:
        """Release all memory."""
        self.part.close()


def times_of(array: pa.Array, dtype: DataType) -> NDArray[np.int64]:
    """Return the times of an event-time column in microseconds; `NEVER` for nulls, the end for windows."""
    array = plain(array)
    valid = validity(array)
    while dtype.name == "struct":
        dtype = dtype.fields[-1][1]
        array = plain(array.field(array.type.num_fields - 1))
        valid = and_masks(valid, validity(array))
    times = numbers(array, dtype)
    # As in Spark, a row without event time is never late, and the watermark never closes its state.
    return np.where(valid.astype(np.bool_), times, NEVER) if valid.size else times

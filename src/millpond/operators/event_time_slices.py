"""State by slices of event time: which of it a row belongs to, what a batch has begun, and what is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import NEVER, HashRange
from millpond.operators.columns.encode import numbers, plain, validity
from millpond.operators.protocol import Times
from millpond.spec.operators import EventTime
from millpond.spec.types import DataType
from millpond.stores.event_time_slices import SliceAssigner
from millpond.time_slices import SLICE, TimeSlice

if TYPE_CHECKING:
    from millpond.stores.protocol import SlicedTable, TableDelta

_SECOND = 1_000_000
_TENDED = 4  # parts that a batch begins whether rows come or not


class SliceState(Protocol):
    """What an operator keeps for one slice."""

    @property
    def table(self) -> SlicedTable:
        """Its main table."""

    @property
    def tables(self) -> Mapping[str, SlicedTable]:
        """Its tables by name."""

    def begin(self, version: int) -> None:
        """Start the batch that reads state `version`."""

    def seal(self) -> dict[str, TableDelta]:
        """End the batch: seal all tables."""

    def close(self) -> None:
        """Give all memory back."""


P = TypeVar("P", bound=SliceState)


class SlicedState(Generic[P]):
    """The parts of an operator's state, by slice of event time.

    Args:
        time: the column of event time.
        make: makes a part whose tables have names with a suffix.
        existing: the names of the tables that there are.
        reach: microseconds from the beginning of a window to that of the last slice that has rows of it.

    Attributes:
        begun: the parts that the running batch has to do with, some of them only to be tended.
        over: the parts that the watermark of the running batch has closed; they live until the next batch.
        closing: the parts some of which it has closed, those of `over` included.
    """

    def __init__(self, time: EventTime, make: Callable[[str], P], existing: Iterable[str], *, reach: int = 0) -> None:
        self._windows = time.windows
        self._reach = reach
        self._make = make
        live = {TimeSlice.parse(name.partition(SLICE)[2]) for name in existing}
        if time.windows is None:  # ends of windows are whole seconds, mostly: one that closes ends its slice
            self._assigner = SliceAssigner(_SECOND, 1, live)
        else:
            self._assigner = SliceAssigner(time.windows.slide, time.windows.offset, live)
        self._parts = {one: make(SLICE + one.name) for one in self._assigner.live}
        self.begun: dict[TimeSlice, P] = {}
        self.over: dict[TimeSlice, P] = {}
        self.closing: dict[TimeSlice, P] = {}
        self._version = 0
        self._narrowed: HashRange | None = None
        self._given: dict[TimeSlice, int] = {}  # how many rows each part was given in this batch
        self._given_before: dict[TimeSlice, int] = {}  # in the last batch that had any
        self._ranges: dict[TimeSlice, HashRange] = {}  # what tables are narrowed to
        self._announced: set[TimeSlice] = set()  # parts that expect rows, since the last batch began
        self._late = self._closed = 0

    @property
    def tables(self) -> dict[str, SlicedTable]:
        """All tables that go on living, by name."""
        return {name: table for part in self._parts.values() for name, table in part.tables.items()}

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`; what was over before it goes."""
        for part in self.over.values():
            part.close()
        self.begun, self.over, self.closing = {}, {}, {}
        self._version = version
        self._narrowed = None
        self._given_before, self._given = self._given or self._given_before, {}
        self._ranges = {}
        self._late, self._closed = times.late * 1000, times.closed * 1000
        self._tend()

    def _tend(self) -> None:
        """Begin parts to which no rows need come, for what tables do between two batches."""
        live = self._assigner.live
        for one in live:  # a file that no manifest names soon after it was written is taken for garbage
            if any(table.in_flight or table.crowded for table in self._parts[one].tables.values()):
                self.open(one)
        for one in self._announced:  # what was read ahead for nothing goes when the batch ends
            if one in self._parts:
                self.open(one)
        self._announced.clear()
        for number in range(min(_TENDED, len(live))):  # by turns, so that all give memory back, and begin to write
            self.open(live[(self._version * _TENDED + number) % len(live)])

    def closes(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """When the watermark closes what has these times."""
        return times if self._windows is None else times + self._windows.size

    def on_time(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these times are not late."""
        return self.closes(times) > self._late

    @property
    def closing_times(self) -> tuple[int, int]:
        """The first and the last time that this batch's watermark closes, and none before did."""
        size = 0 if self._windows is None else self._windows.size
        return self._late - size + 1, self._closed - size

    def closing_now(self, times: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these times this batch's watermark closes, and none before did."""
        first, last = self.closing_times
        return (times >= first) & (times <= last)

    def passes(self, rows: int) -> int:
        """In how many passes over ranges of the hash to work through a batch of so many rows.

        They are expected to go where those of the last batch went, or, if there was none, anywhere.
        """
        total = sum(self._given_before.values())
        shares = {one: count / total for one, count in self._given_before.items()} or dict.fromkeys(self._parts, 1.0)
        live = [(self._parts[one].table, share) for one, share in shares.items() if one in self._parts]
        return max((table.passes(math.ceil(rows * share)) for table, share in live), default=1)

    def narrow(self, range_: HashRange) -> None:
        """Until the next call, or the next batch, all rows will have hashes of this range."""
        self._narrowed = range_

    def divide(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> Iterator[tuple[P, pa.RecordBatch]]:
        """The rows of a batch by the part that they belong to, given their times."""
        for one, rows in self._assigner.divide(times):
            part = self.open(one)
            if one not in self._given:
                _set_resting(part, False)
                self._given[one] = 0
            if self._narrowed is not None and self._ranges.get(one) != self._narrowed:
                self._ranges[one] = self._narrowed
                part.table.narrow(self._narrowed)  # what no rows come to stays as it is
            self._given[one] += len(times) if rows is None else len(rows)
            yield part, batch if rows is None else batch.take(pa.array(rows))

    def announced(self, times: NDArray[np.int64]) -> Iterator[tuple[P, NDArray[np.int64]]]:
        """The parts that rows with some times will ask for something, with the positions of their times.

        Late rows will ask for nothing, nor will those of which there is no part yet.
        """
        on_time = np.flatnonzero(self.on_time(times))
        for one, rows in self._assigner.known(times[on_time]):
            self._announced.add(one)
            yield self._parts[one], on_time[rows]

    @property
    def live(self) -> Mapping[TimeSlice, P]:
        """The parts that there are."""
        return self._parts

    def open(self, one: TimeSlice) -> P:
        """The part of a slice, made if there is none; the running batch has to do with it."""
        part = self.begun.get(one)
        if part is None:
            part = self._parts.get(one)
            if part is None:
                part = self._parts[one] = self._make(SLICE + one.name)
            self.begun[one] = part
            part.begin(self._version)
        return part

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: forget what is over, seal what the batch has changed of the rest."""
        until = self._closed
        if self._windows is not None:  # slices hold the beginnings of windows; one that begins here closes then
            slide, origin = self._windows.slide, self._windows.offset
            until = (self._closed - self._windows.size - origin) // slide * slide + origin + slide - 1
        if self._closed > self._late:
            # What is kept by pane is read when the first window of a pane closes, and dropped with the last.
            ahead = self._reach
            if self._windows is not None and self._windows.shared:
                ahead = self._windows.size - self._windows.slide
            self.closing = {one: part for one, part in self._parts.items() if one.low <= until + ahead}
        self.over = {one: self._parts.pop(one) for one in self._assigner.drop(until)}
        sealed: dict[str, TableDelta] = {}
        if self._given:  # the next batch's rows will come where this one's came, mostly
            for one, part in (self._parts | self.over).items():
                _set_resting(part, one not in self._given or one in self.over)
        for one, part in self.begun.items():
            if one not in self.over:
                sealed |= {name: delta for name, delta in part.seal().items() if delta.rows}
        return sealed

    def close(self) -> None:
        """Give all memory back."""
        for part in (*self._parts.values(), *self.over.values()):
            part.close()


def _set_resting(part: SliceState, resting: bool) -> None:
    for table in part.tables.values():
        table.rest(resting)


class UnslicedState(Generic[P]):
    """The state of an operator that has nothing to do with event time: one part, used like `SlicedState`.

    Attributes:
        part: it.
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
        """In how many passes over ranges of the hash to work through a batch of so many rows."""
        return self.part.table.passes(rows)

    def narrow(self, range_: HashRange) -> None:
        """Until the next call, or the next batch, all rows will have hashes of this range."""
        self.part.table.narrow(range_)

    def divide(self, batch: pa.RecordBatch, times: NDArray[np.int64]) -> Iterator[tuple[P, pa.RecordBatch]]:
        """The part that all rows belong to."""
        yield self.part, batch

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: seal all tables."""
        return self.part.seal()

    def close(self) -> None:
        """Give all memory back."""
        self.part.close()


def times_of(array: pa.Array, dtype: DataType) -> NDArray[np.int64]:
    """The times in a column of event time, in microseconds; `NEVER` for nulls. For a window, that of its end."""
    array = plain(array)
    valid = validity(array)
    while dtype.name == "struct":
        dtype = dtype.fields[-1][1]
        array = plain(array.field(array.type.num_fields - 1))
        inner = validity(array)
        valid = valid & inner if valid.size and inner.size else valid if valid.size else inner
    times = numbers(array, dtype)
    return np.where(valid.astype(np.bool_), times, NEVER) if valid.size else times

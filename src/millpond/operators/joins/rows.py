"""The rows of a join's sides: encoding input columns as state, and decoding state into output columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.ordered.order import MATCHED
from millpond.layout import LENGTH, META, NEVER, Column, RowLayout, Rows, TableSchema
from millpond.operators.columns.decode import key_column, to_arrow
from millpond.operators.columns.encode import (
    ALL,
    Place,
    flatten_all,
    hashes_of,
    key_rows,
    plain,
    put_columns,
    validity,
)
from millpond.operators.event_time_slices import times_of
from millpond.operators.protocol import StateTable
from millpond.spec.kinds.join import FROM_TIME, JoinSide, JoinSpec
from millpond.spec.operators import Field
from millpond.spec.types import DataType, leaves, parse_type
from millpond.stores.ordered.layout import NUMBER, TIME, ordered_schema
from millpond.stores.ordered.parts import BEGINNING

LEFT, RIGHT = "left", "right"
"""The names of the tables of the sides."""

_LONG = DataType("bigint")


def has_matched_bit(spec: JoinSpec, side: str) -> bool:
    """Return whether rows of a side have a matched bit."""
    if spec.kind == "left_semi":
        return side == LEFT
    return (spec.left if side == LEFT else spec.right).keeps


def side_schema(spec: JoinSpec, side: str) -> TableSchema:
    """Return the schema of a side's table."""
    values = (spec.left if side == LEFT else spec.right).values
    return ordered_schema(_stored("k", spec.keys), _stored("v", values), marked=has_matched_bit(spec, side))


def side_table(spec: JoinSpec, side: str) -> StateTable:
    """Return a side's table."""
    drop_matched = spec.kind == "left_semi" and side == LEFT
    return StateTable(side_schema(spec, side), np.zeros(0, np.uint64), kind="ordered", drop_matched=drop_matched)


def read_side(spec: JoinSpec, name: str, rows: Rows) -> pa.RecordBatch:
    """Decode rows of a side's table for a user."""
    side, count = SideRows.of(spec, name), rows.count
    times_ = rows.ints(side.time)
    timed = times_ != NEVER
    matched = pa.array(rows.words[:, META] & np.uint64(MATCHED) != 0)
    columns = [
        pa.array([name] * count, pa.string()),
        matched if has_matched_bit(spec, name) else pa.nulls(count, pa.bool_()),
        to_arrow(np.where(timed, times_, 0), timed.view(np.uint8), DataType("timestamp")),
        *(key_column(rows, iter(side.key_places[number]), dtype) for number, dtype in enumerate(side.key_types)),
    ]
    for which, fields in ((LEFT, spec.left.values), (RIGHT, spec.right.values)):
        if which == name:
            columns += [side.value(rows, number) for number in range(len(fields))]
        else:
            columns += [pa.nulls(count, parse_type(field.type).arrow) for field in fields]
    return pa.RecordBatch.from_arrays(columns, names=[field.name for field in spec.state_fields])


def _stored(letter: str, fields: Sequence[Field]) -> list[Column]:
    return [
        Column(f"{letter}{number}.{part}", leaf.kind)
        for number, field in enumerate(fields)
        for part, leaf in enumerate(leaves(parse_type(field.type)))
    ]


@dataclass(frozen=True)
class SideRows:
    """The encoding of one side's rows.

    Attributes:
        side: the side of the join.
        layout: the layout of its table's rows.
        keys: the position of the first key among the input columns.
        first: the position of the side's first value among the input columns.
        key_types: the types of the keys.
        value_types: the types of the side's values.
        key_places: the places of each key's flattened columns.
        value_places: the places of each value's flattened columns.
        time: the offset of the row's time.
        null_rejecting: the keys in which a null means that the row finds no partner.
    """

    side: JoinSide
    layout: RowLayout
    keys: int
    first: int
    key_types: tuple[DataType, ...]
    value_types: tuple[DataType, ...]
    key_places: tuple[tuple[Place, ...], ...]
    value_places: tuple[tuple[Place, ...], ...]
    time: int
    null_rejecting: tuple[int, ...]

    @staticmethod
    def of(spec: JoinSpec, name: str) -> SideRows:
        """Return the encoding of one side of a join."""
        side = spec.left if name == LEFT else spec.right
        layout = RowLayout(side_schema(spec, name))
        stored = layout.schema.keys + layout.schema.values
        places = [Place.of(offset, index) for index, offset in enumerate(layout.offsets)]
        by_name = {column.name: place for column, place in zip(stored, places, strict=True)}
        remaining = [place for column, place in zip(stored, places, strict=True) if column.name not in (TIME, NUMBER)]

        def take(types: Sequence[DataType]) -> tuple[tuple[Place, ...], ...]:
            return tuple(tuple(remaining.pop(0) for _ in leaves(dtype)) for dtype in types)

        key_types = tuple(parse_type(field.type) for field in spec.keys)
        value_types = tuple(parse_type(field.type) for field in side.values)
        key_places = take(key_types)
        keys = 1 + len(spec.header)
        return SideRows(
            side,
            layout,
            keys,
            keys + len(spec.keys) + (0 if name == LEFT else len(spec.left.values)),
            key_types,
            value_types,
            key_places,
            take(value_types),
            by_name[TIME].offset,
            tuple(number for number, safe in enumerate(spec.null_safe) if not safe),
        )

    def encode(self, batch: pa.RecordBatch) -> tuple[Rows, NDArray[np.int64]]:
        """Encode rows of the side, without their times, and return the times beside."""
        _check_times(batch.column("__time"))
        columns = batch.columns
        key_leaves = flatten_all(columns[self.keys : self.keys + len(self.key_types)], self.key_types)
        value_leaves = flatten_all(columns[self.first : self.first + len(self.value_types)], self.value_types)
        places = [place for places in self.key_places for place in places]
        rows = key_rows(hashes_of(batch), key_leaves, places, self.layout.width)
        places = [place for places in self.value_places for place in places]
        # Values keep their bits, since output rows must equal input rows; only keys are normalised.
        heap = put_columns(rows.words, value_leaves, places, rows.heap)
        return Rows(rows.words, heap), times(batch.column("__time"))

    def can_match(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the rows that can find a partner."""
        able = np.ones(batch.num_rows, np.bool_)
        if self.side.filtered:
            flags = plain(batch.column("__able"))
            able &= np.asarray(flags.fill_null(False))
        return able

    def has_null_key(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the rows with a null in a key where null equals nothing."""
        null = np.zeros(batch.num_rows, np.bool_)
        for number in self.null_rejecting:
            valid = validity(plain(batch.column(self.keys + number)))
            if valid.size:
                null |= valid == 0
        return null

    def columns_of_input(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Build the side's output columns from rows of the input."""
        columns = []
        for place, field in zip(self.side.places, self.side.columns, strict=True):
            if place == FROM_TIME:
                columns.append(plain(batch.column("__time")).cast(parse_type(field.type).arrow))
            else:
                columns.append(plain(batch.column(self.first + place if place >= 0 else self.keys - 1 - place)))
        return columns

    def columns(self, rows: Rows) -> list[pa.Array]:
        """Decode the side's output columns."""
        return [
            self._column(rows, place, field) for place, field in zip(self.side.places, self.side.columns, strict=True)
        ]

    def pieces(self, rows: Rows, max_bytes: int) -> Iterator[Rows]:
        """Yield rows of the side in pieces with at most `max_bytes` of byte strings each, or of a single row."""
        lengths = rows.words[:, list(self.layout.bytes_columns)] & LENGTH
        ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
        start = 0
        while start < rows.count:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + max_bytes, "right")))
            yield rows.take(slice(start, stop))
            start = stop

    def nulls(self, count: int) -> list[pa.Array]:
        """Return the side's output columns for rows without a partner."""
        return [pa.nulls(count, parse_type(field.type).arrow) for field in self.side.columns]

    def value(self, rows: Rows, number: int) -> pa.Array:
        """Decode one stored value."""
        return key_column(rows, iter(self.value_places[number]), self.value_types[number])

    def _column(self, rows: Rows, place: int, field: Field) -> pa.Array:
        if place == FROM_TIME:
            times_ = rows.ints(self.time)
            valid = times_ != NEVER
            if valid.all():
                return to_arrow(times_, ALL, parse_type(field.type))
            return to_arrow(np.where(valid, times_, 0), valid.view(np.uint8), parse_type(field.type))
        if place >= 0:
            return self.value(rows, place)
        return key_column(rows, iter(self.key_places[-1 - place]), self.key_types[-1 - place])


def times(column: pa.Array) -> NDArray[np.int64]:
    """Return a column of times in microseconds; `NEVER` where it is null."""
    return times_of(column, _LONG)


def _check_times(column: pa.Array) -> None:
    """Check that no row has a time that the state reserves: `BEGINNING` (before all times) or `NEVER` (no time).

    Args:
        column: times in microseconds.

    Raises:
        UsageError: a row has the minimum or the maximum of timestamps.
    """
    extremes = pc.min_max(column).as_py()
    for name, extreme, reserved in (("minimum", extremes["min"], BEGINNING), ("maximum", extremes["max"], NEVER)):
        if extreme == reserved:
            raise UsageError(
                f"A row of a join of streams has the {name} of timestamps as its time ({reserved} µs).",
                action="Give such rows another time before the join, for example one in the year 9999.",
            )

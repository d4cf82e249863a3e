"""The rows of a join's sides: from the pipe's columns into the state, and from the state into the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.ordered.order import MATCHED
from millpond.layout import META, NEVER, Column, RowLayout, Rows, TableSchema
from millpond.operators.columns.decode import ints, key_column, to_arrow
from millpond.operators.columns.encode import (
    ALL,
    Place,
    flatten,
    hashes_of,
    key_rows,
    numbers,
    plain,
    put_columns,
    validity,
)
from millpond.operators.protocol import StateTable
from millpond.spec.kinds.join import FROM_TIME, JoinSide, JoinSpec
from millpond.spec.operators import Field
from millpond.spec.types import DataType, leaves, parse_type
from millpond.stores.ordered.layout import NUMBER, TIME, ordered_schema

LEFT, RIGHT = "left", "right"
"""The names of the tables of the sides."""

_LONG = DataType("bigint")


def is_marked(spec: JoinSpec, side: str) -> bool:
    """Whether rows of a side are remembered to have found a partner."""
    if spec.kind == "left_semi":
        return side == LEFT
    return (spec.left if side == LEFT else spec.right).keeps


def side_schema(spec: JoinSpec, side: str) -> TableSchema:
    """The schema of a side's table."""
    values = (spec.left if side == LEFT else spec.right).values
    return ordered_schema(_stored("k", spec.keys), _stored("v", values), marked=is_marked(spec, side))


def side_table(spec: JoinSpec, side: str) -> StateTable:
    """A side's table."""
    drop_matched = spec.kind == "left_semi" and side == LEFT
    return StateTable(side_schema(spec, side), np.zeros(0, np.uint64), kind="ordered", drop_matched=drop_matched)


def read_side(spec: JoinSpec, name: str, rows: Rows) -> pa.RecordBatch:
    """Rows of a side's table as a user reads them."""
    side, count = SideRows.of(spec, name), rows.count
    at = ints(rows, side.time)
    timed = at != NEVER
    matched = pa.array(rows.words[:, META] & np.uint64(MATCHED) != 0)
    columns = [
        pa.array([name] * count, pa.string()),
        matched if is_marked(spec, name) else pa.nulls(count, pa.bool_()),
        to_arrow(np.where(timed, at, 0), timed.view(np.uint8), DataType("timestamp")),
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
    """How one side's rows are made and read.

    Attributes:
        side: the side. layout: of its table's rows.
        first: the first of its values among the pipe's columns; keys: the first key column.
        null_free: the keys in which a null means that the row finds no partner.
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
    null_free: tuple[int, ...]

    @staticmethod
    def of(spec: JoinSpec, name: str) -> SideRows:
        """One side of a join."""
        side = spec.left if name == LEFT else spec.right
        layout = RowLayout(side_schema(spec, name))
        stored = layout.schema.keys + layout.schema.values
        places = [Place.of(offset, index) for index, offset in enumerate(layout.offsets)]
        own = {column.name: place for column, place in zip(stored, places, strict=True)}
        rest = [place for column, place in zip(stored, places, strict=True) if column.name not in (TIME, NUMBER)]

        def take(types: Sequence[DataType]) -> tuple[tuple[Place, ...], ...]:
            return tuple(tuple(rest.pop(0) for _ in leaves(dtype)) for dtype in types)

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
            own[TIME].offset,
            tuple(number for number, safe in enumerate(spec.null_safe) if not safe),
        )

    def encode(self, batch: pa.RecordBatch) -> tuple[Rows, NDArray[np.int64]]:
        """Rows of the side, without their times, and the times."""
        key_leaves = [
            leaf
            for number, dtype in enumerate(self.key_types)
            for leaf in flatten(batch.column(self.keys + number), dtype)
        ]
        value_leaves = [
            leaf
            for number, dtype in enumerate(self.value_types)
            for leaf in flatten(batch.column(self.first + number), dtype)
        ]
        places = [place for places in self.key_places for place in places]
        rows = key_rows(hashes_of(batch), key_leaves, places, self.layout.width)
        places = [place for places in self.value_places for place in places]
        heap = put_columns(rows.words, value_leaves, places, rows.heap)
        return Rows(rows.words, heap), times(batch.column("__time"))

    def able(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows can find a partner."""
        able = np.ones(batch.num_rows, np.bool_)
        if self.side.filtered:
            flags = plain(batch.column("__able"))
            able &= np.asarray(flags.fill_null(False))
        return able

    def has_null_key(self, batch: pa.RecordBatch) -> NDArray[np.bool_]:
        """Which rows have a null in a key where null equals nothing."""
        null = np.zeros(batch.num_rows, np.bool_)
        for number in self.null_free:
            valid = validity(plain(batch.column(self.keys + number)))
            if valid.size:
                null |= valid == 0
        return null

    def of_input(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The side's output columns of rows of the input."""
        columns = []
        for place, field in zip(self.side.places, self.side.columns, strict=True):
            if place == FROM_TIME:
                at = times(batch.column("__time"))
                valid = (at != NEVER).view(np.uint8)
                columns.append(to_arrow(np.where(at == NEVER, 0, at), valid, parse_type(field.type)))
            else:
                columns.append(plain(batch.column(self.first + place if place >= 0 else self.keys - 1 - place)))
        return columns

    def columns(self, rows: Rows) -> list[pa.Array]:
        """The side's output columns."""
        return [
            self._column(rows, place, field) for place, field in zip(self.side.places, self.side.columns, strict=True)
        ]

    def nulls(self, count: int) -> list[pa.Array]:
        """The side's output columns where there is no row."""
        return [pa.nulls(count, parse_type(field.type).arrow) for field in self.side.columns]

    def value(self, rows: Rows, number: int) -> pa.Array:
        """One stored value."""
        return key_column(rows, iter(self.value_places[number]), self.value_types[number])

    def _column(self, rows: Rows, place: int, field: Field) -> pa.Array:
        if place == FROM_TIME:
            at = ints(rows, self.time)
            valid = at != NEVER
            if valid.all():
                return to_arrow(at, ALL, parse_type(field.type))
            return to_arrow(np.where(valid, at, 0), valid.view(np.uint8), parse_type(field.type))
        if place >= 0:
            return self.value(rows, place)
        return key_column(rows, iter(self.key_places[-1 - place]), self.key_types[-1 - place])


def times(column: pa.Array) -> NDArray[np.int64]:
    """A column of times in microseconds; `NEVER` where it is null."""
    array = plain(column)
    values = numbers(array, _LONG)
    valid = validity(array)
    return np.where(valid != 0, values, NEVER) if valid.size else values

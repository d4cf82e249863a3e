"""Tables of typed keys and values: their schemas, the places of their columns, and their rows as Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.layout import Column, RowLayout, Rows, TableSchema, Words
from millpond.operators.columns.decode import OversizeError, key_columns, to_arrow
from millpond.operators.columns.encode import ALL, Leaf, Place, flatten_all, hashes_of, key_rows
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.protocol import StateTable
from millpond.spec.operators import Field
from millpond.spec.types import DataType, leaves, parse_type


@dataclass(frozen=True)
class Keyed:
    """A table's schema with the types of its keys.

    Attributes:
        fields: the key columns before flattening.
        layout: the layout of the table.
        initial: the words of a fresh row.
        keys: the places of the key columns.
        values: the places of the value columns.
        window: for a table of sessions, the type of their windows. Then the last key column is an ordinal, and the
            values begin with the window's start and end.
    """

    fields: tuple[Field, ...]
    layout: RowLayout
    initial: Words
    keys: tuple[Place, ...]
    values: tuple[Place, ...]
    window: DataType | None = None

    @property
    def types(self) -> tuple[DataType, ...]:
        """The types of the key columns."""
        return tuple(parse_type(field.type) for field in self.fields)

    def encode(
        self, batch: pa.RecordBatch, positions: Iterable[int], converted: Callable[[Leaf], Leaf] | None = None
    ) -> Rows:
        """Encode the keys of a batch as rows of the table, up to the last key column.

        Args:
            batch: the column `__hash`, then others.
            positions: the positions of the key columns, not counting `__hash`. The ordinal of a session is not in the
                batch, so it has none.
            converted: see `encode_columns`.
        """
        columns = [batch.column(1 + position) for position in positions]
        return self.encode_columns(hashes_of(batch), columns, converted)

    def encode_columns(
        self,
        hashes: NDArray[np.int64],
        columns: Sequence[pa.Array],
        converted: Callable[[Leaf], Leaf] | None = None,
    ) -> Rows:
        """Encode keys as rows of the table, up to the last key column.

        Args:
            hashes: int64[n], the 64-bit hashes of the keys.
            columns: the key columns, without the ordinals of sessions.
            converted: changes each flattened column; without it, floats are normalised as Spark groups them.
        """
        leaves = flatten_all(columns, self.types[: len(columns)])
        if converted is not None:
            leaves = list(map(converted, leaves))
        return key_rows(hashes, leaves, self.keys[: len(leaves)], self.layout.key_stop)

    @property
    def state(self) -> StateTable:
        """The table as a part of an operator's state."""
        return StateTable(self.layout.schema, self.initial)


def keyed(fields: Sequence[Field], columns: Sequence[tuple[Column, bool]], window: DataType | None = None) -> Keyed:
    """Lay out a table with these keys and value columns, each with whether a fresh row has null there."""
    keys = []
    for position, field in enumerate(fields):
        for part, leaf in enumerate(leaves(parse_type(field.type))):
            keys.append(Column(f"{position}.{part}", leaf.kind))
    values = tuple(Column(column.name, column.kind, null) for column, null in columns)
    layout = RowLayout(TableSchema(tuple(keys), values))
    places = [Place.of(offset, index) for index, offset in enumerate(layout.offsets)]
    initial: Words = np.zeros(layout.width, dtype=np.uint64)
    for (_, null), place in zip(columns, places[len(keys) :], strict=True):
        if null:
            # As in SQL, a sum or an extreme is null until the first value that is not.
            initial[place.null_word] |= place.null_bit
    return Keyed(tuple(fields), layout, initial, tuple(places[: len(keys)]), tuple(places[len(keys) :]), window)


def decode_rows(
    table: Keyed, calls: Sequence[Accumulator], fields: Sequence[Field], rows: Rows
) -> Iterator[pa.RecordBatch]:
    """Decode keys and results of rows as Arrow.

    Args:
        table: the layout of the rows.
        calls: the accumulators of the results.
        fields: the output columns, keys first.
        rows: the rows.

    Yields:
        One batch, or several where a column exceeds Arrow's 32-bit offsets.

    Raises:
        UsageError: the results of one row exceed these offsets.
    """
    try:
        if table.window is None:
            columns = key_columns(rows, table.keys, table.types)
        else:
            columns = key_columns(rows, table.keys[:-1], table.types[:-1])
            bounds = [rows.ints(table.values[bound].offset) for bound in (0, 1)]
            children = [
                to_arrow(values, ALL, inner) for values, (_, inner) in zip(bounds, table.window.fields, strict=True)
            ]
            columns.append(pa.Array.from_buffers(table.window.arrow, rows.count, [None], children=children))
        columns += [call.result(rows) for call in calls]
    except OversizeError as error:
        if rows.count < 2:
            raise UsageError(
                "The results of one group take more than 2 GiB, which is more than an Arrow column holds.",
                action="Group by more columns, or collect less of each row.",
            ) from error
        for half in rows.halves():
            yield from decode_rows(table, calls, fields, half)
        return
    if columns:
        yield pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])

"""The column order of rows that wait for a processor: those of the key first."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millpond.operators.processors.input import Group, Pieces
from millpond.spec.operators import Field


class ColumnOrder:
    """The mapping between the columns of rows as they come and as they are kept.

    Args:
        columns: the columns of the rows.
        keys: positions of the key's columns.

    Attributes:
        keys: the key columns.
        others: the other columns, which follow those of the key.
        order: the positions of the kept columns in a batch that begins with the hash, which stays first.
    """

    def __init__(self, columns: Sequence[Field], keys: Sequence[int]) -> None:
        others = [position for position in range(len(columns)) if position not in keys]
        self._places = {position: number for number, position in enumerate((*keys, *others))}
        self._names = [field.name for field in columns]
        self.keys = tuple(columns[position] for position in keys)
        self.others = tuple(columns[position] for position in others)
        self.order = [0, *(1 + position for position in (*keys, *others))]

    def rows(self, group: Group) -> pa.RecordBatch:
        """Return the rows of keys with their columns in the original order."""
        return self._in_original_order(group.rows)

    def piece(self, pieces: Pieces, number: int) -> pa.StructArray:
        """Return a piece of a key's rows with their columns in the original order."""
        return self._in_original_order(pieces.batch(number).columns[1:]).to_struct_array()

    def _in_original_order(self, rows: Sequence[pa.Array]) -> pa.RecordBatch:
        columns = [rows[self._places[position]] for position in range(len(self._names))]
        return pa.RecordBatch.from_arrays(columns, names=self._names)

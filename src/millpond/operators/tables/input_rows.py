"""Storage of the rows of an aggregate's input until their window or session closes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from millpond.layout import HASH, Column, RowLayout, Rows, TableSchema, Words
from millpond.operators.columns.decode import key_columns
from millpond.operators.columns.encode import Leaf, Place, bitwise_leaf, flatten, hashes_of, key_rows
from millpond.spec.operators import Field
from millpond.spec.types import leaves, parse_type


class StoredRows:
    """The encoding of an aggregate's input rows: the key, then the inputs bit by bit.

    Args:
        keys: the key columns.
        inputs: the input columns.

    Attributes:
        layout: the layout of the rows.
        fields: the columns, keys first.
    """

    def __init__(self, keys: Sequence[Field], inputs: Sequence[Field]) -> None:
        self.fields: tuple[Field, ...] = (*keys, *inputs)
        self._types = [parse_type(field.type) for field in self.fields]
        self._keys = len(keys)
        columns = [
            [Column(f"{number}.{part}", leaf.kind) for part, leaf in enumerate(leaves(dtype))]
            for number, dtype in enumerate(self._types)
        ]
        flat_keys = tuple(column for parts in columns[: self._keys] for column in parts)
        values = tuple(column for parts in columns[self._keys :] for column in parts)
        self.layout = RowLayout(TableSchema(flat_keys, values))
        self._places = [Place.of(offset, index) for index, offset in enumerate(self.layout.offsets)]

    @property
    def initial(self) -> Words:
        """The words of a fresh row; the table never creates one."""
        return np.zeros(self.layout.width, np.uint64)

    def encode(self, batch: pa.RecordBatch) -> Rows:
        """Encode the rows of a batch: the column `__hash`, then keys and inputs."""
        parts: list[Leaf] = []
        for number, dtype in enumerate(self._types):
            flat = flatten(batch.column(1 + number), dtype)
            # Keys are normalised, because they are compared; inputs come back bit by bit.
            parts += flat if number < self._keys else [bitwise_leaf(leaf) for leaf in flat]
        return key_rows(hashes_of(batch), parts, self._places, self.layout.width)

    def inputs(self, rows: Rows) -> list[pa.Array]:
        """Decode the inputs alone."""
        flat = len(self.layout.schema.keys)
        return key_columns(rows, self._places[flat:], self._types[self._keys :])

    def decode(self, rows: Rows) -> pa.RecordBatch:
        """Decode rows into the batch that they were made from."""
        columns = [pa.array(rows.ints(HASH))]
        columns += key_columns(rows, self._places, self._types)
        return pa.RecordBatch.from_arrays(columns, names=["__hash", *(field.name for field in self.fields)])

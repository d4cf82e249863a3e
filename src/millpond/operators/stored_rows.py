"""How the rows of an aggregate's input are stored until their window closes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from millpond.layout import HASH, Column, RowLayout, Rows, TableSchema, Words
from millpond.operators.decode import key_columns
from millpond.operators.encode import Leaf, Place, flatten, hashes_of, key_rows, numbers
from millpond.operators.spec import AggregateSpec, Field, key_fields
from millpond.operators.types import DataType, leaves, parse_type

_BITS = DataType("bigint")


class StoredRows:
    """How the rows of an aggregate's input are stored: the key, then the inputs as they are.

    Attributes:
        layout: of the rows. fields: the columns, keys first.
    """

    def __init__(self, spec: AggregateSpec) -> None:
        keys = key_fields(spec)
        self.fields: tuple[Field, ...] = keys + spec.inputs
        self._types = [parse_type(field.type) for field in self.fields]
        self._keys = len(keys)
        columns = [
            [Column(f"{number}.{part}", leaf.kind) for part, leaf in enumerate(leaves(dtype))]
            for number, dtype in enumerate(self._types)
        ]
        flat_keys = tuple(column for each in columns[: self._keys] for column in each)
        values = tuple(column for each in columns[self._keys :] for column in each)
        self.layout = RowLayout(TableSchema(flat_keys, values))
        self._places = [Place.of(offset, index) for index, offset in enumerate(self.layout.offsets)]

    @property
    def initial(self) -> Words:
        """The words of a fresh row, of which there are none."""
        return np.zeros(self.layout.width, np.uint64)

    def encode(self, batch: pa.RecordBatch) -> Rows:
        """The rows of a batch: the column `__hash`, then keys and inputs."""
        parts: list[Leaf] = []
        for number, dtype in enumerate(self._types):
            flat = flatten(batch.column(1 + number), dtype)
            parts += flat if number < self._keys else [_as_it_is(leaf) for leaf in flat]
        return key_rows(hashes_of(batch), parts, self._places, self.layout.width)

    def decode(self, rows: Rows) -> pa.RecordBatch:
        """The batch that rows were made from."""
        columns = [pa.array(np.ascontiguousarray(rows.words[:, HASH]).view(np.int64))]
        columns += key_columns(rows, self._places, self._types)
        return pa.RecordBatch.from_arrays(columns, names=["__hash", *(field.name for field in self.fields)])


def _as_it_is(leaf: Leaf) -> Leaf:
    """An input column such that its values are not normalised as keys are."""
    if leaf.array is None or leaf.dtype.machine != "float":
        return leaf
    bits = np.ascontiguousarray(numbers(leaf.array, leaf.dtype)).view(np.int64)
    return Leaf(pa.array(bits), _BITS, leaf.valid)

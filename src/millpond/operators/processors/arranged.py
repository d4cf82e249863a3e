"""How the columns of rows lie that wait for a processor: those of the key first."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millpond.operators.processors.input import Group, Pieces
from millpond.spec.operators import Field


class Arranged:
    """Where columns go, and where they are found again.

    Args:
        columns: of the rows. keys: positions of those that make up the key.

    Attributes:
        keys, others: the columns as they are kept.
        order: positions of those in a batch that begins with the hash, which goes first here, too.
    """

    def __init__(self, columns: Sequence[Field], keys: Sequence[int]) -> None:
        others = [at for at in range(len(columns)) if at not in keys]
        self._places = {at: number for number, at in enumerate((*keys, *others))}
        self._names = [field.name for field in columns]
        self.keys = tuple(columns[at] for at in keys)
        self.others = tuple(columns[at] for at in others)
        self.order = [0, *(1 + at for at in (*keys, *others))]

    def rows(self, group: Group) -> pa.RecordBatch:
        """The rows of some keys, their columns where they came from."""
        return self._back(group.rows)

    def piece(self, pieces: Pieces, number: int) -> pa.StructArray:
        """A piece of the rows of a key, their columns where they came from."""
        return self._back(pieces.batch(number).columns[1:]).to_struct_array()

    def _back(self, rows: Sequence[pa.Array]) -> pa.RecordBatch:
        columns = [rows[self._places[at]] for at in range(len(self._names))]
        return pa.RecordBatch.from_arrays(columns, names=self._names)

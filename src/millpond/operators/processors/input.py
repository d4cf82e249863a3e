"""The rows of a batch, put together by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HashRange, Ints
from millpond.operators.columns.encode import Leaf, flatten, hashes_of, key_rows, portions
from millpond.operators.hash_ranges import key_groups
from millpond.operators.protocol import MakeTable
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import keyed
from millpond.spec.operators import Field
from millpond.stores.aligned.hash_intervals import gradually

KEYS = 8192
"""Keys that are worked on together, at most."""
_BYTES = 8 << 20
"""Bytes of rows that are worked on together, roughly, unless they are of one key."""


class Group(NamedTuple):
    """The rows of some keys.

    Attributes:
        hashes: of the keys, each once. keys: their columns, as the first row of each has them.
        counts: how many rows each has.
        rows: the columns of the rows, key after key, in the order in which they came.
    """

    hashes: Ints
    keys: list[pa.Array]
    counts: Ints
    rows: list[pa.Array]

    def cut(self, start: int, stop: int) -> Group:
        """Some of the keys, by their positions."""
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        keys, rows = [one[start:stop] for one in self.keys], [one[ends[start] : ends[stop]] for one in self.rows]
        return Group(self.hashes[start:stop], keys, self.counts[start:stop], rows)


class Input:
    """The rows that one batch has for a processor, or timers that are due: kept until all are there.

    Args:
        keys, others: columns of the rows. make_table: opens tables that live for a moment.
        compared: what a column of keys becomes, so that those are the same whose rows belong together.
        name: unlike that of others that are there at the same time.
    """

    def __init__(
        self,
        keys: tuple[Field, ...],
        others: tuple[Field, ...],
        make_table: MakeTable,
        compared: Callable[[Leaf], Leaf],
        name: str = "input",
    ) -> None:
        self._stored = StoredRows((), (*keys, *others))
        self._compared = compared
        self._distinct = keyed(keys, [])
        self._keys = len(keys)
        self._make_table = make_table
        self._table = make_table(name, self._stored.layout.schema, self._stored.initial, kind="spool")

    @property
    def rows(self) -> int:
        """How many there are."""
        return self._table.rows

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows: the column `__hash`, then keys and others."""
        for portion in portions(batch, self._table.portion, self._table.ahead):
            self._table.append(self._stored.encode(portion))

    def groups(self) -> Iterator[Group]:
        """All rows, in the order of their keys' hashes."""
        for rows in gradually([self._table.readable()], self._stored.layout, max(1, self._table.portion // 2)):
            yield from self._grouped(self._stored.decode(rows), key_groups(rows))

    def _grouped(self, batch: pa.RecordBatch, range_: HashRange) -> Iterator[Group]:
        numbers = self._numbers(batch, range_)
        if (np.diff(numbers) < 0).any():  # rows of different keys with one hash
            order = np.argsort(numbers, kind="stable")
            batch, numbers = batch.take(pa.array(order)), numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        ends = np.append(starts[1:], batch.num_rows)
        most = max(1, _BYTES * batch.num_rows // max(1, batch.nbytes))
        at = 0
        while at < len(starts):
            until = int(np.searchsorted(ends, starts[at] + most, "right"))
            until = max(at + 1, min(until, at + KEYS))
            some = batch.slice(starts[at], ends[until - 1] - starts[at])
            firsts = starts[at:until] - starts[at]
            heads = some.take(pa.array(firsts))
            keys = heads.columns[1 : 1 + self._keys]
            yield Group(hashes_of(heads), keys, ends[at:until] - starts[at:until], some.columns[1:])
            at = until

    def _numbers(self, batch: pa.RecordBatch, range_: HashRange) -> NDArray[np.int64]:
        """A number for each row, the same for rows of one key, growing with the first rows of keys."""
        table = self._make_table("keys", self._distinct.layout.schema, self._distinct.initial, kind="scratch")
        try:
            table.begin(0)
            table.narrow(range_)  # else they would crowd a part of the index
            table.expect(batch.num_rows)
            leaves = [
                self._compared(leaf)
                for column, dtype in zip(batch.columns[1 : 1 + self._keys], self._distinct.types, strict=True)
                for leaf in flatten(column, dtype)
            ]
            keys = key_rows(hashes_of(batch), leaves, self._distinct.keys, self._distinct.layout.key_stop)
            return table.upsert(keys, 0).rows
        finally:
            table.close()

    def close(self) -> None:
        """Give all memory back."""
        self._table.close()

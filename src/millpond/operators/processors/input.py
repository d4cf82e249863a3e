"""The rows of a batch, put together by key.

A key may have more rows than one table holds, or than should be in memory as columns: those come in **pieces**.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.layout import HASH, LENGTH, HashRange, Ints
from millpond.layout import Rows as RawRows
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
_WHOLE = 64 << 20
"""Bytes of rows of one key above which they come in pieces."""


class Group(NamedTuple):
    """The rows of some keys.

    Attributes:
        hashes: of the keys, each once. keys: their columns, as the first row of each has them.
        counts: how many rows each has.
        rows: the columns of the rows, key after key, in the order in which they came.
        pieces: where there is but one key, and `rows` has but the first of its rows: all of them.
    """

    hashes: Ints
    keys: list[pa.Array]
    counts: Ints
    rows: list[pa.Array]
    pieces: Pieces | None = None

    @property
    def last(self) -> pa.Array:
        """The last column of all rows."""
        return self.rows[-1] if self.pieces is None else self.pieces.last

    def cut(self, start: int, stop: int) -> Group:
        """Some of the keys, by their positions."""
        if self.pieces is not None:
            return self
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        keys, rows = [one[start:stop] for one in self.keys], [one[ends[start] : ends[stop]] for one in self.rows]
        return Group(self.hashes[start:stop], keys, self.counts[start:stop], rows)


class Pieces:
    """All rows of one key, of which few are columns at a time.

    Args:
        stored: how rows are stored. rows: those of the key.
    """

    def __init__(self, stored: StoredRows, rows: RawRows) -> None:
        self._stored = stored
        self._rows = rows
        self._ends = np.append(_starts(_sizes(stored, rows), _BYTES), rows.count)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self._rows.count

    def batch(self, number: int) -> pa.RecordBatch:
        """A piece: the column `__hash`, then those of the rows."""
        start, stop = self._ends[number : number + 2]
        return self._stored.decode(RawRows(self._rows.words[start:stop], self._rows.heap))

    @property
    def last(self) -> pa.Array:
        """The last column of all rows."""
        return pa.concat_arrays([self.batch(number).columns[-1] for number in range(len(self))])


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
            for some, heavy in self._parted(rows):
                yield from self._in_pieces(some) if heavy else self._together(some)

    def _parted(self, rows: RawRows) -> Iterator[tuple[RawRows, bool]]:
        """Rows in the order of hashes: those apart that are too many of one hash, and whether they are."""
        if rows.words.nbytes + rows.heap.nbytes <= _WHOLE:
            yield rows, False
            return
        hashes = rows.words[:, HASH]
        firsts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        sizes = np.add.reduceat(_sizes(self._stored, rows), firsts)
        heavy = sizes > _WHOLE
        at = np.flatnonzero(heavy)
        cuts = np.unique(np.concatenate([_starts(np.where(heavy, 0, sizes), _WHOLE), at, at + 1, [len(firsts)]]))
        ends = np.append(firsts, rows.count)
        for start, stop in pairwise(cuts.tolist()):
            yield RawRows(rows.words[ends[start] : ends[stop]], rows.heap), bool(heavy[start])

    def _in_pieces(self, rows: RawRows) -> Iterator[Group]:
        """Rows of one hash, which may be of several keys."""
        pieces = Pieces(self._stored, rows)
        with self._numbering(key_groups(rows)) as numbers_of:
            numbers = np.concatenate([numbers_of(pieces.batch(number)) for number in range(len(pieces))])
        distinct = np.unique(numbers)
        for number in distinct.tolist():
            own = pieces
            if len(distinct) > 1:
                own = Pieces(self._stored, RawRows(rows.words[numbers == number], rows.heap))
            first = own.batch(0)
            head = first.slice(0, 1)
            keys = head.columns[1 : 1 + self._keys]
            yield Group(hashes_of(head), keys, np.array([own.rows]), first.columns[1:], own if len(own) > 1 else None)

    def _together(self, rows: RawRows) -> Iterator[Group]:
        batch = self._stored.decode(rows)
        with self._numbering(key_groups(rows)) as numbers_of:
            numbers = numbers_of(batch)
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

    @contextmanager
    def _numbering(self, range_: HashRange) -> Iterator[Callable[[pa.RecordBatch], NDArray[np.int64]]]:
        """What gives each row of batches a number, the same for rows of one key, growing with the first rows of keys.

        Args:
            range_: that all hashes are in.
        """
        table = self._make_table("keys", self._distinct.layout.schema, self._distinct.initial, kind="scratch")

        def numbers(batch: pa.RecordBatch) -> NDArray[np.int64]:
            table.expect(batch.num_rows)
            leaves = [
                self._compared(leaf)
                for column, dtype in zip(batch.columns[1 : 1 + self._keys], self._distinct.types, strict=True)
                for leaf in flatten(column, dtype)
            ]
            keys = key_rows(hashes_of(batch), leaves, self._distinct.keys, self._distinct.layout.key_stop)
            return table.upsert(keys, 0).rows

        try:
            table.begin(0)
            table.narrow(range_)  # else they would crowd a part of the index
            yield numbers
        finally:
            table.close()

    def close(self) -> None:
        """Give all memory back."""
        self._table.close()


def _sizes(stored: StoredRows, rows: RawRows) -> Ints:
    """Bytes of each row, roughly."""
    sizes = np.full(rows.count, 8 * stored.layout.width, np.int64)
    for at in stored.layout.bytes_columns:
        sizes += (rows.words[:, at] & LENGTH).astype(np.int64)
    return sizes


def _starts(sizes: Ints, most: int) -> Ints:
    """Where to cut so that pieces are of some size, roughly."""
    before = np.cumsum(sizes) - sizes
    return np.flatnonzero(np.diff(before // most, prepend=-1))

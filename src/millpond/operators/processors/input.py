"""The rows of a batch, grouped by key.

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

from millpond.layout import HASH, LENGTH, HashRange, Ints, Rows
from millpond.operators.columns.encode import Leaf, hashes_of, portions
from millpond.operators.hash_ranges import key_groups
from millpond.operators.protocol import MakeTable
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import keyed
from millpond.spec.operators import Field
from millpond.stores.aligned.hash_intervals import read_gradually

MAX_KEYS = 8192
"""Maximum keys that are processed together."""
_PIECE_BYTES = 8 << 20
"""Approximate bytes of rows that are processed together, unless they are of one key."""
_MAX_WHOLE_BYTES = 64 << 20
"""Bytes of one key's rows above which they come in pieces."""


class Group(NamedTuple):
    """The rows of some keys.

    Attributes:
        hashes: the hashes of the distinct keys.
        keys: the keys' columns, with the values of each key's first row.
        counts: the number of rows of each key.
        rows: the columns of the rows, key after key, in order of arrival.
        pieces: all rows of a single key, if `rows` has only the first of them.
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
        """Return the keys from `start` to `stop`, with their rows."""
        if self.pieces is not None:
            return self
        ends = np.concatenate([[0], np.cumsum(self.counts)])
        keys, rows = (
            [column[start:stop] for column in self.keys],
            [column[ends[start] : ends[stop]] for column in self.rows],
        )
        return Group(self.hashes[start:stop], keys, self.counts[start:stop], rows)


class Pieces:
    """All rows of one key, of which only a piece at a time is decoded to columns.

    Args:
        stored: the encoding of the rows.
        rows: the rows of the key.
    """

    def __init__(self, stored: StoredRows, rows: Rows) -> None:
        self._stored = stored
        self._rows = rows
        self._ends = np.append(_starts(_sizes(stored, rows), _PIECE_BYTES), rows.count)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._rows.count

    def batch(self, number: int) -> pa.RecordBatch:
        """Decode a piece: the column `__hash`, then those of the rows."""
        start, stop = self._ends[number : number + 2]
        return self._stored.decode(self._rows.take(slice(start, stop)))

    @property
    def last(self) -> pa.Array:
        """The last column of all rows."""
        return pa.concat_arrays([self.batch(number).columns[-1] for number in range(len(self))])


class Input:
    """The rows of one batch for a processor, or its due timers, kept until all are there.

    Args:
        keys: the key columns.
        others: the other columns.
        make_table: opens temporary tables.
        comparison_leaf: converts a key column so that keys are equal exactly if their rows belong together.
        name: the name of the table, unlike those of other inputs at the same time.
    """

    def __init__(
        self,
        keys: tuple[Field, ...],
        others: tuple[Field, ...],
        make_table: MakeTable,
        comparison_leaf: Callable[[Leaf], Leaf],
        name: str = "input",
    ) -> None:
        self._stored = StoredRows((), (*keys, *others))
        self._comparison_leaf = comparison_leaf
        self._distinct = keyed(keys, [])
        self._keys = len(keys)
        self._make_table = make_table
        self._table = make_table(name, self._stored.layout.schema, self._stored.initial, kind="spool")

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._table.rows

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows: the column `__hash`, then keys and others."""
        for portion in portions(batch, self._table.portion_bytes, self._table.portion_keys):
            self._table.append(self._stored.encode(portion))

    def groups(self) -> Iterator[Group]:
        """Yield all rows grouped by key, in the order of the keys' hashes."""
        for rows in read_gradually(
            [self._table.all_segments()], self._stored.layout, max(1, self._table.portion_bytes // 2)
        ):
            for part, heavy in self._split_heavy(rows):
                yield from self._group_heavy(part) if heavy else self._group_rows(part)

    def _split_heavy(self, rows: Rows) -> Iterator[tuple[Rows, bool]]:
        """Split rows in hash order into parts.

        Yields:
            Each part, with whether it is a single hash that has too many rows.
        """
        if rows.words.nbytes + rows.heap.nbytes <= _MAX_WHOLE_BYTES:
            yield rows, False
            return
        hashes = rows.words[:, HASH]
        firsts = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
        sizes = np.add.reduceat(_sizes(self._stored, rows), firsts)
        heavy = sizes > _MAX_WHOLE_BYTES
        positions = np.flatnonzero(heavy)
        cuts = np.unique(
            np.concatenate(
                [_starts(np.where(heavy, 0, sizes), _MAX_WHOLE_BYTES), positions, positions + 1, [len(firsts)]]
            )
        )
        ends = np.append(firsts, rows.count)
        for start, stop in pairwise(cuts.tolist()):
            yield rows.take(slice(ends[start], ends[stop])), bool(heavy[start])

    def _group_heavy(self, rows: Rows) -> Iterator[Group]:
        """Group the rows of one hash, which may be of several keys."""
        pieces = Pieces(self._stored, rows)
        with self._numbering(key_groups(rows)) as numbers_of:
            numbers = np.concatenate([numbers_of(pieces.batch(number)) for number in range(len(pieces))])
        distinct = np.unique(numbers)
        for number in distinct.tolist():
            own_pieces = pieces
            if len(distinct) > 1:
                own_pieces = Pieces(self._stored, rows.take(numbers == number))
            first = own_pieces.batch(0)
            head = first.slice(0, 1)
            keys = head.columns[1 : 1 + self._keys]
            yield Group(
                hashes_of(head),
                keys,
                np.array([own_pieces.rows]),
                first.columns[1:],
                own_pieces if len(own_pieces) > 1 else None,
            )

    def _group_rows(self, rows: Rows) -> Iterator[Group]:
        batch = self._stored.decode(rows)
        with self._numbering(key_groups(rows)) as numbers_of:
            numbers = numbers_of(batch)
        if (np.diff(numbers) < 0).any():  # rows of different keys with one hash
            # Stable: the rows of a key stay in order of arrival.
            order = np.argsort(numbers, kind="stable")
            batch, numbers = batch.take(pa.array(order)), numbers[order]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        ends = np.append(starts[1:], batch.num_rows)
        max_rows = max(1, _PIECE_BYTES * batch.num_rows // max(1, batch.nbytes))
        position = 0
        while position < len(starts):
            stop = int(np.searchsorted(ends, starts[position] + max_rows, "right"))
            stop = max(position + 1, min(stop, position + MAX_KEYS))
            piece = batch.slice(starts[position], ends[stop - 1] - starts[position])
            firsts = starts[position:stop] - starts[position]
            heads = piece.take(pa.array(firsts))
            keys = heads.columns[1 : 1 + self._keys]
            yield Group(hashes_of(heads), keys, ends[position:stop] - starts[position:stop], piece.columns[1:])
            position = stop

    @contextmanager
    def _numbering(self, range_: HashRange) -> Iterator[Callable[[pa.RecordBatch], NDArray[np.int64]]]:
        """Return a function that numbers the rows of batches by key, in order of the keys' first rows.

        Args:
            range_: the range of all their hashes.
        """
        table = self._make_table("keys", self._distinct.layout.schema, self._distinct.initial, kind="scratch")

        def numbers(batch: pa.RecordBatch) -> NDArray[np.int64]:
            table.size_index(batch.num_rows)
            keys = self._distinct.encode(batch, range(self._keys), self._comparison_leaf)
            return table.upsert(keys, 0).rows

        try:
            table.begin(0)
            table.restrict(range_)  # without it, all keys would crowd one part of the index
            yield numbers
        finally:
            table.close()

    def close(self) -> None:
        """Release all memory."""
        self._table.close()


def _sizes(stored: StoredRows, rows: Rows) -> Ints:
    """Return the approximate bytes of each row."""
    sizes = np.full(rows.count, 8 * stored.layout.width, np.int64)
    for offset in stored.layout.bytes_columns:
        sizes += (rows.words[:, offset] & LENGTH).astype(np.int64)
    return sizes


def _starts(sizes: Ints, max_bytes: int) -> Ints:
    """Return the starts of pieces of about `max_bytes` bytes."""
    before = np.cumsum(sizes) - sizes
    return np.flatnonzero(np.diff(before // max_bytes, prepend=-1))

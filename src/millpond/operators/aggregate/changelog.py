"""Groups that come and go: how many rows each has, how it stood before the batch, and the changes that follow.

See docs/changes.md. Beside its accumulators a group's row holds the number of its rows; where changes are asked for,
also a copy of all that from before the batch, made when the batch first touches the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.aggregate import retract
from millpond.kernels.ranking.changes import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from millpond.layout import Column, Rows
from millpond.operators.columns.decode import ints
from millpond.operators.columns.encode import ALL, Place
from millpond.operators.retraction import unknown_retraction
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import OP

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

Decode = Callable[[Rows, bool], Iterator[pa.RecordBatch]]
"""Decodes rows, from their accumulators or from the copies of before the batch."""


def changelog_columns(
    columns: Sequence[tuple[Column, bool]], *, retracts: bool, changes: bool
) -> list[tuple[Column, bool]]:
    """The columns that a group's row has besides those of its accumulators."""
    more = [(Column("rows", "word"), False)] if retracts or changes else []
    if changes:
        more += [(Column(f"before.{column.name}", column.kind), null) for column, null in [*columns, *more]]
        more.append((Column("before.stamp", "word"), False))
    return more


class GroupChangelog:
    """What a table's rows hold of their groups' comings and goings.

    Args:
        spec: the aggregate, with `retracts` or `changes`.
        values: the places of the table's value columns.
        kinds: the kinds of those columns.
    """

    def __init__(self, spec: AggregateSpec, values: Sequence[Place], kinds: Sequence[str]) -> None:
        self._changes = spec.changes
        self._always = not spec.keys  # the one group of an aggregate without keys is always there
        count = (len(values) - 2) // 2 if spec.changes else len(values) - 1
        self.accumulators = tuple(values[:count])
        self.before = tuple(values[count + 1 : 2 * count + 1])
        self._rows = values[count]
        if not spec.changes:
            return
        self._rows_before = values[2 * count + 1]
        self._stamp = values[2 * count + 2]
        pairs = zip([*self.accumulators, self._rows], [*self.before, self._rows_before], strict=True)
        widths = {"word": 1, "wide": 2, "bytes": 0}
        self._columns = np.array(
            [
                [old.offset, widths[kind], *_null(old), new.offset, *_null(new)]
                for (old, new), kind in zip(pairs, kinds, strict=False)
            ],
            dtype=np.int64,
        )
        self._blobs = [index for index in range(count) if kinds[index] == "bytes"]

    def open_global(self, table: Writable, row: int, version: int, *, created: bool) -> None:
        """Begin a batch for the group without keys."""
        if self._changes:
            self.snapshot(table, np.array([row], dtype=np.int64), version)
            table.words[row, self._rows_before.offset] = 0 if created else 1

    def update(
        self, table: Writable, rows: NDArray[np.int64], start: int, version: int, signs: NDArray[np.int8]
    ) -> None:
        """Note rows of a block before they are folded in.

        Args:
            rows: the row ids of their groups. start: the block's first row in the batch.
            version: of the batch.
            signs: of the batch's rows.
        """
        if self._changes:
            self.snapshot(table, rows, version)
        retract.count(table.words, rows, start, self._rows.offset, ALL, signs)

    def snapshot(self, table: Writable, rows: NDArray[np.int64], version: int) -> None:
        """Copy how groups stood before the batch, unless that was done."""
        fresh = np.empty(len(rows), dtype=np.int64)
        found = retract.snapshot(table.words, rows, self._stamp.offset, version + 1, self._columns, fresh)
        for index in self._blobs if found else ():
            at, ids = self.accumulators[index].offset, fresh[:found]
            pairs = np.ascontiguousarray(table.words[ids, at : at + 2])
            table.put_bytes(ids, self.before[index].offset, pairs, table.heap.data)

    def check(self, rows: Rows, counts: Sequence[int]) -> None:
        """See that no group has lost more rows than it had.

        Args:
            rows: groups that the batch has changed. counts: words in which they count some of their rows.

        Raises:
            StateDamagedError: a row was taken back that was never there.
        """
        held = ints(rows, self._rows.offset)
        for count in (ints(rows, offset) for offset in counts):
            if ((count < 0) | (count > held)).any():
                raise unknown_retraction()
        if (held < 0).any():
            raise unknown_retraction()

    def there(self, rows: Rows) -> Rows:
        """The rows of groups that are there."""
        return rows if self._always else _select(rows, ints(rows, self._rows.offset) != 0)

    def changes(self, rows: Rows, decode: Decode) -> Iterator[pa.RecordBatch]:
        """The changes of groups that a batch touched: images that are gone, then those that are new."""
        before = ints(rows, self._rows_before.offset) != 0
        after = np.ones(rows.count, dtype=np.bool_) if self._always else ints(rows, self._rows.offset) != 0
        changed = (before != after) | ~self._same(rows)
        for there, other, lone, paired, old in (
            (before, after, DELETE, UPDATE_BEFORE, True),
            (after, before, INSERT, UPDATE_AFTER, False),
        ):
            which = there & changed
            kinds = np.where(other[which], paired, lone).astype(np.int8)
            start = 0
            for batch in decode(_select(rows, which), old) if which.any() else ():
                stop = start + batch.num_rows
                yield batch.append_column(OP.name, pa.array(kinds[start:stop]))
                start = stop

    def _same(self, rows: Rows) -> NDArray[np.bool_]:
        """Groups of which the accumulators are, word for word, as before the batch."""
        if self._blobs:  # long values would have to be compared where they are
            return np.zeros(rows.count, dtype=np.bool_)
        same = np.ones(rows.count, dtype=np.bool_)
        for old, width, null_word, null_bit, new, new_null_word, new_null_bit in self._columns[:-1]:
            one = np.uint64(1)
            same &= (rows.words[:, old : old + width] == rows.words[:, new : new + width]).all(axis=1)
            nulls = (rows.words[:, null_word] >> np.uint64(null_bit)) & one
            same &= nulls == (rows.words[:, new_null_word] >> np.uint64(new_null_bit)) & one
        return same


def _null(place: Place) -> tuple[int, int]:
    return place.null_word, int(place.null_bit).bit_length() - 1


def _select(rows: Rows, which: NDArray[np.bool_]) -> Rows:
    return rows if which.all() else Rows(np.ascontiguousarray(rows.words[which]), rows.heap)

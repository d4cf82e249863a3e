"""Groups that appear and disappear: their row counts, their state before the batch, and the changelog.

See docs/architecture/11-changelog.md. Beside its accumulators a group's row holds its number of rows. If changes are
asked for, it also holds a copy of all this from before the batch, made when the batch first touches the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.aggregate import retract
from millpond.kernels.ranking.changes import DELETE, INSERT, UPDATE_AFTER, UPDATE_BEFORE
from millpond.layout import INLINE, LENGTH, Column, Rows
from millpond.operators.columns.encode import ALL, Place
from millpond.operators.retraction import unknown_retraction
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import OP

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

Decode = Callable[[Rows, bool], Iterator[pa.RecordBatch]]
"""Decodes rows, from their accumulators or, if the flag is set, from the copies from before the batch."""


def changelog_columns(
    columns: Sequence[tuple[Column, bool]], *, retracts: bool, changes: bool
) -> list[tuple[Column, bool]]:
    """Return the columns that a group's row has beside those of its accumulators."""
    more = [(Column("rows", "word"), False)] if retracts or changes else []
    if changes:
        more += [(Column(f"before.{column.name}", column.kind), null) for column, null in [*columns, *more]]
        more.append((Column("before.stamp", "word"), False))
    return more


class GroupChangelog:
    """The changelog columns of a table's rows: row counts, and copies of the state from before the batch.

    Args:
        spec: the aggregate, with `retracts` or `changes`.
        values: the places of the table's value columns.
        kinds: the kinds of those columns.
    """

    def __init__(self, spec: AggregateSpec, values: Sequence[Place], kinds: Sequence[str]) -> None:
        self._changes = spec.changes
        self._always = not spec.keys  # the one group of an aggregate without keys always exists
        count = (len(values) - 2) // 2 if spec.changes else len(values) - 1
        self.accumulators = tuple(values[:count])
        self.before = tuple(values[count + 1 : 2 * count + 1])
        self._rows = values[count]
        if not spec.changes:
            return
        self._rows_before = values[2 * count + 1]
        self._snapshot_version = values[2 * count + 2]
        pairs = zip([*self.accumulators, self._rows], [*self.before, self._rows_before], strict=True)
        widths = {"word": 1, "wide": 2, "bytes": 0}
        self._columns = np.array(
            [
                [old.offset, widths[kind], *_null_position(old), new.offset, *_null_position(new)]
                for (old, new), kind in zip(pairs, kinds, strict=False)
            ],
            dtype=np.int64,
        )
        self._bytes_columns = [index for index in range(count) if kinds[index] == "bytes"]

    def begin_global(self, table: Writable, row: int, version: int, *, created: bool) -> None:
        """Begin a batch for the group of an aggregate without keys."""
        if self._changes:
            self.snapshot(table, np.array([row], dtype=np.int64), version)
            # This group may exist with no rows, so the number only says whether it existed before the batch.
            table.words[row, self._rows_before.offset] = 0 if created else 1

    def update(
        self, table: Writable, rows: NDArray[np.int64], start: int, version: int, signs: NDArray[np.int8]
    ) -> None:
        """Count the rows of a block, before they are folded in.

        Args:
            table: the table of the groups.
            rows: the row ids of the groups.
            start: the block's first row in the batch.
            version: the state version that the batch reads.
            signs: the signs of the batch's rows.
        """
        if self._changes:
            self.snapshot(table, rows, version)
        retract.count(table.words, rows, start, *self._rows, ALL, signs)

    def snapshot(self, table: Writable, rows: NDArray[np.int64], version: int) -> None:
        """Copy the groups' state from before the batch, unless the batch has done so."""
        fresh = np.empty(len(rows), dtype=np.int64)
        # Version + 1, since 0 is the stamp of a fresh row, and the first batch reads version 0.
        count = retract.snapshot(table.words, rows, self._snapshot_version.offset, version + 1, self._columns, fresh)
        for index in self._bytes_columns if count else ():
            offset, ids = self.accumulators[index].offset, fresh[:count]
            pairs = table.words[ids, offset : offset + 2]
            # The copy gets bytes of its own: accumulators append to theirs in place.
            table.put_bytes(ids, self.before[index].offset, pairs, table.heap.data)

    def check(self, rows: Rows, counts: Sequence[int]) -> None:
        """Check that no group has lost more rows than it had.

        Args:
            rows: groups that the batch has changed.
            counts: offsets of words that count some of a group's rows.

        Raises:
            StateDamagedError: a row was retracted that was never inserted.
        """
        row_counts = rows.ints(self._rows.offset)
        for count in (rows.ints(offset) for offset in counts):
            # A row that is retracted with other values than it was counted with shows here, though not always.
            if ((count < 0) | (count > row_counts)).any():
                raise unknown_retraction()
        if (row_counts < 0).any():
            raise unknown_retraction()

    def is_empty(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the groups that do not exist, because they have no rows."""
        return np.zeros(rows.count, dtype=np.bool_) if self._always else rows.ints(self._rows.offset) == 0

    def existing(self, rows: Rows) -> Rows:
        """Return the rows of groups that exist."""
        return _select(rows, ~self.is_empty(rows))

    def changes(self, rows: Rows, decode: Decode) -> Iterator[pa.RecordBatch]:
        """Yield the changes of groups that a batch touched: old images first, then new ones."""
        before = rows.ints(self._rows_before.offset) != 0
        after = np.ones(rows.count, dtype=np.bool_) if self._always else rows.ints(self._rows.offset) != 0
        # A retraction and an insert that cancel out yield nothing: unchanged images are not emitted.
        changed = (before != after) | ~self._is_unchanged(rows)
        for present, counterpart, lone, paired, old in (
            # Old images come first, so that a reader that applies rows in order never has two images of a key.
            (before, after, DELETE, UPDATE_BEFORE, True),
            (after, before, INSERT, UPDATE_AFTER, False),
        ):
            which = present & changed
            kinds = np.where(counterpart[which], paired, lone).astype(np.int8)
            start = 0
            for batch in decode(_select(rows, which), old) if which.any() else ():
                stop = start + batch.num_rows
                yield batch.append_column(OP.name, pa.array(kinds[start:stop]))
                start = stop

    def _is_unchanged(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the groups whose accumulators are unchanged; long values count as changed."""
        same = np.ones(rows.count, dtype=np.bool_)
        # Without the last column: the number of rows is no result.
        for old, width, null_word, null_bit, new, new_null_word, new_null_bit in self._columns[:-1]:
            bit = np.uint64(1)
            stored = width or 2  # the kernel that copies rows leaves byte values out
            same &= (rows.words[:, old : old + stored] == rows.words[:, new : new + stored]).all(axis=1)
            if not width:
                same &= (rows.words[:, old] & LENGTH) <= INLINE
            nulls = (rows.words[:, null_word] >> np.uint64(null_bit)) & bit
            same &= nulls == (rows.words[:, new_null_word] >> np.uint64(new_null_bit)) & bit
        return same


def _null_position(place: Place) -> tuple[int, int]:
    return place.null_word, int(place.null_bit).bit_length() - 1


def _select(rows: Rows, which: NDArray[np.bool_]) -> Rows:
    return rows if which.all() else rows.take(which)

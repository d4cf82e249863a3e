"""The lists of the rows of sessions that are kept until the watermark closes them."""

# ruff: noqa: D102 (the methods are documented in `Accumulator`)

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.kernels.aggregate import collect as kernels
from millpond.layout import Ints, Rows, Words
from millpond.operators.columns.decode import to_arrow
from millpond.operators.columns.encode import ALL, Mask, Operand
from millpond.operators.columns.offsets import bounds_of
from millpond.operators.functions.accumulators import Accumulator, StateColumn
from millpond.operators.functions.collect import GrowingBytes
from millpond.spec.kinds.session import KEPT
from millpond.spec.operators import AggregateCall

if TYPE_CHECKING:
    from millpond.stores.protocol import Writable

_WIDTH = 8


class RowLists(Accumulator):
    """The lists that hold the rows of a session, each by its initial boundary (FlowKV §4.2), and the number of rows.

    A list begins with a session, under the session's start. It keeps that name when the session grows, so that written
    rows need not be renamed. The start stays within the session, so that no other session of the key has a list of that
    name. A session into which others are merged has their lists too.

    The columns are the first list, the number of rows, and the other lists.
    """

    columns = (StateColumn("word"), StateColumn("word"), *GrowingBytes.columns)

    def __init__(self) -> None:
        super().__init__(AggregateCall("count", (), KEPT.type), [])
        self._blobs = GrowingBytes()

    def load(self, operands: Sequence[Operand], counts: Mask) -> None:
        """Do nothing: rows are kept in the store."""

    def update(self, table: Writable, rows: NDArray[np.int64], start: int) -> None:
        raise UsageError("Rows of sessions are not folded here.", action="Add them by `RowLists.add`.")

    def add(self, table: Writable, sessions: Ints, starts: Ints, counts: Ints) -> Ints:
        """Add rows to sessions.

        Args:
            table: the table of the sessions.
            sessions: row ids of the sessions, possibly repeated.
            starts: the starts of the sessions.
            counts: the number of rows for each.

        Returns:
            The list that the rows of each go to.
        """
        first, number = self.places[0].offset, self.places[1].offset
        # A session without rows begins its list now, under its present start.
        fresh = table.words[sessions, number] == 0
        table.words[sessions[fresh], first] = starts[fresh].view(np.uint64)
        np.add.at(table.words[:, number], sessions, counts.view(np.uint64))
        lists: Ints = table.words[sessions, first].view(np.int64)
        return lists

    def _combine(self, table: Writable, rows: NDArray[np.int64], source: Rows) -> None:
        first, number, further = (place.offset for place in self.places[:3])
        names = source.word(first)
        is_further = np.ones(len(rows), np.uint8)
        # A new session takes the first list of the first session that is merged into it; all others are further lists.
        fresh = np.flatnonzero(table.words[rows, number] == 0)
        if len(fresh):
            new_sessions, which = np.unique(rows[fresh], return_index=True)
            table.words[new_sessions, first] = names[fresh[which]]
            is_further[fresh[which]] = 0
        np.add.at(table.words[:, number], rows, source.words[:, number])
        self._blobs.make_room(table, rows, 0, further, width=_WIDTH, valid=is_further)
        kernels.append_fixed(table.words, table.heap.data, rows, 0, further, names.view(np.uint8), is_further, _WIDTH)
        self._blobs.append(table, rows, further, source)

    def with_several_lists(self, words: Words, sessions: Ints) -> Ints:
        """Return the positions of sessions (row ids) that have more than one list."""
        return np.flatnonzero(words[sessions, self.places[3].offset])

    def rows(self, sessions: Rows) -> Ints:
        """Return the number of rows of each session."""
        return sessions.ints(self.places[1].offset)

    def of(self, sessions: Rows) -> tuple[Ints, Ints]:
        """Return the lists of sessions: for each list its session, and its initial boundary."""
        first, further = self.places[0].offset, self.places[2].offset
        offsets = np.empty(sessions.count + 1, np.int64)
        kernels.list_offsets(sessions.words, further, _WIDTH, offsets)
        more = np.empty(int(offsets[-1]), np.int64)
        kernels.read_fixed(sessions.words, sessions.heap, further, offsets, _WIDTH, more.view(np.uint8))
        sizes = np.diff(offsets) + 1
        owners = np.repeat(np.arange(sessions.count), sizes)
        boundaries = np.empty(len(owners), np.int64)
        leading = np.zeros(len(owners), np.bool_)
        leading[bounds_of(sizes)[:-1]] = True
        boundaries[leading] = sessions.ints(first)
        boundaries[~leading] = more
        return owners, boundaries

    def result(self, rows: Rows) -> pa.Array:
        return to_arrow(self.rows(rows), ALL, self.type)

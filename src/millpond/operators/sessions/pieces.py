"""The rows of a batch, cut into pieces of sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from millpond.errors import ArithmeticOverflowError
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.event_time.sessions import arrange
from millpond.kernels.pointers import address
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, Ints, RowLayout, Rows
from millpond.operators.columns.offsets import spans

_LATEST = np.iinfo(np.int64).max


class Pieces(NamedTuple):
    """Rows in order of key and start, cut into pieces of sessions.

    Attributes:
        order: the positions of the rows.
        rows: the first row of each piece, as a position in `order`, with the end of the last.
        starts: the starts of the pieces, in microseconds.
        ends: the ends of the pieces, in microseconds.
        keys: the first piece of each key, with the end of the last.
    """

    order: Ints
    rows: Ints
    starts: Ints
    ends: Ints
    keys: Ints

    @staticmethod
    def of(keys: Rows, starts: Ints, ends: Ints, layout: RowLayout) -> Pieces:
        """Cut rows, given by their key rows and times, into pieces."""
        count = len(starts)
        hashes, order = order_by_hash(keys.words[:, HASH])
        rows, first = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
        piece_starts, piece_ends, counts = (np.empty(size, np.int64) for size in (count, count, 2))
        shape = kernel_layout(layout)
        arrange(
            *(hashes, order, starts, ends, address(keys.words), keys.words.shape[1], address(keys.heap)),
            *(shape.null_mask, shape.key_start, shape.key_stop, shape.references_at),
            *(rows, piece_starts, piece_ends, first, counts),
        )
        groups, pieces = counts.tolist()
        return Pieces(order, rows[: pieces + 1], piece_starts[:pieces], piece_ends[:pieces], first[: groups + 1])

    @property
    def leaders(self) -> Ints:
        """A row of each key."""
        return self.order[self.rows[self.keys[:-1]]]

    def select(self, which: Ints) -> Pieces:
        """Return the pieces of the chosen keys, in their order."""
        pieces, keys = spans(self.keys, which)
        members, rows = spans(self.rows, pieces)
        return Pieces(self.order[members], rows, self.starts[pieces], self.ends[pieces], keys)


def own_windows(bounds: Sequence[Ints], gap: int | None) -> tuple[Ints, Ints]:
    """Return the start and the end of each row's own window, in microseconds.

    Args:
        bounds: the starts and, without `gap`, the ends.
        gap: the length of all windows; None if they differ.

    Raises:
        ArithmeticOverflowError: a window would end after the last timestamp.
    """
    if gap is None:
        starts, ends = bounds
        return starts, ends
    (starts,) = bounds
    # NumPy's addition would wrap, and the session would close at once.
    if len(starts) and int(starts.max()) > _LATEST - gap:
        raise ArithmeticOverflowError(
            "a session window would end after the last timestamp that there is.",
            action="Filter such times out before the session windows.",
        )
    return starts, starts + gap

"""The rows of a batch, cut into pieces of sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.errors import ArithmeticOverflowError
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.event_time.sessions import arrange
from millpond.kernels.pointers import address
from millpond.kernels.runs.sort import order_by_hash
from millpond.layout import HASH, Ints, RowLayout, Rows
from millpond.operators.columns.offsets import bounds_of, spans

MAX_MERGED_SESSIONS = 8192
"""Maximum sessions, of keys with several, that are merged together."""

_LATEST = np.iinfo(np.int64).max


class Pieces(NamedTuple):
    """Rows in order of key and start, cut into pieces of sessions.

    `keys` may select a range of keys: then only pieces `keys[0]` to `keys[-1] - 1` count.

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

    def of_key_range(self, keys: slice) -> Pieces:
        """Return the pieces of consecutive keys; only `keys` changes, so positions in `order` stay."""
        return self._replace(keys=self.keys[keys.start : keys.stop + 1])

    def find_later(self, session_keys: Ints, session_starts: Ints) -> NDArray[np.bool_]:
        """Find the sessions that start after the start of a piece that meets them.

        Args:
            session_keys: the key of each session, counted from the first in `keys`.
            session_starts: the starts of the sessions, in microseconds.
        """
        low, high = self.keys[[0, -1]]
        piece_keys = np.repeat(np.arange(len(self.keys) - 1), np.diff(self.keys))
        begun, ended = (
            _rank(piece_keys, times[low:high], session_keys, session_starts, side="left")
            for times in (self.starts, self.ends)
        )
        # A piece that ended before a session has also begun before it. So the difference counts the pieces with
        # start < session start <= end.
        return begun > ended

    def cut(self, session_keys: Ints, session_starts: Ints, starts: Ints, ends: Ints) -> Pieces:
        """Return the pieces, cut before the first row at or after the start of each session.

        A piece of rows that start at 10, 20 and 30 is cut by a session that starts at 15 into a piece of the row at 10
        and one of the others.

        Args:
            session_keys: the key of each session, counted from the first in `keys`.
            session_starts: the starts of the sessions, in microseconds.
            starts: the starts of all rows, by position.
            ends: the ends of all rows, by position.
        """
        piece_rows = self.rows[self.keys[0] : self.keys[-1] + 1]
        low, high = piece_rows[[0, -1]]
        order = self.order[low:high]  # by key, then by start
        row_keys = np.repeat(np.arange(len(self.keys) - 1), np.diff(self.rows[self.keys]))
        passed = _rank(session_keys, session_starts, row_keys, starts[order], side="right")
        is_first = np.diff(passed, prepend=-1) != 0
        is_first[piece_rows[:-1] - low] = True
        first = np.flatnonzero(is_first)
        return Pieces(
            self.order,
            np.append(first, high - low) + low,
            starts[order[first]],
            np.maximum.reduceat(ends[order], first),
            np.searchsorted(row_keys[first], np.arange(len(self.keys))),
        )


def _rank(keys: Ints, times: Ints, query_keys: Ints, query_times: Ints, *, side: Literal["left", "right"]) -> Ints:
    """Like `np.searchsorted`, over (key, time) pairs. These need not be sorted."""
    is_query = np.arange(len(times) + len(query_times)) >= len(times)
    # Of equal pairs, queries come first for "left", last for "right".
    is_last = is_query == (side == "right")
    order = np.lexsort((is_last, np.concatenate([times, query_times]), np.concatenate([keys, query_keys])))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(~is_query[order])
    return ranks[len(times) :]


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


def merged_together(stored: Ints, keys: Ints) -> Iterator[slice]:
    """Yield keys in parts with few stored sessions and pieces, or of a single key.

    Args:
        stored: the number of stored sessions of each key.
        keys: the first piece of each key, with the end of the last.
    """
    return parts_within(stored + np.diff(keys), MAX_MERGED_SESSIONS)


def parts_within(sizes: Ints, limit: int) -> Iterator[slice]:
    """Yield consecutive parts whose sizes add up to at most `limit`, or of a single member."""
    ends = bounds_of(sizes)
    start = 0
    while start < len(sizes):
        stop = max(start + 1, int(np.searchsorted(ends, ends[start] + limit, "right")) - 1)
        yield slice(start, stop)
        start = stop

"""Windows from panes: stores what overlapping windows share once, and merges panes when a window closes.

A pane is an interval of event time that lies in the same windows throughout. A row changes one pane, however many
windows it is in; a window's result is the merge of its panes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.event_time.panes import following, order_panes, span
from millpond.kernels.event_time.slices import spread
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.kernels.runs.sort import order_by_hash
from millpond.key_groups import KEY_GROUP_BITS
from millpond.layout import HASH, Rows
from millpond.operators.aggregate.groups import Groups
from millpond.operators.hash_ranges import bounds, by_range
from millpond.spec.operators import Windows
from millpond.stores.rmw.hot.scratch import Scratch

_MIN_PIECE_ROWS = 256  # minimum rows of one part to read at once
_MAX_WINDOWS = 32768  # maximum windows to merge at once
_MAX_PANES = 131072  # maximum panes of these windows


def spread_by_time(hashes: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Spread hashes of keys by time within their key groups; on spread hashes, this restores the keys' hashes."""
    out = np.empty(len(times), np.int64)
    spread(hashes, times, KEY_GROUP_BITS, out)
    return out


def merge_panes(parts: Sequence[Groups], windows: Windows, place: int, low: int, high: int) -> Iterator[Rows]:
    """Merge the panes of windows into the windows' groups.

    Panes are merged one hash range at a time, so that memory holds the panes of one range only.

    Args:
        parts: the groups that hold the panes.
        windows: the windows.
        place: the word of a row that holds the beginning of its pane, and in a result that of its window.
        low: the first beginning of the windows to return.
        high: the last beginning of the windows to return.

    Yields:
        Rows that are valid until the next ones are taken; their hashes are those of a pane.
    """
    if not parts:
        return
    first = parts[0]
    row = 8 * first.main.layout.width
    stats = [part.table.stats() for part in parts]
    size = sum(max(row * stat["keys"], stat["bytes"]) for stat in stats)
    portion = max(1, first.table.portion_bytes)
    ends = bounds(first.table.range, -(-size // portion))
    piece = max(_MIN_PIECE_ROWS, portion // (row * len(parts)))  # of each part, one piece is held from range to range
    scratch = first.table.scratch()
    try:
        for together in zip(*(by_range(part.scan(piece), ends) for part in parts), strict=True):
            panes = _Panes(first, place)
            for rows in chain.from_iterable(together):
                panes.add(rows, low, high + windows.size - windows.slide)
            yield from panes.windows(windows, low, high, scratch)
    finally:
        scratch.close()


class _Panes:
    """The panes of one range of the hash axis.

    Args:
        groups: groups with the layout of the panes.
        place: the word of a row that holds the beginning of its pane.
    """

    def __init__(self, groups: Groups, place: int) -> None:
        self._calls = groups.calls
        self._shape = kernel_layout(groups.main.layout)
        self._place = place
        self._keys: list[NDArray[np.int64]] = []
        self._begins: list[NDArray[np.int64]] = []
        self._addresses: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []
        self._pieces: list[Rows] = []

    def add(self, rows: Rows, low: int, high: int) -> None:
        """Add the rows that begin from `low` to `high`; the memory that they refer to must stay."""
        begins = rows.ints(self._place)
        hashes = rows.ints(HASH)
        rows_at, heaps_at = addresses(rows.words, rows.heap)
        which = (begins >= low) & (begins <= high)
        if not which.all():
            begins, hashes, rows_at, heaps_at = begins[which], hashes[which], rows_at[which], heaps_at[which]
        if len(begins):
            self._keys.append(spread_by_time(hashes, begins))
            self._begins.append(begins)
            self._addresses.append((rows_at, heaps_at))
            self._pieces.append(rows)

    def windows(self, windows: Windows, low: int, high: int, scratch: Scratch) -> Iterator[Rows]:
        """Yield the groups of the windows that begin from `low` to `high`."""
        if not self._keys:
            return
        begins = np.concatenate(self._begins)
        rows_at, heaps_at = (np.concatenate(arrays) for arrays in zip(*self._addresses, strict=True))
        width, blobs = self._shape.width, self._shape.blobs
        ordered, order = order_by_hash(np.concatenate(self._keys).view(np.uint64))
        shape = self._shape
        key = (shape.null_mask, shape.key_start, shape.key_stop, self._place, shape.references_at)
        ends = np.empty(len(order), np.int64)
        ends = ends[: order_panes(ordered, order, begins, rows_at, heaps_at, *key, ends)]
        cursor = np.zeros(4, np.int64)
        firsts, counts, starts = (np.empty(_MAX_WINDOWS, np.int64) for _ in range(3))
        while True:
            count = span(
                order, begins, ends, windows.size, windows.slide, low, high, _MAX_PANES, cursor, firsts, counts, starts
            )
            if not count:
                return
            which = order[firsts[:count]]
            result = Rows(*gather_rows(rows_at[which], heaps_at[which], width, blobs))
            # The row of a window's first pane becomes the window's; the other panes are merged into it.
            result.words[:, self._place] = starts[:count].view(np.uint64)
            scratch.replace(result)
            others = int(counts[:count].sum()) - count
            if others:
                rows, ids = np.empty(others, np.int64), np.empty(others, np.int64)
                following(order, firsts[:count], counts[:count], rows, ids)
                source = Rows(*gather_rows(rows_at[rows], heaps_at[rows], width, blobs))
                for call in self._calls:
                    call.combine(scratch, ids, source)
            yield scratch.rows

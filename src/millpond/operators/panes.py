"""Windows from panes: what overlapping windows share is kept once, and put together when a window closes.

A pane is a stretch of event time that lies in the same windows throughout. A row changes one pane, however many windows
it is in; a window's result is that of its panes combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from millpond.conf import KEY_GROUP_BITS
from millpond.files.blocks import HashRange
from millpond.kernels.slices import spread
from millpond.layout import HASH, Rows
from millpond.operators.accumulators import BLOCK
from millpond.operators.groups import Groups
from millpond.operators.spec import Windows
from millpond.stores.rmw import RmwTable

_GROUP = 1 << (64 - KEY_GROUP_BITS)


def spread_by(hashes: NDArray[np.int64], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hashes of keys, spread by time within their key groups; of spread hashes, the keys' own again."""
    spreaded = np.empty(len(times), np.int64)
    spread(hashes, times, KEY_GROUP_BITS, spreaded)
    return spreaded


def combined(
    parts: Sequence[Groups],
    windows: Windows,
    place: int,
    wanted: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
) -> Iterator[Rows]:
    """The groups of some windows, put together from their panes.

    Range after range of the hash axis, so that memory holds the windows' groups of one range only.

    Args:
        parts: hold the panes.
        windows: the windows. place: the word of a row that says where its pane, or window, begins.
        wanted: which of the windows that begin at some times are wanted.
    """
    if not parts:
        return
    first = parts[0]
    size = 8 * first.main.layout.width * sum(part.table.stats()["keys"] for part in parts)
    bounds = _bounds(first.table.range, -(-size // max(1, first.table.portion)))
    for together in zip(*(_by_range(part.scan(), bounds) for part in parts), strict=True):
        table = first.table.beside()
        try:
            table.begin(0)
            for rows in chain.from_iterable(together):
                for shift in range(windows.overlap):
                    _fold(first, table, _moved(rows, place, shift * windows.slide, wanted))
            yield from table.scan()
        finally:
            table.close()


def _moved(rows: Rows, place: int, shift: int, wanted: Callable[[NDArray[np.int64]], NDArray[np.bool_]]) -> Rows:
    """The rows of panes as those of the wanted windows that begin so much earlier."""
    panes = np.ascontiguousarray(rows.words[:, place]).view(np.int64)
    begins = panes - shift
    which = wanted(begins)
    if not which.any():
        return Rows(rows.words[:0], rows.heap)
    words, panes, begins = rows.words[which], panes[which], begins[which]
    if shift:
        keys = spread_by(np.ascontiguousarray(words[:, HASH]).view(np.int64), panes)
        words[:, HASH] = spread_by(keys, begins).view(np.uint64)
        words[:, place] = begins.view(np.uint64)
    return Rows(words, rows.heap)


def _fold(groups: Groups, table: RmwTable, rows: Rows) -> None:
    for start in range(0, len(rows.words), BLOCK):
        block = Rows(rows.words[start : start + BLOCK], rows.heap)
        ids = table.upsert(block, 0).rows
        for call in groups.calls:
            call.combine(table, ids, block)


def _bounds(range_: HashRange, pieces: int) -> list[int]:
    """Where ranges of the axis end: on key groups, within which the panes of a key lie anywhere."""
    low, high = range_.lo // _GROUP, -(-range_.hi // _GROUP)
    inner = np.linspace(low, high, max(1, min(pieces, high - low)) + 1)[1:-1]
    return [*(int(bound) * _GROUP for bound in inner), 1 << 64]


def _by_range(pieces: Iterator[Rows], bounds: Sequence[int]) -> Iterator[list[Rows]]:
    """Rows in hash order, range by range."""
    rest: Rows | None = next(pieces, None)
    for bound in bounds:
        found: list[Rows] = []
        while rest is not None:
            hashes = rest.words[:, HASH]
            cut = len(hashes) if int(hashes[-1]) < bound else int(np.searchsorted(hashes, np.uint64(bound), "left"))
            found.append(Rows(rest.words[:cut], rest.heap))
            if cut < len(hashes):
                rest = Rows(rest.words[cut:], rest.heap)
                break
            rest = next(pieces, None)
        yield found

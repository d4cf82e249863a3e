"""Merged view of hot rows and runs, in hash order and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millpond.files.formats.blocks import MemorySource
from millpond.kernels.hot_table.state import FLAGS, TOMBSTONE, TOUCHED
from millpond.layout import HASH, META, HashRange, Rows
from millpond.stores.rmw.hot.table import HotTable
from millpond.stores.runs.merge import View, merge

_MIN_ROWS_PER_RUN = 64
"""Rows of each run in a piece, on average: with fewer, most of the time would go into finding them.

A piece has at most twice the rows asked for, however many the runs: rows may be large.
"""


def merge_hot_and_runs(
    hot: HotTable,
    runs: Sequence[View],
    range_: HashRange,
    size: int,
    *,
    touched: bool = False,
    tombstones: bool = False,
) -> Iterator[Rows]:
    """Yield the newest version of each key, one hash interval at a time.

    Args:
        hot: the newest rows. runs: older rows, newest first.
        range_: the hash range. size: rows in a piece, roughly.
        touched: only rows that the running batch changed.
        tombstones: include tombstones, with their flag.
    """
    size = max(size, min(_MIN_ROWS_PER_RUN * len(runs), 2 * size))
    lowest = range_.lo
    flag = TOUCHED if touched else 0
    remaining = np.empty(0, np.uint32)
    for ids in hot.walk(size, flag):
        remaining = np.concatenate([remaining, ids])
        hashes = hot.words[remaining, HASH]
        # Rows of one hash stay together: those of the last one wait for the next interval.
        cut = int(np.searchsorted(hashes, hashes[-1], "left"))
        if cut:
            highest = int(hashes[-1]) - 1
            yield from _merge_interval(hot, remaining[:cut], runs, lowest, highest, size, touched, tombstones)
            lowest, remaining = highest + 1, remaining[cut:]
    yield from _merge_interval(hot, remaining, runs, lowest, range_.hi - 1, size, touched, tombstones)


def _merge_interval(
    hot: HotTable,
    ids: np.ndarray[tuple[int], np.dtype[np.uint32]],
    runs: Sequence[View],
    lowest: int,
    highest: int,
    size: int,
    touched: bool,
    tombstones: bool,
) -> Iterator[Rows]:
    newest = MemorySource(hot.copy(ids, keep=TOUCHED | TOMBSTONE, compact=False), hot.layout, filtered=False)
    for rows in merge(
        [View(newest), *runs], hot.layout, drop_tombstones=not tombstones, lowest=lowest, highest=highest, size=size
    ):
        words = rows.words
        if touched:
            words = words[(words[:, META] & np.uint64(TOUCHED)) != 0]
        words[:, META] &= ~np.uint64(FLAGS & ~TOMBSTONE)
        if len(words):
            yield Rows(words, rows.heap)

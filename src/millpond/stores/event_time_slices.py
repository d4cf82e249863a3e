"""Slices of event time, each of which has tables of its own, so that what is closed is dropped whole.

State that is keyed by event time (windows, timestamps) is never looked for without its time, and is over when the
watermark passes. So each stretch of time gets tables of its own: to expire them is to forget their names, and no other
row is touched (the read-modify-write store's part of what FlowKV §4.1 does for appended values).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.event_time.slices import assign, group
from millpond.layout import NEVER
from millpond.time_slices import TimeSlice

_MANY = 32
"""Slices that one batch adds at most, roughly; beyond as many live ones, new ones get wider."""


class SliceAssigner:
    """Assigns rows to the live slices of one operator's state, which are disjoint and in order.

    A slice holds one grain, as a rule. When a batch brings very many, or very many are live, it holds several.

    Args:
        grain: microseconds that belong together: the pane of a window. origin: where one of them begins.
        live: the slices that there are.
    """

    def __init__(self, grain: int, origin: int = 0, live: Iterable[TimeSlice] = ()) -> None:
        self._grain = grain
        self._origin = origin
        self.live: list[TimeSlice] = []
        self._set(live)

    def _set(self, live: Iterable[TimeSlice]) -> None:
        self.live = sorted(set(live))
        self._lows = np.array([one.low for one in self.live], np.int64)
        self._lasts = np.array([one.last for one in self.live], np.int64)

    def divide(self, times: NDArray[np.int64]) -> Iterator[tuple[TimeSlice, NDArray[np.int64] | None]]:
        """The slices of some rows, made where there are none, each with its rows' positions (None: all of them)."""
        if not len(times):
            return
        at = np.empty(len(times), np.int32)
        if assign(times, self._lows, self._lasts, at):
            self._add(np.unique(times[at < 0]))
            assign(times, self._lows, self._lasts, at)
        if (at == at[0]).all():
            yield self.live[int(at[0])], None
            return
        starts = np.empty(len(self.live) + 1, np.int64)
        order = np.empty(len(times), np.int64)
        group(at, starts, order)
        live = self.live
        for number in np.flatnonzero(np.diff(starts)).tolist():
            yield live[number], order[starts[number] : starts[number + 1]]

    def known(self, times: NDArray[np.int64]) -> Iterator[tuple[TimeSlice, NDArray[np.int64]]]:
        """The slices that there are of some rows, each with its rows' positions."""
        at = np.empty(len(times), np.int32)
        if len(times):
            assign(times, self._lows, self._lasts, at)
        for number in np.unique(at[at >= 0]).tolist():
            yield self.live[number], np.flatnonzero(at == number)

    def _add(self, times: NDArray[np.int64]) -> None:
        """Add slices for some times, in order, none of which has one."""
        added = [TimeSlice(NEVER, NEVER)] if times[-1] == NEVER else []
        grains = np.unique((times[times != NEVER] - self._origin) // self._grain)
        lows = grains * self._grain + self._origin
        ahead = 1 << min(len(self.live) // _MANY, 16)
        before = np.searchsorted(self._lows, lows, "right")
        most = -(-len(grains) // _MANY)
        begin = 0
        while begin < len(grains):
            # Neighbours share a slice if there are many, but no slice that exists may lie between them.
            end = min(begin + most, int(np.searchsorted(before, before[begin], "right")))
            following = self.live[int(before[begin])].low if before[begin] < len(self.live) else NEVER
            following = min(following, int(lows[end])) if end < len(lows) else following
            past = max(int(lows[end - 1]) + self._grain, int(lows[begin]) + ahead * self._grain)
            first = max(int(lows[begin]), self.live[before[begin] - 1].last + 1) if before[begin] else int(lows[begin])
            added.append(TimeSlice(first, min(past, following) - 1))
            begin = end
        self._set([*self.live, *added])

    def drop(self, until: int) -> list[TimeSlice]:
        """Forget the slices that end at or before a time; returns them."""
        over = [one for one in self.live if one.last <= until and one.last != NEVER]
        if over:
            self._set(one for one in self.live if one not in over)
        return over

"""Slices of event time, each with tables of its own, so that closed state is dropped whole.

State keyed by event time (windows, timestamps) is always looked up with its time, and expires when the watermark
passes. So each slice of time has tables of its own. A slice expires by dropping its tables from the manifest; no other
row is touched. The read-modify-write store does here what FlowKV §4.1 does for appended values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.event_time.slices import assign, group
from millpond.layout import NEVER
from millpond.time_slices import TimeSlice

_TARGET_SLICES = 32
"""Slices that one batch adds, at most, roughly; with more live slices than this, new ones get wider."""


class SliceAssigner:
    """Assigns rows to the live slices of one operator's state, which are disjoint and in order.

    A slice holds one grain, as a rule. It holds several when a batch brings very many, or very many are live.

    Args:
        grain: microseconds of the smallest slice: the pane of a window. origin: start of any grain.
        live: the existing slices.
    """

    def __init__(self, grain: int, origin: int = 0, live: Iterable[TimeSlice] = ()) -> None:
        self._grain = grain
        self._origin = origin
        self.live: list[TimeSlice] = []
        self._set(live)

    def _set(self, live: Iterable[TimeSlice]) -> None:
        self.live = sorted(set(live))
        self._lows = np.array([slice_.low for slice_ in self.live], np.int64)
        self._lasts = np.array([slice_.last for slice_ in self.live], np.int64)

    def divide(self, times: NDArray[np.int64]) -> Iterator[tuple[TimeSlice, NDArray[np.int64] | None]]:
        """Divide rows by slice, adding missing slices; yields each slice's row positions (None: all rows)."""
        if not len(times):
            return
        numbers = np.empty(len(times), np.int32)
        # Most batches have times of existing slices only; slices are added only if a row found none.
        if assign(times, self._lows, self._lasts, numbers):
            self._add(np.unique(times[numbers < 0]))
            assign(times, self._lows, self._lasts, numbers)
        # Rows of one slice are passed on as they are, without a copy.
        if (numbers == numbers[0]).all():
            yield self.live[int(numbers[0])], None
            return
        starts = np.empty(len(self.live) + 1, np.int64)
        order = np.empty(len(times), np.int64)
        group(numbers, starts, order)
        live = self.live
        for number in np.flatnonzero(np.diff(starts)).tolist():
            yield live[number], order[starts[number] : starts[number + 1]]

    def divide_existing(self, times: NDArray[np.int64]) -> Iterator[tuple[TimeSlice, NDArray[np.int64]]]:
        """Divide rows by existing slice, without adding any; yields each slice's row positions."""
        numbers = np.empty(len(times), np.int32)
        if len(times):
            assign(times, self._lows, self._lasts, numbers)
        for number in np.unique(numbers[numbers >= 0]).tolist():
            yield self.live[number], np.flatnonzero(numbers == number)

    def _add(self, times: NDArray[np.int64]) -> None:
        """Add slices for sorted times that no live slice covers."""
        # Rows without time never expire, so they have a slice of their own.
        added = [TimeSlice(NEVER, NEVER)] if times[-1] == NEVER else []
        grains = np.unique((times[times != NEVER] - self._origin) // self._grain)
        lows = grains * self._grain + self._origin
        # The more slices are live, the more grains a new slice spans, so that their number stays bounded.
        min_grains = 1 << min(len(self.live) // _TARGET_SLICES, 16)
        before = np.searchsorted(self._lows, lows, "right")
        # Grains that share a slice, so that one batch adds about `_TARGET_SLICES` slices.
        grains_per_slice = -(-len(grains) // _TARGET_SLICES)
        begin = 0
        while begin < len(grains):
            # Neighbours share a slice if there are many, but no slice that exists may lie between them.
            end = min(begin + grains_per_slice, int(np.searchsorted(before, before[begin], "right")))
            following = self.live[int(before[begin])].low if before[begin] < len(self.live) else NEVER
            following = min(following, int(lows[end])) if end < len(lows) else following
            past = max(int(lows[end - 1]) + self._grain, int(lows[begin]) + min_grains * self._grain)
            # The slice before may end inside this grain; live slices must not overlap.
            first = max(int(lows[begin]), self.live[before[begin] - 1].last + 1) if before[begin] else int(lows[begin])
            added.append(TimeSlice(first, min(past, following) - 1))
            begin = end
        self._set([*self.live, *added])

    def drop(self, until: int) -> list[TimeSlice]:
        """Remove the slices that end at or before a time, and return them."""
        closed = [slice_ for slice_ in self.live if slice_.last <= until and slice_.last != NEVER]
        if closed:
            self._set(slice_ for slice_ in self.live if slice_ not in closed)
        return closed

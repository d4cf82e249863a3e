"""Buckets of event time, so that rows that expire together are stored together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millpond.layout import NEVER, Rows
from millpond.stores.ordered.layout import OrderedLayout
from millpond.stores.ordered.merge import TimeInterval
from millpond.stores.ordered.parts import BEGINNING, Part

_WHOLE_SHIFT = 63  # all times in one bucket
_LIVE_BUCKETS = 8  # live buckets at a time, roughly
_MAX_BUCKETS = 16  # rows of more buckets than this are not split, or parts would be small


class TimeBuckets:
    """The time buckets of a table: 2ᵏ microseconds long, with k such that a few are live at a time.

    While nothing expires, there is one bucket. Later the length follows from the interval between the expired time and
    the newest one. Short buckets nest within longer ones, so a change of length only regroups parts.

    Attributes:
        shift: k.
    """

    def __init__(self) -> None:
        self.shift = _WHOLE_SHIFT

    def choose_length(self, parts: Sequence[Part], expired: int) -> None:
        """Choose the bucket length for the parts and the time up to which rows have expired."""
        # For a file that also has rows without time, the newest time of its other rows is unknown.
        known = (part.newest for part in parts if part.rows is not None or not part.timeless)
        front = max(known, default=BEGINNING)
        if expired == BEGINNING or front <= expired:
            return
        # At least 2¹⁰ µs, about a millisecond.
        shift = min(_WHOLE_SHIFT, max(10, ((front - expired) // _LIVE_BUCKETS).bit_length()))
        # Lengthen at once, but shorten by two steps at least, so that the length does not oscillate.
        if shift > self.shift or shift < self.shift - 1:
            self.shift = shift

    def bucket_of(self, part: Part) -> int | None:
        """Return the bucket of a part, or None if its rows belong to several."""
        first, last = part.oldest >> self.shift, part.newest >> self.shift
        if part.oldest > part.newest:  # only rows without time
            return NEVER
        return first if first == last and not (part.timeless and self.shift < _WHOLE_SHIFT) else None

    def intervals(self, parts: Sequence[Part], expired: int) -> list[TimeInterval]:
        """Return the time intervals of the parts' live buckets; one interval for all times if there are many."""
        first = max(min(part.oldest for part in parts), expired + 1)
        last = max(part.newest for part in parts)
        timeless = any(part.timeless for part in parts)
        if first == BEGINNING or last - first >= _MAX_BUCKETS << self.shift or self.shift == _WHOLE_SHIFT:
            return [TimeInterval(expired)]
        intervals = [
            TimeInterval(max(expired, (number << self.shift) - 1), ((number + 1) << self.shift) - 1)
            for number in range(first >> self.shift, (last >> self.shift) + 1)
        ]
        # The last interval is for rows without time, and for rows of files that are later than `newest` (see `Part`).
        return [*intervals, TimeInterval(intervals[-1].until if intervals else expired)] if timeless else intervals

    def should_split(self, parts: Sequence[Part]) -> bool:
        """Return whether parts that span several buckets should be cut: only if their times span few buckets."""
        first, last = min(part.oldest for part in parts), max(part.newest for part in parts)
        return self.shift < _WHOLE_SHIFT and first > BEGINNING and last - first < _MAX_BUCKETS << self.shift

    def split(self, rows: Rows, layout: OrderedLayout) -> Iterator[Rows]:
        """Split sorted rows by bucket."""
        if self.shift == _WHOLE_SHIFT:
            yield rows
            return
        times = layout.times(rows)
        numbers = times >> self.shift
        numbers[times == NEVER] = NEVER
        distinct = np.unique(numbers)
        if not 1 < len(distinct) <= _MAX_BUCKETS:
            yield rows
            return
        for number in distinct.tolist():
            yield rows.take(numbers == number)

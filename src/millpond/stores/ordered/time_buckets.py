"""Buckets of event time, so that what expires together lies together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millpond.layout import NEVER, Rows
from millpond.stores.ordered.layout import OrderedLayout
from millpond.stores.ordered.merge import Window
from millpond.stores.ordered.parts import BEGINNING, Part

_WHOLE = 63  # all times in one bucket
_LIVE = 8  # buckets that are in use at a time, about
_MOST = 16


class TimeBuckets:
    """The time buckets of a table: 2ᵏ microseconds long, so many that a few are live at a time.

    As long as nothing expires there is one bucket; later their length follows from the time between what has expired
    and what comes. Those of one length stand within those of a greater one, so a change only groups parts anew.

    Attributes:
        shift: k.
    """

    def __init__(self) -> None:
        self.shift = _WHOLE

    def choose(self, parts: Sequence[Part], expired: int) -> None:
        """Choose the length for parts and the time up to which rows have expired."""
        front = max((part.newest for part in parts), default=BEGINNING)
        if expired == BEGINNING or front <= expired:
            return
        wanted = min(_WHOLE, max(10, ((front - expired) // _LIVE).bit_length()))
        if wanted > self.shift or wanted < self.shift - 1:
            self.shift = wanted

    def of(self, part: Part) -> int | None:
        """The bucket of a part; None if it has rows of several."""
        first, last = part.oldest >> self.shift, part.newest >> self.shift
        if part.oldest > part.newest:  # only rows without time
            return NEVER
        return first if first == last and not (part.timeless and self.shift < _WHOLE) else None

    def windows(self, parts: Sequence[Part], expired: int) -> list[Window]:
        """The buckets of some parts that are not expired; one window for all times if they are many."""
        first = max(min(part.oldest for part in parts), expired + 1)
        last = max(part.newest for part in parts)
        timeless = any(part.timeless for part in parts)
        if first == BEGINNING or last - first >= _MOST << self.shift or self.shift == _WHOLE:
            return [Window(expired)]
        windows = [
            Window(max(expired, (number << self.shift) - 1), ((number + 1) << self.shift) - 1)
            for number in range(first >> self.shift, (last >> self.shift) + 1)
        ]
        return [*windows, Window(NEVER - 1)] if timeless else windows

    def cut_up(self, parts: Sequence[Part]) -> bool:
        """Whether parts that have rows of several buckets should be cut: if they are many, or will be cut in few."""
        first, last = min(part.oldest for part in parts), max(part.newest for part in parts)
        return self.shift < _WHOLE and first > BEGINNING and last - first < _MOST << self.shift

    def cut(self, rows: Rows, layout: OrderedLayout) -> Iterator[Rows]:
        """Rows in order, cut by buckets."""
        if self.shift == _WHOLE:
            yield rows
            return
        times = layout.times(rows)
        numbers = times >> self.shift
        numbers[times == NEVER] = NEVER
        distinct = np.unique(numbers)
        if not 1 < len(distinct) <= _MOST:
            yield rows
            return
        for number in distinct.tolist():
            yield Rows(np.ascontiguousarray(rows.words[numbers == number]), rows.heap)

"""Things that lie one after the other in spans, such as the rows of each key."""

from __future__ import annotations

import numpy as np

from millpond.layout import Ints


def bounds_of(sizes: Ints) -> Ints:
    """Where spans of some sizes begin, and where the last one ends."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def spans(bounds: Ints, which: Ints) -> tuple[Ints, Ints]:
    """The members of some spans one after another, and where each begins among them (and the last one ends)."""
    starts = bounds[which]
    first = bounds_of(bounds[which + 1] - starts)
    return np.arange(first[-1]) + np.repeat(starts - first[:-1], np.diff(first)), first

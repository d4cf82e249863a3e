"""Offsets of consecutive spans, such as the rows of each key."""

from __future__ import annotations

import numpy as np

from millpond.layout import Ints


def bounds_of(sizes: Ints) -> Ints:
    """Return the offsets of consecutive spans of the given sizes, with the end of the last one."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def spans(bounds: Ints, which: Ints) -> tuple[Ints, Ints]:
    """Return the members of the chosen spans in turn, and their offsets, with the end of the last one."""
    starts = bounds[which]
    first = bounds_of(bounds[which + 1] - starts)
    return np.arange(first[-1]) + np.repeat(starts - first[:-1], np.diff(first)), first

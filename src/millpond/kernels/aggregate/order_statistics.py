"""Percentiles and modes of many groups, over rows sorted by group and value."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import FLOATS, INTS

Array = NDArray[Any]

CONTINUOUS, DISCRETE, LOWER = 0, 1, 2
"""Rule between two values: interpolate; the first whose cumulative distribution suffices; the lower."""


@inlined
def _at(totals: Array, begin: int, end: int, count: int) -> int:
    """Find the first row of a group up to which at least `count` values are counted."""
    low, high = begin, end - 1
    before = totals[begin - 1] if begin > 0 else 0
    while low < high:
        middle = (low + high) // 2
        if totals[middle] - before >= count:
            high = middle
        else:
            low = middle + 1
    return low


@kernel(types.void(INTS, INTS, types.float64, types.boolean, types.int64, INTS, INTS, FLOATS))
def percentile(
    starts: Array,
    totals: Array,
    share: float,
    reverse: bool,
    kind: int,
    lower: Array,
    upper: Array,
    fraction: Array,
) -> None:
    """Find the rows and the interpolation weight of each group's percentile.

    Args:
        starts: first row of each group, and the number of rows. Rows are sorted by group, then by value.
        totals: cumulative frequencies of all rows.
        share: the percentage, from 0 to 1.
        reverse: count from the greatest value down.
        kind: the rule between two values.
        lower, upper: filled with rows, −1 for groups without rows.
        fraction: filled with the weight of `upper`, from 0 to 1.
    """
    for group in range(len(starts) - 1):
        begin, end = starts[group], starts[group + 1]
        lower[group] = upper[group] = -1
        fraction[group] = 0.0
        if begin == end:
            continue
        count = totals[end - 1] - (totals[begin - 1] if begin > 0 else 0)
        position = np.float64(count - 1) * share
        low = np.int64(np.floor(position))
        high = np.int64(np.ceil(position))
        if kind == DISCRETE:
            low = high = np.int64(max(np.ceil(np.float64(count) * share), 1.0)) - 1
        elif kind == LOWER:
            high = low
        elif high != low:
            fraction[group] = position - np.float64(low)
        if reverse:
            low, high = count - 1 - low, count - 1 - high
        lower[group] = _at(totals, begin, end, low + 1)
        upper[group] = _at(totals, begin, end, high + 1)


@kernel(types.void(INTS, INTS, types.boolean, INTS))
def mode(starts: Array, runs: Array, greatest: bool, out: Array) -> None:
    """Find the first row of each group's longest run of equal values; of equally long runs the first, or the last.

    Args:
        starts: as for `percentile`.
        runs: a number for each row that is equal exactly for equal values of a group.
        greatest: take the last of equally long runs.
        out: filled with rows, −1 for groups without rows.
    """
    for group in range(len(starts) - 1):
        begin, end = starts[group], starts[group + 1]
        out[group] = -1
        longest = 0
        row = begin
        while row < end:
            stop = row + 1
            while stop < end and runs[stop] == runs[row]:
                stop += 1
            if stop - row > longest or (greatest and stop - row == longest):
                longest = stop - row
                out[group] = row
            row = stop

"""Rows by slices of event time."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import I64, INTS, INTS_IN, SHORTS, SHORTS_IN

Array = NDArray[Any]

_FIRST = np.uint64(0xFF51AFD7ED558CCD)
_SECOND = np.uint64(0xC4CEB9FE1A85EC53)
_33 = np.uint64(33)


@kernel(I64(INTS_IN, INTS_IN, INTS_IN, SHORTS))
def assign(times: Array, lows: Array, lasts: Array, out: Array) -> int:
    """The slice of each row, -1 without one.

    Args:
        times: of the rows.
        lows, lasts: first and last time of each slice, in order.
        out: filled with the slices.

    Returns:
        How many rows have none.
    """
    missing = 0
    at = -1
    low, last = np.int64(1), np.int64(0)
    for i in range(times.size):
        time = times[i]
        if time < low or time > last:  # not in the slice of the row before
            at = np.searchsorted(lows, time, "right") - 1
            if at < 0 or time > lasts[at]:
                out[i] = -1
                missing += 1
                low, last = np.int64(1), np.int64(0)
                continue
            low, last = lows[at], lasts[at]
        out[i] = at
    return missing


@kernel(types.void(SHORTS_IN, INTS, INTS))
def group(slices: Array, starts: Array, order: Array) -> None:
    """Positions of the rows slice by slice, in their order within each.

    Args:
        slices: of the rows, none negative.
        starts: filled with where each slice begins in `order`; one more than there are slices.
        order: filled with the positions.
    """
    starts[:] = 0
    for i in range(slices.size):
        starts[slices[i] + 1] += 1
    for s in range(1, starts.size):
        starts[s] += starts[s - 1]
    for i in range(slices.size):
        at = slices[i]
        order[starts[at]] = i
        starts[at] += 1
    for s in range(starts.size - 1, 0, -1):
        starts[s] = starts[s - 1]
    starts[0] = 0


@kernel(types.void(INTS_IN, INTS_IN, I64, INTS))
def spread(hashes: Array, times: Array, bits: int, out: Array) -> None:
    """Hashes whose lower bits also depend on a time; doing it twice gives the hash back.

    Rows of one key and different times then lie apart, but within the same 2^-bits of the axis.

    Args:
        bits: highest bits of the hash that stay.
    """
    mask = ~np.uint64(0) >> np.uint64(bits)
    for i in range(hashes.size):
        mixed = (np.uint64(times[i]) ^ (np.uint64(times[i]) >> _33)) * _FIRST
        mixed = (mixed ^ (mixed >> _33)) * _SECOND
        out[i] = np.int64(np.uint64(hashes[i]) ^ ((mixed ^ (mixed >> _33)) & mask))

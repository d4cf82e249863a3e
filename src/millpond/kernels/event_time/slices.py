"""Assignment of rows to slices of event time."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import I64, INTS, INTS_IN, SHORTS, SHORTS_IN
from millpond.kernels.mix import mix64

Array = NDArray[Any]


@kernel(I64(INTS_IN, INTS_IN, INTS_IN, SHORTS))
def assign(times: Array, lows: Array, lasts: Array, out: Array) -> int:
    """Find the slice of each row.

    Args:
        times: of the rows.
        lows, lasts: first and last time of each slice, ascending.
        out: filled with the slices, −1 for rows outside of all slices.

    Returns:
        Number of rows outside of all slices.
    """
    missing = 0
    slice_ = -1
    low, last = np.int64(1), np.int64(0)
    for i in range(times.size):
        time = times[i]
        if time < low or time > last:  # not in the slice of the previous row
            slice_ = np.searchsorted(lows, time, "right") - 1
            if slice_ < 0 or time > lasts[slice_]:
                out[i] = -1
                missing += 1
                low, last = np.int64(1), np.int64(0)
                continue
            low, last = lows[slice_], lasts[slice_]
        out[i] = slice_
    return missing


@kernel(types.void(SHORTS_IN, INTS, INTS))
def group(slices: Array, starts: Array, order: Array) -> None:
    """Group row positions by slice, in row order (counting sort).

    Args:
        slices: of the rows, not negative.
        starts: filled with the start of each slice in `order`; one entry more than slices.
        order: filled with the positions.
    """
    starts[:] = 0
    for i in range(slices.size):
        starts[slices[i] + 1] += 1
    for s in range(1, starts.size):
        starts[s] += starts[s - 1]
    for i in range(slices.size):
        slice_ = slices[i]
        order[starts[slice_]] = i
        starts[slice_] += 1
    for s in range(starts.size - 1, 0, -1):
        starts[s] = starts[s - 1]
    starts[0] = 0


@kernel(types.void(INTS_IN, INTS_IN, I64, INTS))
def spread(hashes: Array, times: Array, bits: int, out: Array) -> None:
    """Mix a time into the lower bits of hashes; applying it twice restores the hash.

    Rows of one key with different times are then spread, but within the same 2^-bits of the hash space.

    Args:
        hashes, times: of the rows.
        bits: number of top bits of the hash that are kept.
        out: filled with the mixed hashes.
    """
    mask = ~np.uint64(0) >> np.uint64(bits)
    for i in range(hashes.size):
        out[i] = np.int64(np.uint64(hashes[i]) ^ (mix64(np.uint64(times[i])) & mask))

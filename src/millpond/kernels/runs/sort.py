"""Radix sort of hashes over the bits in which they differ."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel

_DIGIT = 11
_SIZE = 1 << _DIGIT
_PASSES = 3


@kernel("int64(uint64[::1], uint64[::1], int64[::1])")
def sort_hashes(hashes: NDArray[np.uint64], ordered: NDArray[np.uint64], order: NDArray[np.int64]) -> int:
    """Sort hashes into `ordered`, and the positions from which they come into `order` (stable).

    Hashes of one partition share their top bits, which are skipped. Three digits of 11 bits then place nearly all of
    them, and insertion sort the rest. Hashes too clustered for that are sorted by all their digits.

    Returns:
        Number of digit passes.
    """
    n = len(hashes)
    if n == 0:
        return 0
    low = hashes[0]
    high = hashes[0]
    sorted_already = True
    for i in range(1, n):
        if hashes[i] < hashes[i - 1]:
            sorted_already = False
        low = min(low, hashes[i])
        high = max(high, hashes[i])
    if sorted_already:
        for i in range(n):
            ordered[i] = hashes[i]
            order[i] = i
        return 0
    bits = 0
    span = high - low
    while bits < 64 and (span >> np.uint64(bits)) != np.uint64(0):
        bits += 1
    bottom = max(bits - _DIGIT * _PASSES, 0)
    passes = 0
    spare = np.empty(n, np.uint64)
    spare_order = np.empty(n, np.int64)
    for i in range(n):
        ordered[i] = hashes[i]
        order[i] = i
    while True:
        shift = bottom
        while shift < bits:
            starts = np.zeros(_SIZE + 1, np.int64)
            for i in range(n):
                starts[np.int64(((ordered[i] - low) >> np.uint64(shift)) & np.uint64(_SIZE - 1)) + 1] += 1
            for d in range(_SIZE):
                starts[d + 1] += starts[d]
            for i in range(n):
                d = np.int64(((ordered[i] - low) >> np.uint64(shift)) & np.uint64(_SIZE - 1))
                target = starts[d]
                starts[d] = target + 1
                spare[target] = ordered[i]
                spare_order[target] = order[i]
            for i in range(n):
                ordered[i] = spare[i]
                order[i] = spare_order[i]
            shift += _DIGIT
            passes += 1
        if bottom == 0:
            return passes
        moves = 0
        limit = 4 * n
        for i in range(1, n):
            h = ordered[i]
            if ordered[i - 1] <= h:
                continue
            source = order[i]
            j = i
            while j > 0 and ordered[j - 1] > h:
                ordered[j] = ordered[j - 1]
                order[j] = order[j - 1]
                j -= 1
            ordered[j] = h
            order[j] = source
            moves += i - j
            if moves > limit:
                break
        if moves <= limit:
            return passes
        # The order so far is stable within equal hashes only if all digits were used: restart from the input.
        bottom = 0
        for i in range(n):
            ordered[i] = hashes[i]
            order[i] = i


def order_by_hash(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the hashes in ascending order, and the positions from which they come."""
    ordered = np.empty(len(hashes), np.uint64)
    order = np.empty(len(hashes), np.int64)
    sort_hashes(np.ascontiguousarray(hashes), ordered, order)
    return ordered, order

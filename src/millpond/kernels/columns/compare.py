"""Comparison of two values, in the order of Spark's ORDER BY.

NaN is the greatest number, and −0.0 equals 0.0. Byte strings compare as unsigned bytes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper
from millpond.kernels.memory import HALF
from millpond.kernels.pointers import advance, word_at
from millpond.layout import INLINE, LENGTH


@helper
def less_floats(left, right):
    """Return whether a double is less than another."""
    return left < right or (right != right and left == left)


@helper
def less_pairs(left_low, left_high, right_low, right_high):
    """Return whether a 128-bit integer, given by its lower and its upper word, is less than another."""
    return np.int64(left_high) < np.int64(right_high) or (left_high == right_high and left_low < right_low)


@helper
def _swapped(bits):
    """Reverse the bytes of a word, so that comparison of words equals that of their bytes."""
    bits = ((bits & np.uint64(0x00FF00FF00FF00FF)) << np.uint64(8)) | (
        (bits >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    )
    bits = ((bits & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(16)) | (
        (bits >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    )
    return (bits << HALF) | (bits >> HALF)


@helper
def compare_bytes(left, left_tail, left_heap, right, right_tail, right_heap):
    """Compare two packed byte strings, given by their words and the addresses of their heaps.

    Returns:
        A negative number, zero or a positive number.
    """
    left_size = np.int64(left & LENGTH)
    right_size = np.int64(right & LENGTH)
    a, b = left >> HALF, right >> HALF
    if a == b:
        # Bytes 4 to 11. Zeros pad inline values; where the padded values are equal, the shorter one is less.
        left_at, right_at = advance(left_heap, np.int64(left_tail)), advance(right_heap, np.int64(right_tail))
        a = left_tail if left_size <= INLINE else word_at(left_at, 4)
        b = right_tail if right_size <= INLINE else word_at(right_at, 4)
        common = min(left_size, right_size)
        k = INLINE
        while a == b and k < common:
            # The last word ends where the shorter value ends, and overlaps bytes that are known to be equal.
            a, b = word_at(left_at, min(k, common - 8)), word_at(right_at, min(k, common - 8))
            k += 8
    if a != b:
        return -1 if _swapped(a) < _swapped(b) else 1
    return left_size - right_size

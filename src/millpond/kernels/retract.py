"""Aggregates from which rows can be taken back: signed counts, wide sums, compensated sums; and images from before."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.hot_state import helper, kernel
from millpond.kernels.memory import bits_float, float_bits

_FIRST = "void(uint64[:, ::1], int64[::1], int64, int64, "
_REST = "Array(uint8, 1, 'C', readonly=True), int8[::1])"


@kernel(_FIRST + _REST)
def count(words, rows, start, offset, valid, signs):
    """Add each row's sign to a count; `valid` (empty: all) says which rows count."""
    for i in range(len(rows)):
        if len(valid) == 0 or valid[start + i] != 0:
            words[rows[i], offset] += np.uint64(np.int64(signs[start + i]))


@helper
def _add(words, row, offset, low, high):
    """Add a 128-bit number to the one in two words."""
    total = words[row, offset] + low
    carry = np.uint64(1) if total < low else np.uint64(0)
    words[row, offset] = total
    words[row, offset + 1] = words[row, offset + 1] + high + carry


@helper
def _signed(low, high, sign):
    """A 128-bit number, or its negative."""
    if sign > 0:
        return low, high
    low = ~low + np.uint64(1)
    high = ~high + (np.uint64(1) if low == np.uint64(0) else np.uint64(0))
    return low, high


@kernel(_FIRST + "Array(int64, 1, 'C', readonly=True), " + _REST)
def sum_words(words, rows, start, offset, values, valid, signs):
    """Add or take back integers: a 128-bit sum in two words, the number of values in the third."""
    for i in range(len(rows)):
        if len(valid) != 0 and valid[start + i] == 0:
            continue
        sign = np.int64(signs[start + i])
        low, high = _signed(np.uint64(values[start + i]), np.uint64(values[start + i] >> 63), sign)
        _add(words, rows[i], offset, low, high)
        words[rows[i], offset + 2] += np.uint64(sign)


@kernel(_FIRST + "Array(uint64, 2, 'C', readonly=True), " + _REST)
def sum_pairs(words, rows, start, offset, values, valid, signs):
    """As `sum_words` for 128-bit numbers."""
    for i in range(len(rows)):
        if len(valid) != 0 and valid[start + i] == 0:
            continue
        sign = np.int64(signs[start + i])
        low, high = _signed(values[start + i, 0], values[start + i, 1], sign)
        _add(words, rows[i], offset, low, high)
        words[rows[i], offset + 2] += np.uint64(sign)


@kernel(_FIRST + "Array(float64, 1, 'C', readonly=True), " + _REST)
def sum_floats(words, rows, start, offset, values, valid, signs):
    """Add or take back doubles, in six words: sum, compensation, number of values, of NaNs, of ∞ and of −∞.

    The sum is compensated as Neumaier has it, so that what was added and taken back leaves next to nothing.
    """
    for i in range(len(rows)):
        if len(valid) != 0 and valid[start + i] == 0:
            continue
        row = rows[i]
        sign = np.uint64(np.int64(signs[start + i]))
        value = values[start + i]
        words[row, offset + 2] += sign
        if value != value:
            words[row, offset + 3] += sign
        elif value == np.inf:
            words[row, offset + 4] += sign
        elif value == -np.inf:
            words[row, offset + 5] += sign
        else:
            if signs[start + i] < 0:
                value = -value
            old = bits_float(words[row, offset])
            total = old + value
            lost = (old - total) + value if abs(old) >= abs(value) else (value - total) + old
            words[row, offset] = float_bits(total)
            words[row, offset + 1] = float_bits(bits_float(words[row, offset + 1]) + lost)


@kernel("int64(uint64[:, ::1], int64[::1], int64, uint64, int64[:, ::1], int64[::1])")
def snapshot(words, rows, stamp, now, columns, fresh):
    """Copy columns of rows not stamped with this batch yet, and stamp them.

    Args:
        stamp: the word of the stamp. now: of this batch.
        columns: for each its first word, how many, the word and the bit of its null; and the same of the copy. Where
            the copy takes no words, only the null is copied.
        fresh: filled with the rows.

    Returns:
        How many rows were copied.
    """
    found = 0
    for i in range(len(rows)):
        row = rows[i]
        if words[row, stamp] == now:
            continue
        words[row, stamp] = now
        fresh[found] = row
        found += 1
        for c in range(len(columns)):
            for w in range(columns[c, 1]):
                words[row, columns[c, 4] + w] = words[row, columns[c, 0] + w]
            null = (words[row, columns[c, 2]] >> np.uint64(columns[c, 3])) & np.uint64(1)
            bit = np.uint64(1) << np.uint64(columns[c, 6])
            if null != 0:
                words[row, columns[c, 5]] |= bit
            else:
                words[row, columns[c, 5]] &= ~bit
    return found

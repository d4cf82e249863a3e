"""Aggregates that support retraction: signed counts and wide sums; and snapshots of rows before a batch."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel

_FIRST = "void(uint64[:, ::1], int64[::1], int64, int64, "
_REST = "Array(uint8, 1, 'C', readonly=True), int8[::1])"


@kernel(_FIRST + _REST)
def count(words, rows, start, offset, valid, signs):
    """Add each row's sign to a count; `valid` (empty: all) selects the rows."""
    for i in range(len(rows)):
        if len(valid) == 0 or valid[start + i] != 0:
            words[rows[i], offset] += np.uint64(np.int64(signs[start + i]))


@helper
def _add(words, row, offset, limbs, low, high, sign):
    """Add a signed 128-bit number to a sum of `limbs` words."""
    above = np.uint64(np.int64(high) >> 63)
    carry = np.uint64(0)
    if sign < 0:
        low, high, above, carry = ~low, ~high, ~above, np.uint64(1)
    for k in range(limbs):
        part = low if k == 0 else high if k == 1 else above
        old = words[row, offset + k]
        total = old + part
        over = np.uint64(1) if total < part else np.uint64(0)
        words[row, offset + k] = total + carry
        carry = over + (np.uint64(1) if total + carry < carry else np.uint64(0))


@kernel(_FIRST + "Array(int64, 1, 'C', readonly=True), " + _REST)
def sum_words(words, rows, start, offset, values, valid, signs):
    """Add or retract integers: a 128-bit sum in two words, the number of values in the third."""
    for i in range(len(rows)):
        if len(valid) != 0 and valid[start + i] == 0:
            continue
        sign = np.int64(signs[start + i])
        _add(words, rows[i], offset, 2, np.uint64(values[start + i]), np.uint64(values[start + i] >> 63), sign)
        words[rows[i], offset + 2] += np.uint64(sign)


@kernel(_FIRST + "Array(int64, 1, 'C', readonly=True), " + _REST)
def bit_xor(words, rows, start, offset, values, valid, signs):
    """Combine bits by exclusive or, which is its own inverse; the number of values is in the second word."""
    for i in range(len(rows)):
        if len(valid) == 0 or valid[start + i] != 0:
            words[rows[i], offset] ^= np.uint64(values[start + i])
            words[rows[i], offset + 1] += np.uint64(np.int64(signs[start + i]))


@kernel(_FIRST + "Array(uint64, 2, 'C', readonly=True), " + _REST)
def sum_pairs(words, rows, start, offset, values, valid, signs):
    """Add or retract 128-bit numbers: a 192-bit sum in three words, the number of values in the fourth."""
    for i in range(len(rows)):
        if len(valid) != 0 and valid[start + i] == 0:
            continue
        sign = np.int64(signs[start + i])
        _add(words, rows[i], offset, 3, values[start + i, 0], values[start + i, 1], sign)
        words[rows[i], offset + 3] += np.uint64(sign)


@kernel("void(uint64[:, ::1], int64[::1], int64, uint64[:, ::1])")
def add_numbers(words, rows, offset, numbers):
    """Add numbers of `numbers.shape[1]` words, least significant first, in two's complement."""
    for i in range(len(rows)):
        carry = np.uint64(0)
        for k in range(numbers.shape[1]):
            part = numbers[i, k]
            total = words[rows[i], offset + k] + part
            over = np.uint64(1) if total < part else np.uint64(0)
            total += carry
            words[rows[i], offset + k] = total
            carry = over + (np.uint64(1) if total < carry else np.uint64(0))


@kernel("int64(uint64[:, ::1], int64[::1], int64, uint64, int64[:, ::1], int64[::1])")
def snapshot(words, rows, stamp, now, columns, fresh):
    """Copy columns of the rows that the batch has not copied yet, and set their stamp.

    Args:
        words, rows: the table's rows, and the ids of those that the batch changes.
        stamp: the word of the stamp.
        now: the batch's stamp.
        columns: int64[c, 7]: first word, number of words, null word and null bit of a column; then first word, null
            word and null bit of its copy. With 0 words, only the null is copied.
        fresh: filled with the copied rows.

    Returns:
        Number of copied rows.
    """
    copied = 0
    for i in range(len(rows)):
        row = rows[i]
        if words[row, stamp] == now:
            continue
        words[row, stamp] = now
        fresh[copied] = row
        copied += 1
        for c in range(len(columns)):
            for w in range(columns[c, 1]):
                words[row, columns[c, 4] + w] = words[row, columns[c, 0] + w]
            null = (words[row, columns[c, 2]] >> np.uint64(columns[c, 3])) & np.uint64(1)
            bit = np.uint64(1) << np.uint64(columns[c, 6])
            if null != 0:
                words[row, columns[c, 5]] |= bit
            else:
                words[row, columns[c, 5]] &= ~bit
    return copied

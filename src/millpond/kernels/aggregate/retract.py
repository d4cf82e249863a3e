"""Aggregates that support retraction: signed counts and wide sums; and snapshots of rows before a batch."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import types

from millpond.kernels.aggregate.fold import fold
from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import INTS_IN, WORDS_IN
from millpond.kernels.pointers import put_word, word

SIGNS = types.Array(types.int8, 1, "C")
"""1 or −1 for every row of the batch."""


@fold(SIGNS)
def count(row, column, sign):
    """Add each row's sign to a count."""
    put_word(row, column.offset, word(row, column.offset) + np.uint64(np.int64(sign)))


@helper
def _add(row, column, limbs, low, high, sign):
    """Add a signed 128-bit number to a sum of `limbs` words, and its sign to the number of values in the next word."""
    above = np.uint64(np.int64(high) >> 63)
    carry = np.uint64(0)
    count = word(row, column.offset + limbs)
    put_word(row, column.offset + limbs, count + np.uint64(np.int64(sign)))
    if sign < 0:  # −x is ~x + 1; the 1 is the first carry
        low, high, above, carry = ~low, ~high, ~above, np.uint64(1)
    for k in range(limbs):
        part = low if k == 0 else high if k == 1 else above
        total = word(row, column.offset + k) + part
        over = np.uint64(1) if total < part else np.uint64(0)
        put_word(row, column.offset + k, total + carry)
        carry = over + (np.uint64(1) if total + carry < carry else np.uint64(0))


@fold(INTS_IN, SIGNS)
def sum_words(row, column, value, sign):
    """Add or retract integers: a 128-bit sum in two words, the number of values in the third."""
    _add(row, column, 2, np.uint64(value), np.uint64(value >> 63), sign)


@fold(WORDS_IN, SIGNS)
def sum_pairs(row, column, low, high, sign):
    """Add or retract 128-bit numbers: a 192-bit sum in three words, the number of values in the fourth."""
    _add(row, column, 3, low, high, sign)


@fold(INTS_IN, SIGNS)
def bit_xor(row, column, value, sign):
    """Combine bits by exclusive or, which is its own inverse; the number of values is in the second word."""
    put_word(row, column.offset, word(row, column.offset) ^ np.uint64(value))
    put_word(row, column.offset + 1, word(row, column.offset + 1) + np.uint64(np.int64(sign)))


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

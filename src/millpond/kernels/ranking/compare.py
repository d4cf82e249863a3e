"""Comparison of rows by columns, in the order of Spark's ORDER BY.

A column has a descriptor of five words: its physical type, its first word in a row, the null word and the number of
the null bit, and flags. `kernels.columns.compare` compares the values of each type.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

import numpy as np

from millpond.kernels.columns.compare import compare_bytes, less_floats, less_pairs
from millpond.kernels.compiled import kernel
from millpond.kernels.memory import bits_float
from millpond.kernels.pointers import advance, word

COLUMN = 5
"""Words of a column's descriptor."""
INT, FLOAT, WIDE, BYTES = 0, 1, 2, 3
DESCENDING, NULLS_LAST = 1, 2

_ONE = np.uint64(1)


@kernel("int64(uint64, uint64, uint64, uint64, uint64, int64, int64)")
def compare_rows(left, left_heap, right, right_heap, columns, first, last):
    """Compare two rows by columns `first` to `last` (excluded) of a descriptor: negative, zero or positive.

    Args:
        left, right: addresses of the rows.
        left_heap, right_heap: addresses of their heaps.
        columns: address of the descriptor.
        first, last: the columns.
    """
    for c in range(first, last):
        descriptor = advance(columns, c * COLUMN * 8)
        kind = np.int64(word(descriptor, 0))
        offset = np.int64(word(descriptor, 1))
        null_word = np.int64(word(descriptor, 2))
        null_bit = word(descriptor, 3)
        flags = np.int64(word(descriptor, 4))
        left_null = (word(left, null_word) >> null_bit) & _ONE
        right_null = (word(right, null_word) >> null_bit) & _ONE
        if left_null != right_null:
            return 1 if (left_null != 0) == ((flags & NULLS_LAST) != 0) else -1
        if left_null != 0:
            continue
        a = word(left, offset)
        b = word(right, offset)
        if kind == INT:
            order = np.int64(np.int64(a) > np.int64(b)) - np.int64(np.int64(a) < np.int64(b))
        elif kind == FLOAT:
            x, y = bits_float(a), bits_float(b)
            order = np.int64(less_floats(y, x)) - np.int64(less_floats(x, y))
        elif kind == WIDE:
            high, other = word(left, offset + 1), word(right, offset + 1)
            order = np.int64(less_pairs(b, other, a, high)) - np.int64(less_pairs(a, high, b, other))
        else:
            order = compare_bytes(a, word(left, offset + 1), left_heap, b, word(right, offset + 1), right_heap)
        if order != 0:
            return -order if (flags & DESCENDING) != 0 else order
    return 0


@kernel("void(int64[::1], int64, int64, int64[::1], uint64, int64, uint64, uint64, int64)")
def sort_rows(positions, low, high, spare, rows, stride, heap, columns, count):
    """Sort `positions[low:high]`, row numbers, by all `count` columns of a descriptor (stable merge sort).

    Args:
        positions: row numbers.
        low, high: the range to sort.
        spare: scratch, as long as `positions`.
        rows: address of row 0.
        stride: bytes from one row to the next.
        heap: address of the rows' heap.
        columns, count: address of the descriptor, number of columns.
    """
    run = 8
    start = low
    while start < high:
        stop = min(start + run, high)
        for i in range(start + 1, stop):
            moved = positions[i]
            address = advance(rows, moved * stride)
            j = i
            while (
                j > start
                and compare_rows(address, heap, advance(rows, positions[j - 1] * stride), heap, columns, 0, count) < 0
            ):
                positions[j] = positions[j - 1]
                j -= 1
            positions[j] = moved
        start = stop
    while run < high - low:
        start = low
        while start + run < high:
            middle = start + run
            stop = min(middle + run, high)
            spare[start:middle] = positions[start:middle]
            i = start
            j = middle
            to = start
            while i < middle and j < stop:
                left = advance(rows, spare[i] * stride)
                right = advance(rows, positions[j] * stride)
                if compare_rows(left, heap, right, heap, columns, 0, count) <= 0:
                    positions[to] = spare[i]
                    i += 1
                else:
                    positions[to] = positions[j]
                    j += 1
                to += 1
            while i < middle:
                positions[to] = spare[i]
                i += 1
                to += 1
            start = stop
        run *= 2

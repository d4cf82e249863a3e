"""Comparison of rows by columns, in the order of Spark's ORDER BY.

A column has a descriptor of five words: its physical type, its first word in a row, the null word and the number of
the null bit, and flags. NaN is the greatest number, and −0.0 equals 0.0. Byte strings compare as unsigned bytes.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment,call-overload"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import HALF, bits_float
from millpond.kernels.pointers import advance, byte_at, word, word_at
from millpond.layout import INLINE, LENGTH

COLUMN = 5
"""Words of a column's descriptor."""
INT, FLOAT, WIDE, BYTES = 0, 1, 2, 3
DESCENDING, NULLS_LAST = 1, 2

_ONE = np.uint64(1)


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


@kernel("int64(uint64, uint64, uint64, uint64, uint64, uint64)")
def compare_bytes(left, left_tail, left_heap, right, right_tail, right_heap):
    """Compare two packed byte strings: negative, zero or positive."""
    a = _swapped(left >> HALF)
    b = _swapped(right >> HALF)
    if a != b:
        return -1 if a < b else 1
    left_size = np.int64(left & LENGTH)
    right_size = np.int64(right & LENGTH)
    if left_size <= INLINE and right_size <= INLINE:
        a = _swapped(left_tail)
        b = _swapped(right_tail)
        if a != b:
            return -1 if a < b else 1
        return left_size - right_size
    common = min(left_size, right_size)
    k = np.int64(4)
    if left_size > INLINE and right_size > INLINE:
        left_at = advance(left_heap, np.int64(left_tail))
        right_at = advance(right_heap, np.int64(right_tail))
        while k + 8 <= common:
            a = word_at(left_at, k)
            b = word_at(right_at, k)
            if a != b:
                return -1 if _swapped(a) < _swapped(b) else 1
            k += 8
    while k < common:
        shift = np.uint64(8 * (k - 4))
        if left_size > INLINE:
            x = np.int64(byte_at(advance(left_heap, np.int64(left_tail)), k))
        else:
            x = np.int64((left_tail >> shift) & np.uint64(255))
        if right_size > INLINE:
            y = np.int64(byte_at(advance(right_heap, np.int64(right_tail)), k))
        else:
            y = np.int64((right_tail >> shift) & np.uint64(255))
        if x != y:
            return x - y
        k += 1
    return left_size - right_size


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
        order = np.int64(0)
        if kind == INT:
            if a != b:
                order = -1 if np.int64(a) < np.int64(b) else 1
        elif kind == FLOAT:
            x = bits_float(a)
            y = bits_float(b)
            if x < y or (y != y and x == x):
                order = -1
            elif y < x or (x != x and y == y):
                order = 1
        elif kind == WIDE:
            high = np.int64(word(left, offset + 1))
            other = np.int64(word(right, offset + 1))
            if high != other:
                order = -1 if high < other else 1
            elif a != b:
                order = -1 if a < b else 1
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

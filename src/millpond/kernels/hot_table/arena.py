"""The arena of a hot table: long values in chunks of fixed size classes, with reuse of freed chunks.

Chunks are multiples of 16 bytes up to 1 KB, then have four sizes per doubling. Free chunks of a class form a list
linked through their first word. So freeing and allocating take a few nanoseconds, and no compaction is needed as long
as lengths stay similar.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.hot_table.state import (
    HEAP,
    HEAP_FREE,
    HEAP_TOP,
    SLAB,
    STRIDE,
)
from millpond.kernels.pointers import advance, copy_bytes, prefetch, put_word, word, word_at
from millpond.layout import INLINE, LENGTH

CLASSES = 192
"""Number of size classes, enough for values of up to 2⁴¹ bytes."""
ARENA_START = 16
"""First usable offset; offset 0 ends the free lists."""
_SMALL = 1024
_PREFETCH_DISTANCE = 32


@helper
def chunk_of(size):
    """Return class and bytes of the chunk for a value of `size` bytes."""
    if size <= _SMALL:
        number = (size + 15) >> 4
        return number, number << 4
    exponent = 10
    while (size - 1) >> (exponent + 1) != 0:
        exponent += 1
    step_bits = exponent - 2
    quarter = (size - 1) >> step_bits
    return 64 + (exponent - 10) * 4 + quarter - 3, (quarter + 1) << step_bits


@helper
def allocate(state, lists, size):
    """Allocate a chunk of `size` bytes, and return its offset; the caller has made sure that the arena has room."""
    number, chunk = chunk_of(size)
    chunk_start = lists[number]
    if chunk_start != 0:
        lists[number] = np.int64(word_at(state[HEAP], chunk_start))
        state[HEAP_FREE] -= chunk
        return chunk_start
    chunk_start = state[HEAP_TOP]
    state[HEAP_TOP] = chunk_start + chunk
    return chunk_start


@helper
def free_chunk(state, lists, at, size):
    """Free the chunk of a value of `size` bytes at offset `at`."""
    number, chunk = chunk_of(size)
    put_word(advance(state[HEAP], at), 0, np.uint64(lists[number]))
    lists[number] = at
    state[HEAP_FREE] += chunk


@helper
def store_bytes(state, lists, source, size):
    """Copy `size` > `INLINE` bytes from address `source` into the arena; return the offset as a word."""
    chunk_start = allocate(state, lists, size)
    target = advance(state[HEAP], chunk_start)
    whole = size >> 3
    if whole <= 8:
        for i in range(whole):
            put_word(target, i, word(source, i))
        # Whole words, and one that overlaps them and ends with the value: cheaper than memcpy up to 64 bytes.
        put_word(advance(target, size - 8), 0, word_at(source, size - 8))
    else:
        copy_bytes(target, source, size)
    return np.uint64(chunk_start)


@kernel("void(int64[::1], int64[::1], int64[::1], int64, uint64, int64, uint64)")
def put_values(state, lists, rows, column, values, stride, heap):
    """Write byte strings into a column of rows, and free the replaced values.

    Args:
        state, lists: the table's state array and the arena's free lists.
        rows: row ids.
        column: first of the column's two words.
        values: address of the first value's two words.
        stride: words from one value to the next.
        heap: address of the heap of long values.
    """
    for i in range(len(rows)):
        row = advance(state[SLAB], rows[i] * state[STRIDE])
        old = np.int64(word(row, column) & LENGTH)
        if old > INLINE:
            free_chunk(state, lists, np.int64(word(row, column + 1)), old)
        head = word(values, i * stride)
        tail = word(values, i * stride + 1)
        size = np.int64(head & LENGTH)
        if size > INLINE:
            tail = store_bytes(state, lists, advance(heap, np.int64(tail)), size)
        put_word(row, column, head)
        put_word(row, column + 1, tail)


@kernel("int64(uint64, int64, int64, int64[::1])")
def long_bytes(rows, count, stride, columns):
    """Compute an upper bound of the arena bytes for the long values of rows.

    Args:
        rows: address of the first row.
        count: number of rows.
        stride: words from one row to the next.
        columns: first words of the byte columns.
    """
    total = np.int64(0)
    for i in range(count):
        for c in range(len(columns)):
            size = np.int64(word(rows, i * stride + columns[c]) & LENGTH)
            if size > INLINE:
                total += chunk_of(size)[1]
    return total


@kernel("int64(uint64[::1], int64[::1])")
def long_bytes_at(rows, columns):
    """Compute an upper bound of the arena bytes for the long values of rows, given by addresses; see `long_bytes`."""
    total = np.int64(0)
    for i in range(len(rows)):
        if i + _PREFETCH_DISTANCE < len(rows):
            prefetch(rows[i + _PREFETCH_DISTANCE], columns[0] * 8)
        for c in range(len(columns)):
            size = np.int64(word(rows[i], columns[c]) & LENGTH)
            if size > INLINE:
                total += chunk_of(size)[1]
    return total


@kernel("int64(uint64, int64, int64, int64[::1], uint64, uint8[::1], int64)")
def relocate(rows, count, stride, columns, heap, target, start):
    """Copy the long values of rows from one heap into another, and redirect the rows.

    Args:
        rows: address of the first row.
        count: number of rows.
        stride: words from one row to the next.
        columns: first words of the byte columns.
        heap: address of the rows' heap.
        target: the other heap.
        start: first free byte of `target`.

    Returns:
        First free byte of `target` after the copy.
    """
    for i in range(count):
        if i + _PREFETCH_DISTANCE < count:
            for c in range(len(columns)):
                ahead = (i + _PREFETCH_DISTANCE) * stride + columns[c]
                size = np.int64(word(rows, ahead) & LENGTH)
                if size > INLINE:
                    prefetch(heap, np.int64(word(rows, ahead + 1)))
                    prefetch(heap, np.int64(word(rows, ahead + 1)) + size - 1)
        for c in range(len(columns)):
            column_word = i * stride + columns[c]
            size = np.int64(word(rows, column_word) & LENGTH)
            if size > INLINE:
                copy_bytes(
                    advance(target.ctypes.data, start), advance(heap, np.int64(word(rows, column_word + 1))), size
                )
                put_word(rows, column_word + 1, np.uint64(start))
                start += size
    return start

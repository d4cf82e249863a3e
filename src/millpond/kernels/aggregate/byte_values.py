"""Byte strings as aggregate state: only the final value of each row in a block is written to the heap.

A scratch hash table maps row ids to the position of their candidate in the block.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, HALF, I64, INTS, INTS_IN, U64, WORDS, WORDS_IN, load64
from millpond.layout import INLINE, LENGTH

Array = NDArray[Any]

SCRATCH = 4096
"""Entries of the scratch table: a power of two, at least twice the number of rows of a block."""

_ZERO = np.uint64(0)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_BYTE = np.uint64(255)
_SHIFT = np.uint64(64 - 12)


@inlined
def _slot(scratch: Array, row: int) -> int:
    """Find the scratch entry of `row`, or the free entry for it."""
    # Entries hold row + 1, so that 0 means free.
    entry = np.int64((np.uint64(row) * _MIX) >> _SHIFT)
    while scratch[entry, 0] != 0 and scratch[entry, 0] != row + 1:
        entry = (entry + 1) & (SCRATCH - 1)
    return entry


@helper
def _swap(word: int) -> int:
    """Reverse the bytes of a word, so that unsigned comparison of words equals that of their bytes."""
    word = ((word & np.uint64(0x00FF00FF00FF00FF)) << np.uint64(8)) | (
        (word >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
    )
    word = ((word & np.uint64(0x0000FFFF0000FFFF)) << np.uint64(16)) | (
        (word >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
    )
    return (word << HALF) | (word >> HALF)


@inlined
def _compare(left_a: int, left_b: int, left_heap: Array, right_a: int, right_b: int, right_heap: Array) -> int:
    """Compare two packed byte strings as unsigned bytes: negative, zero or positive."""
    # The upper half of the first word holds the first four bytes, which decide most comparisons.
    left_head = _swap(left_a >> HALF)
    right_head = _swap(right_a >> HALF)
    if left_head != right_head:
        return -1 if left_head < right_head else 1
    left_size = np.int64(left_a & LENGTH)
    right_size = np.int64(right_a & LENGTH)
    if left_size <= INLINE and right_size <= INLINE:
        left_tail = _swap(left_b)
        right_tail = _swap(right_b)
        if left_tail != right_tail:
            return -1 if left_tail < right_tail else 1
        return left_size - right_size
    common = min(left_size, right_size)
    k = np.int64(4)
    while k < common:
        if left_size > INLINE and right_size > INLINE and k + 8 <= common:
            left_part = load64(left_heap, np.int64(left_b) + k)
            right_part = load64(right_heap, np.int64(right_b) + k)
            if left_part != right_part:
                return -1 if _swap(left_part) < _swap(right_part) else 1
            k += 8
            continue
        shift = np.uint64(8 * (k - 4))
        left_byte = (
            np.int64(left_heap[np.int64(left_b) + k]) if left_size > INLINE else np.int64((left_b >> shift) & _BYTE)
        )
        right_byte = (
            np.int64(right_heap[np.int64(right_b) + k]) if right_size > INLINE else np.int64((right_b >> shift) & _BYTE)
        )
        if left_byte != right_byte:
            return left_byte - right_byte
        k += 1
    return left_size - right_size


@kernel(
    I64(
        *(WORDS, BYTES_IN, INTS_IN, I64, I64, I64, U64),
        *(WORDS_IN, BYTES_IN, BYTES_IN, boolean, boolean, BYTES, INTS, INTS, INTS),
    ),
)
def extreme_bytes(
    words: Array,
    heap: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    values_heap: Array,
    valid: Array,
    greatest: bool,
    ties: bool,
    won: Array,
    scratch: Array,
    out_rows: Array,
    out_positions: Array,
) -> int:
    """Find the rows whose least or greatest byte string a block changes, and the final value of each.

    As `numeric.extreme_ints`, but the caller writes the values; the kernel only clears the null bits.

    Returns:
        Number of filled entries of `out_rows` (row ids, distinct) and `out_positions` (positions in the batch).
    """
    table = scratch.reshape(SCRATCH, 2)
    table[:] = 0
    keep = ~null_bit
    nullable = valid.size != 0
    record = won.size != 0
    count = 0
    for i in range(rows.size):
        if record:
            won[i] = 0
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        a = values[start + i, 0]
        b = values[start + i, 1]
        entry = _slot(table, row)
        pending = table[entry, 0] != 0
        if pending:
            old = out_positions[table[entry, 1]]
            order = _compare(a, b, values_heap, values[old, 0], values[old, 1], values_heap)
        elif words[row, null_word] & null_bit:
            order = 1 if greatest else -1
        else:
            order = _compare(a, b, values_heap, words[row, offset], words[row, offset + 1], heap)
        if ties if order == 0 else (order > 0) == greatest:
            if not pending:
                table[entry, 0] = row + 1
                table[entry, 1] = count
                out_rows[count] = row
                words[row, null_word] &= keep
                count += 1
            out_positions[table[entry, 1]] = start + i
            if record:
                won[i] = 1
    return count


@kernel(I64(WORDS, INTS_IN, I64, I64, U64, BYTES_IN, BYTES_IN, INTS, INTS, INTS))
def assign_bytes(
    words: Array,
    rows: Array,
    start: int,
    null_word: int,
    null_bit: int,
    valid: Array,
    won: Array,
    scratch: Array,
    out_rows: Array,
    out_positions: Array,
) -> int:
    """Find the last winning position of each row of the block, and set the rows' null bits.

    Returns:
        Number of filled entries of `out_rows` (row ids, distinct) and `out_positions` (positions in the batch).
    """
    table = scratch.reshape(SCRATCH, 2)
    table[:] = 0
    nullable = valid.size != 0
    count = 0
    for i in range(rows.size):
        if won[i] == 0:
            continue
        row = rows[i]
        entry = _slot(table, row)
        if table[entry, 0] == 0:
            table[entry, 0] = row + 1
            table[entry, 1] = count
            out_rows[count] = row
            count += 1
        out_positions[table[entry, 1]] = start + i
        if nullable and valid[start + i] == 0:
            words[row, null_word] |= null_bit
        else:
            words[row, null_word] &= ~null_bit
    return count


@kernel(types.void(WORDS_IN, BYTES_IN, INTS_IN, WORDS))
def take_pairs(values: Array, valid: Array, positions: Array, out: Array) -> None:
    """Gather packed values at `positions`; nulls become empty strings."""
    nullable = valid.size != 0
    for i in range(positions.size):
        position = positions[i]
        if nullable and valid[position] == 0:
            out[i, 0] = _ZERO
            out[i, 1] = _ZERO
        else:
            out[i, 0] = values[position, 0]
            out[i, 1] = values[position, 1]

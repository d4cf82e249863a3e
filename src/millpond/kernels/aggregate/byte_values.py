"""Byte strings as aggregate state: only the final value of each row in a block is written to the heap.

A scratch hash table maps row ids to the position of their candidate in the block.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, types
from numpy.typing import NDArray

from millpond.kernels.aggregate.fold import beats
from millpond.kernels.columns.compare import compare_bytes
from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, I64, INTS, INTS_IN, U64, WORDS, WORDS_IN

Array = NDArray[Any]

SCRATCH = 4096
"""Entries of the scratch table: a power of two, at least twice the number of rows of a block."""

_ZERO = np.uint64(0)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - 12)


@inlined
def _slot(scratch: Array, row: int) -> int:
    """Find the scratch entry of `row`, or the free entry for it."""
    # Entries hold row + 1, so that 0 means free.
    entry = np.int64((np.uint64(row) * _MIX) >> _SHIFT)
    while scratch[entry, 0] != 0 and scratch[entry, 0] != row + 1:
        entry = (entry + 1) & (SCRATCH - 1)
    return entry


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
    heap_at, values_heap_at = np.uint64(heap.ctypes.data), np.uint64(values_heap.ctypes.data)
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
            order = compare_bytes(a, b, values_heap_at, values[old, 0], values[old, 1], values_heap_at)
        elif words[row, null_word] & null_bit == _ZERO:
            order = compare_bytes(a, b, values_heap_at, words[row, offset], words[row, offset + 1], heap_at)
        else:  # any value replaces null
            order = np.int64(1) if greatest else np.int64(-1)
        if beats(order > 0, order == 0, greatest, ties):
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

"""Numeric accumulators: each kernel folds one block of one input column into the state words of its rows."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, types
from numpy.typing import NDArray

from millpond.kernels.aggregate.fold import (
    Or,
    StateColumn,
    beats,
    clear_null,
    fold,
    fold_checked,
    fold_selecting,
    is_null,
    set_null,
)
from millpond.kernels.columns.compare import less_floats
from millpond.kernels.compiled import kernel
from millpond.kernels.memory import BYTES_IN, FLOATS_IN, I64, INTS_IN, U64, WORDS, bits_float, float_bits
from millpond.kernels.pointers import put_word, word

Array = NDArray[Any]

_BLOCK = (WORDS, INTS_IN, I64, I64)

AND, OR, XOR = 0, 1, 2
"""Bitwise operations."""


@kernel(types.void(WORDS, INTS_IN, I64))
def count_rows(words: Array, rows: Array, offset: int) -> None:
    """Count rows."""
    one = np.uint64(1)
    for i in range(rows.size):
        words[rows[i], offset] += one


@kernel(types.void(*_BLOCK, BYTES_IN))
def count_valid(words: Array, rows: Array, start: int, offset: int, valid: Array) -> None:
    """Count valid rows."""
    for i in range(rows.size):
        # Adding the flag avoids a branch, which random masks would mispredict.
        words[rows[i], offset] += np.uint64(valid[start + i])


@fold(INTS_IN)
def sum_ints(row: int, column: StateColumn, value: int) -> None:
    """Add int64 values with wraparound; the sum is null until the first value."""
    put_word(row, column.offset, word(row, column.offset) + np.uint64(value))
    clear_null(row, column)


@fold_checked(INTS_IN)
def sum_ints_checked(row: int, column: StateColumn, value: int) -> bool:
    """Add int64 values; return whether no sum has overflowed. See `sum_ints`."""
    old = np.int64(word(row, column.offset))
    new = old + value
    put_word(row, column.offset, np.uint64(new))
    clear_null(row, column)
    return ((old ^ new) & (value ^ new)) >= 0


@fold(INTS_IN, Or(INTS_IN, 0), U64)
def try_sum_ints(row: int, column: StateColumn, value: int, value_excess: int, batch: int) -> None:
    """Add int64 values to sums that may exceed 64 bits and return to them within a batch; null until the first value.

    The word after a sum holds its *excess*. It is 0 while the sum is within 64 bits; else it holds the sum's next 32
    bits, and the batch in which it exceeded them. A sum that exceeds 64 bits at the end of a batch has overflowed for
    good; its excess names batch 0.

    Args:
        row, column, value: as for `sum_ints`.
        value_excess: the value's excess if it is such a sum.
        batch: a number from 1 to 2³² − 1.
    """
    low32 = np.int64(0xFFFFFFFF)
    now = np.int64(batch)
    clear_null(row, column)
    old = word(row, column.offset)
    excess = np.int64(word(row, column.offset + 1))
    new = old + np.uint64(value)
    above = excess >> 32 if excess != 0 else np.int64(old) >> 63
    above += value_excess >> 32 if value_excess != 0 else value >> 63
    above += 1 if new < old else 0
    new_excess = np.uint64(0) if above == np.int64(new) >> 63 else np.uint64((above << 32) | now)
    # An excess of an earlier batch was final: its sum, and each sum that includes it, has overflowed.
    if (excess != 0 and excess & low32 != now) or (value_excess != 0 and value_excess & low32 != now):
        new = np.uint64(0)
        new_excess = np.uint64(1 << 32)
    put_word(row, column.offset, new)
    put_word(row, column.offset + 1, new_excess)


@fold(INTS_IN, I64)
def combine_bits(row: int, column: StateColumn, value: int, operation: int) -> None:
    """Combine the bits of int64 values by `AND`, `OR` or `XOR`; null until the first value."""
    bits = np.uint64(value)
    old = word(row, column.offset)
    if is_null(row, column):
        clear_null(row, column)
    elif operation == AND:
        bits &= old
    elif operation == OR:
        bits |= old
    else:
        bits ^= old
    put_word(row, column.offset, bits)


@fold(FLOATS_IN)
def multiply_floats(row: int, column: StateColumn, value: float) -> None:
    """Multiply doubles in row order; the product is null until the first value."""
    if is_null(row, column):
        clear_null(row, column)
        put_word(row, column.offset, float_bits(value))
    else:
        put_word(row, column.offset, float_bits(bits_float(word(row, column.offset)) * value))


@fold(FLOATS_IN)
def sum_floats(row: int, column: StateColumn, value: float) -> None:
    """Add doubles in row order; the sum is null until the first value."""
    put_word(row, column.offset, float_bits(bits_float(word(row, column.offset)) + value))
    clear_null(row, column)


@fold_selecting(INTS_IN, boolean, boolean)
def extreme_ints(row: int, column: StateColumn, value: int, greatest: bool, ties: bool) -> bool:
    """Keep the least or greatest int64 value, null until the first value.

    Args:
        row, column, value: as for `sum_ints`.
        greatest: keep the greatest.
        ties: whether an equal value wins.
    """
    old = np.int64(word(row, column.offset))
    wins = is_null(row, column) or beats(value > old, value == old, greatest, ties)
    if wins:
        put_word(row, column.offset, np.uint64(value))
        clear_null(row, column)
    return wins


@fold_selecting(FLOATS_IN, boolean, boolean)
def extreme_floats(row: int, column: StateColumn, value: float, greatest: bool, ties: bool) -> bool:
    """Keep the least or greatest double; see `extreme_ints`."""
    old = bits_float(word(row, column.offset))
    more = less_floats(old, value)
    equal = not more and not less_floats(value, old)
    wins = is_null(row, column) or beats(more, equal, greatest, ties)
    if wins:
        put_word(row, column.offset, float_bits(value))
        clear_null(row, column)
    return wins


@fold_selecting()
def select_first(row: int, column: StateColumn) -> bool:
    """Select the first counting row of each key; the state word records that there was one."""
    is_first = word(row, column.offset) == np.uint64(0)
    put_word(row, column.offset, np.uint64(1))
    return is_first


@fold(INTS_IN, Or(BYTES_IN, 1))
def assign_words(row: int, column: StateColumn, value: int, present: int) -> None:
    """Assign the value, or null."""
    if present:
        put_word(row, column.offset, np.uint64(value))
        clear_null(row, column)
    else:
        put_word(row, column.offset, np.uint64(0))
        set_null(row, column)

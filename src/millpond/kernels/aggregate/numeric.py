"""Numeric accumulators: each kernel adds one block of one input column to the state words of its rows.

All kernels take the slab of rows, the row ids of the block, and the block's first position in the batch. The state
column is given by word offset, null word and null bit. `values` and `valid` span the batch; an empty `valid` means
that all rows are valid. Rows are processed in order, so that sums of doubles do not depend on how a batch is split
into blocks.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, FLOATS_IN, I64, INTS_IN, U64, WORDS, bits_float, float_bits

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
        words[rows[i], offset] += np.uint64(valid[start + i])


@kernel(types.void(*_BLOCK, I64, U64, INTS_IN, BYTES_IN))
def sum_ints(
    words: Array, rows: Array, start: int, offset: int, null_word: int, null_bit: int, values: Array, valid: Array
) -> None:
    """Add int64 values with wraparound; the sum is null until the first value."""
    keep = ~null_bit
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        words[row, offset] += np.uint64(values[start + i])
        words[row, null_word] &= keep


@kernel(boolean(*_BLOCK, I64, U64, INTS_IN, BYTES_IN))
def sum_ints_checked(
    words: Array, rows: Array, start: int, offset: int, null_word: int, null_bit: int, values: Array, valid: Array
) -> bool:
    """Add int64 values; stop and return False if a sum overflows. See `sum_ints`."""
    keep = ~null_bit
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        old = np.int64(words[row, offset])
        value = values[start + i]
        new = old + value
        if ((old ^ new) & (value ^ new)) < 0:
            return False
        words[row, offset] = np.uint64(new)
        words[row, null_word] &= keep
    return True


@kernel(types.void(*_BLOCK, I64, U64, INTS_IN, INTS_IN, BYTES_IN, U64))
def try_sum_ints(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    excesses: Array,
    valid: Array,
    batch: int,
) -> None:
    """Add int64 values to sums that may exceed 64 bits and return to them within a batch; null until the first value.

    The word after a sum holds its *excess*. It is 0 while the sum is within 64 bits; else it holds the sum's next 32
    bits, and the batch in which it exceeded them. A sum that exceeds 64 bits at the end of a batch has overflowed for
    good; its excess names batch 0.

    Args:
        words, rows, start, offset, null_word, null_bit, values, valid: as for `sum_ints`.
        excesses: the excesses of the values if these are such sums; else empty.
        batch: a number from 1 to 2³² − 1.
    """
    nullable = valid.size != 0
    low32 = np.int64(0xFFFFFFFF)
    now = np.int64(batch)
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        words[row, null_word] &= ~null_bit
        excess = np.int64(words[row, offset + 1])
        other_excess = excesses[start + i] if excesses.size else np.int64(0)
        if (excess != 0 and excess & low32 != now) or (other_excess != 0 and other_excess & low32 != now):
            words[row, offset] = np.uint64(0)
            words[row, offset + 1] = np.uint64(1 << 32)
            continue
        old = words[row, offset]
        value = values[start + i]
        new = old + np.uint64(value)
        above = excess >> 32 if excess != 0 else np.int64(old) >> 63
        above += other_excess >> 32 if other_excess != 0 else value >> 63
        above += 1 if new < old else 0
        words[row, offset] = new
        within = above == np.int64(new) >> 63
        words[row, offset + 1] = np.uint64(0) if within else np.uint64((above << 32) | now)


@kernel(types.void(*_BLOCK, I64, U64, INTS_IN, BYTES_IN, I64))
def combine_bits(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    valid: Array,
    operation: int,
) -> None:
    """Combine the bits of int64 values by `AND`, `OR` or `XOR`; null until the first value."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        value = np.uint64(values[start + i])
        if words[row, null_word] & null_bit != 0:
            words[row, null_word] &= ~null_bit
            words[row, offset] = value
        elif operation == AND:
            words[row, offset] &= value
        elif operation == OR:
            words[row, offset] |= value
        else:
            words[row, offset] ^= value


@kernel(types.void(*_BLOCK, I64, U64, FLOATS_IN, BYTES_IN))
def multiply_floats(
    words: Array, rows: Array, start: int, offset: int, null_word: int, null_bit: int, values: Array, valid: Array
) -> None:
    """Multiply doubles in row order; the product is null until the first value."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        if words[row, null_word] & null_bit != 0:
            words[row, null_word] &= ~null_bit
            words[row, offset] = float_bits(values[start + i])
        else:
            words[row, offset] = float_bits(bits_float(words[row, offset]) * values[start + i])


@kernel(types.void(*_BLOCK, I64, U64, FLOATS_IN, BYTES_IN))
def sum_floats(
    words: Array, rows: Array, start: int, offset: int, null_word: int, null_bit: int, values: Array, valid: Array
) -> None:
    """Add doubles in row order; the sum is null until the first value."""
    keep = ~null_bit
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        words[row, offset] = float_bits(bits_float(words[row, offset]) + values[start + i])
        words[row, null_word] &= keep


@kernel(types.void(*_BLOCK, I64, U64, INTS_IN, BYTES_IN, boolean, boolean, BYTES))
def extreme_ints(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    valid: Array,
    greatest: bool,
    ties: bool,
    won: Array,
) -> None:
    """Keep the least or greatest int64 value, null until the first value.

    Args:
        words, rows, start, offset, null_word, null_bit, values, valid: as for `sum_ints`.
        greatest: keep the greatest.
        ties: whether an equal value wins.
        won: set to 1 for every row of the block that won at its turn, else to 0; may be empty.
    """
    keep = ~null_bit
    nullable = valid.size != 0
    record = won.size != 0
    for i in range(rows.size):
        if record:
            won[i] = 0
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        value = values[start + i]
        old = np.int64(words[row, offset])
        if (
            (words[row, null_word] & null_bit) != 0
            or (greatest and value > old)
            or (not greatest and value < old)
            or (ties and value == old)
        ):
            words[row, offset] = np.uint64(value)
            words[row, null_word] &= keep
            if record:
                won[i] = 1


@helper
def _before(left: float, right: float) -> bool:
    """Compare doubles in Spark's order: NaN is the greatest, and −0.0 equals 0.0."""
    return bool(left < right or (right != right and left == left))


@kernel(types.void(*_BLOCK, I64, U64, FLOATS_IN, BYTES_IN, boolean, boolean, BYTES))
def extreme_floats(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    valid: Array,
    greatest: bool,
    ties: bool,
    won: Array,
) -> None:
    """Keep the least or greatest double; see `extreme_ints`."""
    keep = ~null_bit
    nullable = valid.size != 0
    record = won.size != 0
    for i in range(rows.size):
        if record:
            won[i] = 0
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        value = values[start + i]
        old = bits_float(words[row, offset])
        ahead = _before(old, value)
        behind = _before(value, old)
        if (
            (words[row, null_word] & null_bit) != 0
            or (ahead if greatest else behind)
            or (ties and not ahead and not behind)
        ):
            words[row, offset] = float_bits(value)
            words[row, null_word] &= keep
            if record:
                won[i] = 1


@kernel(types.void(*_BLOCK, BYTES_IN, BYTES))
def first_rows(words: Array, rows: Array, start: int, offset: int, counts: Array, won: Array) -> None:
    """Set `won` for the first counting row of each key; the word at `offset` records that there was one."""
    all_count = counts.size == 0
    for i in range(rows.size):
        row = rows[i]
        won[i] = 0
        if words[row, offset] == 0 and (all_count or counts[start + i] != 0):
            words[row, offset] = np.uint64(1)
            won[i] = 1


@kernel(types.void(*_BLOCK, I64, U64, INTS_IN, BYTES_IN, BYTES_IN))
def assign_words(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    valid: Array,
    won: Array,
) -> None:
    """Write the value, or null, of every winning row of the block."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if won[i] == 0:
            continue
        row = rows[i]
        if nullable and valid[start + i] == 0:
            words[row, offset] = np.uint64(0)
            words[row, null_word] |= null_bit
        else:
            words[row, offset] = np.uint64(values[start + i])
            words[row, null_word] &= ~null_bit

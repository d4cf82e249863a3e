"""128-bit decimals: sums, extremes and averages over pairs of words (low, high; two's complement)."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, types
from numpy.typing import NDArray

from millpond.kernels.aggregate.fold import (
    Or,
    StateColumn,
    clear_null,
    fold,
    fold_checked,
    fold_selecting,
    is_null,
    set_null,
)
from millpond.kernels.compiled import helper, inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, HALF, I64, INTS_IN, LOW_HALF, U64, UINTS, WORDS, WORDS_IN
from millpond.kernels.pointers import put_word, word

Array = NDArray[Any]

OVERFLOWN = 1 << 63
"""High word of a sum that exceeded its precision (the low word is 0); no decimal has this value."""

_TOP = np.uint64(1 << 63)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_63 = np.uint64(63)


@helper
def _within(low: int, high: int, limit_low: int, limit_high: int) -> bool:
    """Return whether |value| < limit."""
    if high & _TOP:
        low = ~low + _ONE
        high = ~high + (_ONE if low == _ZERO else _ZERO)
        if high & _TOP:
            return False
    return high < limit_high or (high == limit_high and low < limit_low)


@helper
def _signs(high: int) -> int:
    """Sign-extend: all 32 bits ones if the word is negative, else zero."""
    return LOW_HALF if high & _TOP else _ZERO


@helper
def _add(row: int, column: StateColumn, low: int, high: int, limit_low: int, limit_high: int) -> bool:
    """Add to the sum of a row; False if it exceeds, or had exceeded, its precision."""
    old_low = word(row, column.offset)
    old_high = word(row, column.offset + 1)
    # A sum that has overflowed stays so.
    if old_high == _TOP and old_low == _ZERO:
        return False
    new_low = old_low + low
    new_high = old_high + high + (_ONE if new_low < low else _ZERO)
    within = not ((old_high ^ new_high) & (high ^ new_high)) & _TOP and _within(
        new_low, new_high, limit_low, limit_high
    )
    if high == _TOP and low == _ZERO:  # the added value is itself a sum that exceeded its precision
        within = False
    put_word(row, column.offset, new_low if within else _ZERO)
    put_word(row, column.offset + 1, new_high if within else _TOP)
    return within


@fold_checked(INTS_IN, U64, U64)
def sum_short(row: int, column: StateColumn, value: int, limit_low: int, limit_high: int) -> bool:
    """Add 64-bit decimals to 128-bit sums; a sum is null until the first value.

    Args:
        row, column: the row's address, and the state column.
        value: the decimal.
        limit_low, limit_high: 10 to the power of the sum's precision; a sum that reaches it becomes `OVERFLOWN` for
            good.

    Returns:
        Whether all updated sums are within their precision.
    """
    clear_null(row, column)
    return _add(row, column, np.uint64(value), np.uint64(value >> 63), limit_low, limit_high)


@fold_checked(WORDS_IN, U64, U64)
def sum_long(row: int, column: StateColumn, low: int, high: int, limit_low: int, limit_high: int) -> bool:
    """Add 128-bit decimals; see `sum_short`."""
    clear_null(row, column)
    return _add(row, column, low, high, limit_low, limit_high)


@fold(WORDS_IN, Or(UINTS, 0), U64, U64, U64)
def sum_beyond(
    row: int, column: StateColumn, low: int, high: int, value_excess: int, limit_low: int, limit_high: int, batch: int
) -> None:
    """Add 128-bit decimals to sums that may exceed their precision and return to it within a batch; see `sum_long`.

    The word after a sum holds its *excess*. It is 0 while the sum is within its precision; else it holds the sum's
    next 32 bits, and the batch in which it exceeded the precision. A sum that exceeds its precision at the end of a
    batch becomes `OVERFLOWN`.

    Args:
        row, column, low, high, limit_low, limit_high: as for `sum_long`.
        value_excess: the value's excess if it is such a sum.
        batch: a number from 1 to 2³² − 1.
    """
    clear_null(row, column)
    old_low = word(row, column.offset)
    old_high = word(row, column.offset + 1)
    excess = word(row, column.offset + 2)
    if excess == _ZERO and old_high == _TOP and old_low == _ZERO:
        return
    # An excess of an earlier batch was final: its sum, and each sum that includes it, has overflowed.
    stale = (excess != _ZERO and excess & LOW_HALF != batch) or (
        value_excess != _ZERO and value_excess & LOW_HALF != batch
    )
    if stale or (value_excess == _ZERO and high == _TOP and low == _ZERO):
        put_word(row, column.offset, _ZERO)
        put_word(row, column.offset + 1, _TOP)
        put_word(row, column.offset + 2, _ZERO)
        return
    new_low = old_low + low
    carry = _ONE if new_low < low else _ZERO
    new_high = old_high + high
    above = _ONE if new_high < high else _ZERO
    new_high += carry
    above += _ONE if new_high < carry else _ZERO
    above += excess >> HALF if excess != _ZERO else _signs(old_high)
    above += value_excess >> HALF if value_excess != _ZERO else _signs(high)
    above &= LOW_HALF
    put_word(row, column.offset, new_low)
    put_word(row, column.offset + 1, new_high)
    within = above == _signs(new_high) and _within(new_low, new_high, limit_low, limit_high)
    put_word(row, column.offset + 2, _ZERO if within else (above << HALF) | batch)


@fold_selecting(WORDS_IN, boolean, boolean)
def extreme_pairs(row: int, column: StateColumn, low: int, high: int, greatest: bool, ties: bool) -> bool:
    """Keep the least or greatest 128-bit integer; see `numeric.extreme_ints`."""
    old_low = word(row, column.offset)
    old_high = word(row, column.offset + 1)
    # Spelled out: `less_pairs` and `beats` make this loop a tenth slower.
    more = np.int64(high) > np.int64(old_high) or (high == old_high and low > old_low)
    equal = high == old_high and low == old_low
    wins = is_null(row, column) or (ties if equal else more == greatest)
    if wins:
        put_word(row, column.offset, low)
        put_word(row, column.offset + 1, high)
        clear_null(row, column)
    return wins


@fold(WORDS_IN, Or(BYTES_IN, 1))
def assign_pairs(row: int, column: StateColumn, low: int, high: int, present: int) -> None:
    """Assign pairs of words; see `numeric.assign_words`."""
    put_word(row, column.offset, low if present else _ZERO)
    put_word(row, column.offset + 1, high if present else _ZERO)
    if present:
        clear_null(row, column)
    else:
        set_null(row, column)


@inlined
def _divide(limbs: Array, size: int, divisor: int) -> int:
    """Divide 32-bit limbs (least significant first) in place by a divisor below 2⁶³; return the remainder."""
    remainder = _ZERO
    for k in range(size - 1, -1, -1):
        if divisor <= LOW_HALF:
            part = (remainder << HALF) | limbs[k]
            limbs[k] = part // divisor
            remainder = part % divisor
        else:  # bit by bit: the partial dividend exceeds 64 bits
            quotient = _ZERO
            for bit in range(31, -1, -1):
                remainder = (remainder << _ONE) | ((limbs[k] >> np.uint64(bit)) & _ONE)
                quotient <<= _ONE
                if remainder >= divisor:
                    remainder -= divisor
                    quotient |= _ONE
            limbs[k] = quotient
    return remainder


@kernel(types.void(WORDS_IN, INTS_IN, I64, U64, U64, WORDS, BYTES))
def average(sums: Array, counts: Array, shift: int, limit_low: int, limit_high: int, out: Array, state: Array) -> None:
    """Divide 128-bit sums by counts, rounding half up, as Spark divides decimals.

    Spark truncates the quotient to 39 digits before it rounds to at most 38; that never changes a rounding.

    Args:
        sums: uint64[n, 2].
        counts: int64[n]; 0 gives null.
        shift: difference between the scales of result and sum.
        limit_low, limit_high: 10 to the power of the result's precision.
        out: uint64[n, 2]; filled with the averages.
        state: filled with 1 for a value, 0 for null (no values), 2 for a result or sum beyond its precision.
    """
    limbs = np.empty(8, dtype=np.uint64)
    for i in range(sums.shape[0]):
        out[i, 0] = _ZERO
        out[i, 1] = _ZERO
        count = np.uint64(counts[i])
        if count == _ZERO:
            state[i] = 0
            continue
        low = sums[i, 0]
        high = sums[i, 1]
        negative = (high & _TOP) != _ZERO
        if negative:
            if high == _TOP and low == _ZERO:
                state[i] = 2
                continue
            low = ~low + _ONE
            high = ~high + (_ONE if low == _ZERO else _ZERO)
        limbs[0] = low & LOW_HALF
        limbs[1] = low >> HALF
        limbs[2] = high & LOW_HALF
        limbs[3] = high >> HALF
        limbs[4:] = _ZERO
        for _ in range(shift):
            carry = _ZERO
            for k in range(6):
                part = limbs[k] * np.uint64(10) + carry
                limbs[k] = part & LOW_HALF
                carry = part >> HALF
        remainder = _divide(limbs, 6, count)
        if remainder >= count - remainder:
            for k in range(6):
                limbs[k] += _ONE
                if limbs[k] <= LOW_HALF:
                    break
                limbs[k] = _ZERO
        low = limbs[0] | (limbs[1] << HALF)
        high = limbs[2] | (limbs[3] << HALF)
        if (limbs[4] | limbs[5]) != _ZERO or not _within(low, high, limit_low, limit_high) or high & _TOP:
            state[i] = 2
            continue
        if negative:
            low = ~low + _ONE
            high = ~high + (_ONE if low == _ZERO else _ZERO)
        out[i, 0] = low
        out[i, 1] = high
        state[i] = 1

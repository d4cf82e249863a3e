"""128-bit decimals: sums, extremes and averages over pairs of words (low, high; two's complement)."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import boolean, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, HALF, I64, INTS_IN, LOW_HALF, U64, WORDS, WORDS_IN

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


@inlined
def _add(words: Array, row: int, offset: int, low: int, high: int, limit_low: int, limit_high: int) -> bool:
    """Add to the sum of a row; False if it exceeds, or had exceeded, its precision."""
    old_low = words[row, offset]
    old_high = words[row, offset + 1]
    # A sum that has overflowed stays so.
    if old_high == _TOP and old_low == _ZERO:
        return False
    if high == _TOP and low == _ZERO:  # the added value is itself a sum that exceeded its precision
        words[row, offset] = _ZERO
        words[row, offset + 1] = _TOP
        return False
    new_low = old_low + low
    new_high = old_high + high + (_ONE if new_low < low else _ZERO)
    if ((old_high ^ new_high) & (high ^ new_high)) & _TOP or not _within(new_low, new_high, limit_low, limit_high):
        words[row, offset] = _ZERO
        words[row, offset + 1] = _TOP
        return False
    words[row, offset] = new_low
    words[row, offset + 1] = new_high
    return True


@kernel(boolean(WORDS, INTS_IN, I64, I64, I64, U64, INTS_IN, BYTES_IN, U64, U64))
def sum_short(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    valid: Array,
    limit_low: int,
    limit_high: int,
) -> bool:
    """Add 64-bit decimals to 128-bit sums; a sum is null until the first value.

    Args:
        words, rows, start, offset, null_word, null_bit, values, valid: as for `numeric`.
        limit_low, limit_high: 10 to the power of the sum's precision; a sum that reaches it becomes `OVERFLOWN` for
            good.

    Returns:
        Whether all updated sums are within their precision.
    """
    within = True
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        value = values[start + i]
        within &= _add(words, row, offset, np.uint64(value), np.uint64(value >> 63), limit_low, limit_high)
        words[row, null_word] &= ~null_bit
    return within


@kernel(boolean(WORDS, INTS_IN, I64, I64, I64, U64, WORDS_IN, BYTES_IN, U64, U64))
def sum_long(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    valid: Array,
    limit_low: int,
    limit_high: int,
) -> bool:
    """Add 128-bit decimals; see `sum_short`."""
    within = True
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        within &= _add(words, row, offset, values[start + i, 0], values[start + i, 1], limit_low, limit_high)
        words[row, null_word] &= ~null_bit
    return within


@kernel(types.void(WORDS, INTS_IN, I64, I64, I64, U64, WORDS_IN, WORDS_IN, BYTES_IN, U64, U64, U64))
def sum_beyond(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    null_word: int,
    null_bit: int,
    values: Array,
    excesses: Array,
    valid: Array,
    limit_low: int,
    limit_high: int,
    batch: int,
) -> None:
    """Add 128-bit decimals to sums that may exceed their precision and return to it within a batch; see `sum_long`.

    The word after a sum holds its *excess*. It is 0 while the sum is within its precision; else it holds the sum's
    next 32 bits, and the batch in which it exceeded the precision. A sum that exceeds its precision at the end of a
    batch becomes `OVERFLOWN`.

    Args:
        words, rows, start, offset, null_word, null_bit, values, valid, limit_low, limit_high: as for `sum_short`.
        excesses: uint64[n, 1], the excesses of the values if these are such sums; else without rows.
        batch: a number from 1 to 2³² − 1.
    """
    nullable = valid.size != 0
    sums = excesses.shape[0] != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        words[row, null_word] &= ~null_bit
        old_low = words[row, offset]
        old_high = words[row, offset + 1]
        excess = words[row, offset + 2]
        if excess == _ZERO and old_high == _TOP and old_low == _ZERO:
            continue
        low = values[start + i, 0]
        high = values[start + i, 1]
        other_excess = excesses[start + i, 0] if sums else _ZERO
        # An excess of an earlier batch was final: its sum, and each sum that includes it, has overflowed.
        stale = (excess != _ZERO and excess & LOW_HALF != batch) or (
            other_excess != _ZERO and other_excess & LOW_HALF != batch
        )
        if stale or (sums and other_excess == _ZERO and high == _TOP and low == _ZERO):
            words[row, offset] = _ZERO
            words[row, offset + 1] = _TOP
            words[row, offset + 2] = _ZERO
            continue
        new_low = old_low + low
        carry = _ONE if new_low < low else _ZERO
        new_high = old_high + high
        above = _ONE if new_high < high else _ZERO
        new_high += carry
        above += _ONE if new_high < carry else _ZERO
        above += excess >> HALF if excess != _ZERO else _signs(old_high)
        above += other_excess >> HALF if other_excess != _ZERO else _signs(high)
        above &= LOW_HALF
        words[row, offset] = new_low
        words[row, offset + 1] = new_high
        if above == _signs(new_high) and _within(new_low, new_high, limit_low, limit_high):
            words[row, offset + 2] = _ZERO
        else:
            words[row, offset + 2] = (above << HALF) | batch


@kernel(types.void(WORDS, INTS_IN, I64, I64, I64, U64, WORDS_IN, BYTES_IN, boolean, boolean, BYTES))
def extreme_pairs(
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
    """Keep the least or greatest 128-bit integer; see `numeric.extreme_ints`."""
    keep = ~null_bit
    nullable = valid.size != 0
    record = won.size != 0
    for i in range(rows.size):
        if record:
            won[i] = 0
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        low = values[start + i, 0]
        high = values[start + i, 1]
        old_low = words[row, offset]
        old_high = words[row, offset + 1]
        more = np.int64(high) > np.int64(old_high) or (high == old_high and low > old_low)
        equal = high == old_high and low == old_low
        if (words[row, null_word] & null_bit) != 0 or (ties if equal else more == greatest):
            words[row, offset] = low
            words[row, offset + 1] = high
            words[row, null_word] &= keep
            if record:
                won[i] = 1


@kernel(types.void(WORDS, INTS_IN, I64, I64, I64, U64, WORDS_IN, BYTES_IN, BYTES_IN))
def assign_pairs(
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
    """Assign pairs of words; see `numeric.assign_words`."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if won[i] == 0:
            continue
        row = rows[i]
        if nullable and valid[start + i] == 0:
            words[row, offset] = _ZERO
            words[row, offset + 1] = _ZERO
            words[row, null_word] |= null_bit
        else:
            words[row, offset] = values[start + i, 0]
            words[row, offset + 1] = values[start + i, 1]
            words[row, null_word] &= ~null_bit


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

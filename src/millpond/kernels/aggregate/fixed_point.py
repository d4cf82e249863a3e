"""Exact sums of doubles that support subtraction: Kulisch's long accumulator.

A sum is an integer of many words (least significant first, two's complement) in units of the smallest double. It has
room for every double, and for 2⁶⁴ of the largest. So sums do not depend on the order of values, and retractions leave
no error.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millpond.kernels.aggregate.fold import fold
from millpond.kernels.aggregate.retract import SIGNS
from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import FLOATS_IN, I64, bits_float, float_bits
from millpond.kernels.pointers import put_word, word


class Width(NamedTuple):
    """The width of a sum.

    Attributes:
        words: words of the integer.
        base: the integer's unit is 2 to the power of `base` − 1074.
    """

    words: int
    base: int


DOUBLES = Width(34, 0)
FLOATS = Width(7, 873)
"""For 32-bit floats, as doubles. They are multiples of 2⁻¹⁴⁹, and a mantissa extends 52 bits further: the unit is
2⁻²⁰¹.
"""

_MANTISSA = np.uint64((1 << 52) - 1)
_IMPLIED = np.uint64(1 << 52)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_63 = np.uint64(63)


@helper
def _add(row, column, size, base, value):
    """Add a finite nonzero double."""
    bits = float_bits(value)
    exponent = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    mantissa = bits & _MANTISSA
    if exponent == 0:
        exponent = 1
    else:
        mantissa |= _IMPLIED
    place = exponent - 1 - base
    first = place >> 6
    shift = np.uint64(place & 63)
    low = mantissa << shift
    high = (mantissa >> _ONE) >> (_63 - shift)
    if bits >> _63 == _ZERO:
        for k in range(first, size):
            part = low if k == first else high  # the carry included
            total = word(row, column.offset + k) + part
            put_word(row, column.offset + k, total)
            carry = _ONE if total < part else _ZERO
            if k == first:
                high += carry  # `high` has at most 53 bits, so this does not overflow
            else:
                high = carry
                if carry == _ZERO:
                    break
    else:
        for k in range(first, size):
            part = low if k == first else high
            old = word(row, column.offset + k)
            put_word(row, column.offset + k, old - part)
            carry = _ONE if old < part else _ZERO
            if k == first:
                high += carry
            else:
                high = carry
                if carry == _ZERO:
                    break


@helper
def _count(row, index, sign):
    put_word(row, index, word(row, index) + np.uint64(np.int64(sign)))


@fold(FLOATS_IN, SIGNS, I64, I64)
def sum_floats(row, column, value, sign, size, base):
    """Add or retract doubles.

    Args:
        row, column: the row's address, and the first word of the sum; the numbers of values, NaNs, ∞ and −∞ follow it.
        value, sign: the double; a sign of −1 retracts it.
        size, base: the `Width`.
    """
    counts = column.offset + size
    _count(row, counts, sign)
    if value != value:
        _count(row, counts + 1, sign)
    elif value == np.inf:
        _count(row, counts + 2, sign)
    elif value == -np.inf:
        _count(row, counts + 3, sign)
    elif value != 0.0:
        _add(row, column, size, base, value if sign > 0 else -value)


@helper
def _bits(number, place):
    """Read 64 bits of a number from bit `place` on."""
    index = place >> 6
    shift = np.uint64(place & 63)
    bits = number[index] >> shift
    if index + 1 < len(number):
        bits |= (number[index + 1] << _ONE) << (_63 - shift)
    return bits


@helper
def _any(number, place):
    """Return whether a number has bits below bit `place`."""
    index = place >> 6
    for k in range(index):
        if number[k] != _ZERO:
            return True
    return number[index] & ((_ONE << np.uint64(place & 63)) - _ONE) != _ZERO


@kernel("void(uint64[:, ::1], int64, float64[::1])")
def nearest(sums, base, out):
    """Round sums to doubles: to nearest, ties to even; beyond the largest double to an infinity."""
    size = sums.shape[1]
    number = np.empty(size, dtype=np.uint64)
    for i in range(len(sums)):
        negative = sums[i, size - 1] >> _63 != _ZERO
        carry = _ONE
        top = -1
        for k in range(size):
            number[k] = sums[i, k]
            if negative:
                number[k] = ~number[k] + carry
                carry = _ONE if carry != _ZERO and number[k] == _ZERO else _ZERO
            if number[k] != _ZERO:
                top = k
        if top < 0:
            out[i] = 0.0
            continue
        length = 64 * top
        bits_left = number[top]
        while bits_left != _ZERO:
            bits_left >>= _ONE
            length += 1
        # Up to 53 bits, the integer is the double's bit pattern. With another base, nonzero sums are at least 2⁵².
        if length <= 53:
            bits = number[0] + (np.uint64(base) << np.uint64(52))
        else:
            cut = length - 53
            mantissa = _bits(number, cut)
            half = _bits(number, cut - 1) & _ONE
            if half != _ZERO and (mantissa & _ONE != _ZERO or _any(number, cut - 1)):
                mantissa += _ONE
                if mantissa >> np.uint64(53) != _ZERO:
                    mantissa >>= _ONE
                    cut += 1
            exponent = cut + 1 + base
            if exponent > 2046:
                bits = np.uint64(0x7FF) << np.uint64(52)
            else:
                bits = (np.uint64(exponent) << np.uint64(52)) | (mantissa & _MANTISSA)
        out[i] = -bits_float(bits) if negative else bits_float(bits)

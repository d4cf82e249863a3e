"""Exact sums of doubles, from which any of them can be taken back.

A sum is an integer of many words (the least first, in two's complement), counted in units of the least double: wide
enough for every double there is, and for 2⁶⁴ of the largest. So it depends on no order, and what is taken back leaves
nothing. This is Kulisch's long accumulator.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import bits_float, float_bits


class Width(NamedTuple):
    """How wide sums are.

    Attributes:
        words: of the integer.
        base: its unit is 2 to the power of `base` − 1074.
    """

    words: int
    base: int


DOUBLES = Width(34, 0)
FLOATS = Width(7, 873)
"""Of 32-bit floats, as doubles: multiples of 2⁻¹⁴⁹, whose last bit stands 52 places further down."""

_MANTISSA = np.uint64((1 << 52) - 1)
_IMPLIED = np.uint64(1 << 52)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_63 = np.uint64(63)
_64 = np.uint64(64)


@helper
def _add(words, row, offset, size, base, value):
    """Add a finite double that is not 0."""
    bits = float_bits(value)
    exponent = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    mantissa = bits & _MANTISSA
    if exponent == 0:
        exponent = 1
    else:
        mantissa |= _IMPLIED
    place = exponent - 1 - base
    at = place >> 6
    shift = np.uint64(place & 63)
    low = mantissa << shift
    high = (mantissa >> _ONE) >> (_63 - shift)
    if bits >> _63 == _ZERO:
        for k in range(at, size):
            part = low if k == at else high  # what is carried included
            total = words[row, offset + k] + part
            words[row, offset + k] = total
            carry = _ONE if total < part else _ZERO
            if k == at:
                high += carry  # it has 53 bits at most
            else:
                high = carry
                if carry == _ZERO:
                    break
    else:
        for k in range(at, size):
            part = low if k == at else high
            old = words[row, offset + k]
            words[row, offset + k] = old - part
            carry = _ONE if old < part else _ZERO
            if k == at:
                high += carry
            else:
                high = carry
                if carry == _ZERO:
                    break


@kernel(
    "void(uint64[:, ::1], int64[::1], int64, int64, int64, int64, Array(float64, 1, 'C', readonly=True),"
    "Array(uint8, 1, 'C', readonly=True), int8[::1])"
)
def sum_floats(words, rows, start, offset, size, base, values, valid, signs):
    """Add doubles, or take them back.

    Args:
        offset: where a sum begins; behind it stand the numbers of values, of NaNs, of ∞ and of −∞.
        size, base: the `Width`.
        values, valid, signs: span the batch; `start` is the first row of the block in it.
    """
    for i in range(len(rows)):
        if len(valid) != 0 and valid[start + i] == 0:
            continue
        row = rows[i]
        sign = np.int64(signs[start + i])
        value = values[start + i]
        words[row, offset + size] += np.uint64(sign)
        if value != value:
            words[row, offset + size + 1] += np.uint64(sign)
        elif value == np.inf:
            words[row, offset + size + 2] += np.uint64(sign)
        elif value == -np.inf:
            words[row, offset + size + 3] += np.uint64(sign)
        elif value != 0.0:
            _add(words, row, offset, size, base, value if sign > 0 else -value)


@helper
def _bits(number, place):
    """The 64 bits of a number from a place on."""
    at = place >> 6
    shift = np.uint64(place & 63)
    found = number[at] >> shift
    if at + 1 < len(number):
        found |= (number[at + 1] << _ONE) << (_63 - shift)
    return found


@helper
def _any(number, place):
    """Whether a number has bits below a place."""
    at = place >> 6
    for k in range(at):
        if number[k] != _ZERO:
            return True
    return number[at] & ((_ONE << np.uint64(place & 63)) - _ONE) != _ZERO


@kernel("void(uint64[:, ::1], int64, float64[::1])")
def nearest(sums, base, out):
    """The doubles nearest to sums, of two equally near the even one; beyond the largest, an infinity."""
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
        rest = number[top]
        while rest != _ZERO:
            rest >>= _ONE
            length += 1
        if length <= 53:  # as small as a subnormal: the number is its bits; the least of another base is 2 ** 52
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

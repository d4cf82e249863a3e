"""Central moments of one argument and of two: a running mean, and sums of powers of deviations from it.

A row's state is consecutive doubles: count, mean, and the sums of second, third and fourth powers of deviations, up
to the *order* of the aggregate. Formulas and order of operations are Spark's. Values are added by Meng, "Simpler
Online Updates for Arbitrary-Order Central Moments" (2015). States are combined by the pairwise formulas of Chan,
Golub and LeVeque, and their extension to higher orders.
"""

# mypy: disable-error-code="untyped-decorator,no-any-return"

from __future__ import annotations

from typing import Any

from numba import types
from numpy.typing import NDArray

from millpond.kernels.aggregate.fold import StateColumn, fold
from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import FLOATS_IN, I64, INTS_IN, WORDS, WORDS_IN, bits_float, float_bits
from millpond.kernels.pointers import put_word, word

Array = NDArray[Any]


@helper
def _get(row: int, column: StateColumn, k: int) -> float:
    return bits_float(word(row, column.offset + k))


@helper
def _put(row: int, column: StateColumn, k: int, value: float) -> None:
    put_word(row, column.offset + k, float_bits(value))


@fold(FLOATS_IN, I64)
def moments(row: int, column: StateColumn, value: float, order: int) -> None:
    """Add values one after another.

    Args:
        row, column: the row's address, and the first word of the state.
        value: the value.
        order: highest power, 2 to 4.
    """
    count = _get(row, column, 0) + 1.0
    mean = _get(row, column, 1)
    delta = value - mean
    step = delta / count
    squares = _get(row, column, 2) + delta * (delta - step)
    _put(row, column, 0, count)
    _put(row, column, 1, mean + step)
    _put(row, column, 2, squares)
    if order < 3:
        return
    delta2 = delta * delta
    step2 = step * step
    cubes = _get(row, column, 3) - 3.0 * step * squares + delta * (delta2 - step2)
    _put(row, column, 3, cubes)
    if order < 4:
        return
    fourths = _get(row, column, 4) - 4.0 * step * cubes - 6.0 * step2 * squares
    _put(row, column, 4, fourths + delta * (delta * delta2 - step * step2))


@kernel(types.void(WORDS, INTS_IN, I64, I64, WORDS_IN))
def combine_moments(words: Array, rows: Array, offset: int, order: int, others: Array) -> None:
    """Combine the states of rows with `others`, `order + 1` words each."""
    for i in range(rows.size):
        row = rows[i]
        n1 = bits_float(words[row, offset])
        n2 = bits_float(others[i, 0])
        if n2 == 0.0:
            continue
        if n1 == 0.0:
            for k in range(order + 1):
                words[row, offset + k] = others[i, k]
            continue
        mean = bits_float(words[row, offset + 1])
        squares1 = bits_float(words[row, offset + 2])
        squares2 = bits_float(others[i, 2])
        delta = bits_float(others[i, 1]) - mean
        step = delta / (n1 + n2)
        words[row, offset] = float_bits(n1 + n2)
        words[row, offset + 1] = float_bits(mean + step * n2)
        words[row, offset + 2] = float_bits(squares1 + squares2 + delta * step * n1 * n2)
        if order < 3:
            continue
        cubes1 = bits_float(words[row, offset + 3])
        cubes2 = bits_float(others[i, 3])
        cubes = cubes1 + cubes2 + step * step * delta * n1 * n2 * (n1 - n2)
        words[row, offset + 3] = float_bits(cubes + 3.0 * step * (n1 * squares2 - n2 * squares1))
        if order < 4:
            continue
        fourths = bits_float(words[row, offset + 4]) + bits_float(others[i, 4])
        fourths += step * step * step * delta * n1 * n2 * (n1 * n1 - n1 * n2 + n2 * n2)
        fourths += 6.0 * step * step * (n1 * n1 * squares2 + n2 * n2 * squares1)
        words[row, offset + 4] = float_bits(fourths + 4.0 * step * (n1 * cubes2 - n2 * cubes1))


@fold(FLOATS_IN, FLOATS_IN, I64)
def comoments(row: int, column: StateColumn, x: float, y: float, width: int) -> None:
    """Add pairs one after another.

    The state consists of the count, the means of x and y, and the sum of products of deviations. With a fifth word it
    has the sum of squared deviations of x by the formula of `moments`; with a sixth the sums for x and for y.

    Args:
        row, column: as for `moments`.
        x, y: the pair.
        width: words of the state, 4 to 6.
    """
    count = _get(row, column, 0) + 1.0
    dx = x - _get(row, column, 1)
    dy = y - _get(row, column, 2)
    mean_x = _get(row, column, 1) + dx / count
    mean_y = _get(row, column, 2) + dy / count
    _put(row, column, 0, count)
    _put(row, column, 1, mean_x)
    _put(row, column, 2, mean_y)
    _put(row, column, 3, _get(row, column, 3) + dx * (y - mean_y))
    if width == 5:
        _put(row, column, 4, _get(row, column, 4) + dx * (dx - dx / count))
    elif width == 6:
        _put(row, column, 4, _get(row, column, 4) + dx * (x - mean_x))
        _put(row, column, 5, _get(row, column, 5) + dy * (y - mean_y))


@kernel(types.void(WORDS, INTS_IN, I64, I64, WORDS_IN))
def combine_comoments(words: Array, rows: Array, offset: int, width: int, others: Array) -> None:
    """Combine the states of rows with `others`, `width` words each."""
    for i in range(rows.size):
        row = rows[i]
        n1 = bits_float(words[row, offset])
        n2 = bits_float(others[i, 0])
        if n2 == 0.0:
            continue
        if n1 == 0.0:
            for k in range(width):
                words[row, offset + k] = others[i, k]
            continue
        dx = bits_float(others[i, 1]) - bits_float(words[row, offset + 1])
        dy = bits_float(others[i, 2]) - bits_float(words[row, offset + 2])
        step_x = dx / (n1 + n2)
        step_y = dy / (n1 + n2)
        words[row, offset] = float_bits(n1 + n2)
        words[row, offset + 1] = float_bits(bits_float(words[row, offset + 1]) + step_x * n2)
        words[row, offset + 2] = float_bits(bits_float(words[row, offset + 2]) + step_y * n2)
        for k in range(3, width):
            both = bits_float(words[row, offset + k]) + bits_float(others[i, k])
            if k == 3:
                between = dx * step_y
            elif k == 4:
                between = dx * step_x
            else:
                between = dy * step_y
            words[row, offset + k] = float_bits(both + between * n1 * n2)

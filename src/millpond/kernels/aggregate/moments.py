"""Central moments: sums of powers of deviations from a mean that moves as values come.

A row's state is consecutive doubles: how many values, their mean, and the sums of the second, third and fourth powers
of their deviations, up to the *order* asked for. Formulas and the order of their operations are Spark's: Meng, "Simpler
Online Updates for Arbitrary-Order Central Moments" (2015), for values, and for two sets the pairwise formulas of Chan,
Golub and LeVeque and their like for higher orders.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import BYTES_IN, FLOATS_IN, I64, INTS_IN, WORDS, WORDS_IN, bits_float, float_bits

Array = NDArray[Any]


@kernel(types.void(WORDS, INTS_IN, I64, I64, I64, FLOATS_IN, BYTES_IN))
def moments(words: Array, rows: Array, start: int, offset: int, order: int, values: Array, valid: Array) -> None:
    """Take up the values of a block, one after the other.

    Args:
        words: the slab of rows. rows: the row ids of the block. start: where in the batch the block starts.
        offset: the first word of the state. order: the highest power, 2 to 4.
        values, valid: of the whole batch; an empty `valid` means that every row counts.
    """
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        count = bits_float(words[row, offset]) + 1.0
        mean = bits_float(words[row, offset + 1])
        delta = values[start + i] - mean
        step = delta / count
        squares = bits_float(words[row, offset + 2]) + delta * (delta - step)
        words[row, offset] = float_bits(count)
        words[row, offset + 1] = float_bits(mean + step)
        words[row, offset + 2] = float_bits(squares)
        if order < 3:
            continue
        delta2 = delta * delta
        step2 = step * step
        cubes = bits_float(words[row, offset + 3]) - 3.0 * step * squares + delta * (delta2 - step2)
        words[row, offset + 3] = float_bits(cubes)
        if order < 4:
            continue
        fourths = bits_float(words[row, offset + 4]) - 4.0 * step * cubes - 6.0 * step2 * squares
        words[row, offset + 4] = float_bits(fourths + delta * (delta * delta2 - step * step2))


@kernel(types.void(WORDS, INTS_IN, I64, I64, WORDS_IN))
def combine_moments(words: Array, rows: Array, offset: int, order: int, others: Array) -> None:
    """Combine the states of rows with others, `order + 1` words each."""
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

"""Byte strings that concatenate several columns of a row, and their decomposition."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import BYTES, BYTES_IN, INTS, INTS_IN, copy_between

Array = NDArray[Any]


@kernel(types.void(BYTES_IN, INTS_IN, INTS, BYTES))
def spread(data: Array, bounds: Array, at: Array, out: Array) -> None:
    """Append each row's bytes of a column (between `bounds`) at the row's position `at` in `out`; advance `at`."""
    for i in range(at.size):
        length = bounds[i + 1] - bounds[i]
        copy_between(out, at[i], data, bounds[i], length)
        at[i] += length


@kernel(types.void(BYTES_IN, INTS, INTS_IN, BYTES))
def collect(data: Array, at: Array, bounds: Array, out: Array) -> None:
    """Copy each row's bytes of a column from its position `at` in `data` to between `bounds`; advance `at`."""
    for i in range(at.size):
        length = bounds[i + 1] - bounds[i]
        copy_between(out, bounds[i], data, at[i], length)
        at[i] += length


@kernel(types.void(INTS_IN, BYTES_IN, INTS))
def escaped_ends(offsets: Array, data: Array, ends: Array) -> None:
    """Compute the ends of byte strings after `escape` (`ends[i + 1]`), written one after another."""
    ends[0] = 0
    for i in range(offsets.size - 1):
        size = offsets[i + 1] - offsets[i] + 2
        for k in range(offsets[i], offsets[i + 1]):
            size += data[k] == 0
        ends[i + 1] = ends[i] + size


@kernel(types.void(INTS_IN, BYTES_IN, INTS_IN, BYTES))
def escape(offsets: Array, data: Array, ends: Array, out: Array) -> None:
    """Escape byte strings so that concatenations keep their order: 0 becomes 0 255, and 0 0 marks the end."""
    for i in range(offsets.size - 1):
        position = ends[i]
        for k in range(offsets[i], offsets[i + 1]):
            out[position] = data[k]
            position += 1
            if data[k] == 0:
                out[position] = 255
                position += 1
        out[position] = 0
        out[position + 1] = 0

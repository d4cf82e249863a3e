"""Byte strings that are put together of the columns that rows have, and taken apart again."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import BYTES, BYTES_IN, INTS, INTS_IN, copy_bytes

Array = NDArray[Any]


@kernel(types.void(BYTES_IN, INTS_IN, INTS, BYTES))
def spread(data: Array, bounds: Array, at: Array, out: Array) -> None:
    """Copy every row's bytes of a column, those between two bounds, to the row's place in `out`, and move it on."""
    for i in range(at.size):
        length = bounds[i + 1] - bounds[i]
        copy_bytes(out, at[i], data, bounds[i], length)
        at[i] += length


@kernel(types.void(BYTES_IN, INTS, INTS_IN, BYTES))
def collect(data: Array, at: Array, bounds: Array, out: Array) -> None:
    """Copy from every row's place in `data` its bytes of a column, to between two bounds, and move the place on."""
    for i in range(at.size):
        length = bounds[i + 1] - bounds[i]
        copy_bytes(out, bounds[i], data, at[i], length)
        at[i] += length


@kernel(types.void(INTS_IN, BYTES_IN, INTS))
def escaped_ends(offsets: Array, data: Array, ends: Array) -> None:
    """Where byte strings end once `escape` has written them (`ends[i + 1]`), one after the other."""
    ends[0] = 0
    for i in range(offsets.size - 1):
        size = offsets[i + 1] - offsets[i] + 2
        for k in range(offsets[i], offsets[i + 1]):
            size += data[k] == 0
        ends[i + 1] = ends[i] + size


@kernel(types.void(INTS_IN, BYTES_IN, INTS_IN, BYTES))
def escape(offsets: Array, data: Array, ends: Array, out: Array) -> None:
    """Write byte strings so that they order as they did whatever follows: 0 as 0 255, and 0 0 at the end."""
    for i in range(offsets.size - 1):
        at = ends[i]
        for k in range(offsets[i], offsets[i + 1]):
            out[at] = data[k]
            at += 1
            if data[k] == 0:
                out[at] = 255
                at += 1
        out[at] = 0
        out[at + 1] = 0

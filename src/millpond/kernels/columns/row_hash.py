"""64-bit digests of rows over Arrow columns, for checksums that do not depend on row order.

Kernels work column by column and read Arrow buffers by address. A validity address of 0 means that the column has no
nulls. A null mixes in a constant, whatever the buffer contains at its position.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import HALF, I64, LOW_HALF, U64, UINTS
from millpond.kernels.mix import mix64
from millpond.kernels.pointers import byte_at, word, word_at

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NULL = np.uint64(0xA0761D6478BD642F)
_ONE = np.uint64(1)
_29 = np.uint64(29)
_35 = np.uint64(35)


@helper
def _mix(state: np.uint64, value: np.uint64) -> np.uint64:
    state = (state ^ value) * _MULTIPLIER
    return (state << _29) | (state >> _35)


@helper
def _is_null(validity: int, index: int) -> bool:
    return validity != np.uint64(0) and (byte_at(validity, index >> 3) >> np.uint8(index & 7)) & np.uint8(1) == 0


@kernel(types.void(UINTS, U64, I64, U64, I64))
def mix_fixed(state: NDArray[np.uint64], values: int, size: int, validity: int, offset: int) -> None:
    """Mix in a column of `size`-byte values (1, 2, 4, or a multiple of 8); row 0 is value number `offset`."""
    words = size >> 3
    for i in range(state.size):
        index = i + offset
        if _is_null(validity, index):
            state[i] = _mix(state[i], _NULL)
        elif words == 1:
            state[i] = _mix(state[i], word(values, index))
        elif words > 1:
            for w in range(words):
                state[i] = _mix(state[i], word(values, index * words + w))
        else:
            value = np.uint64(0)
            for b in range(size):
                value |= np.uint64(byte_at(values, index * size + b)) << np.uint64(8 * b)
            state[i] = _mix(state[i], value)


@kernel(types.void(UINTS, U64, U64, I64))
def mix_bits(state: NDArray[np.uint64], values: int, validity: int, offset: int) -> None:
    """Mix in a column of bits; row 0 is bit number `offset`."""
    for i in range(state.size):
        index = i + offset
        if _is_null(validity, index):
            state[i] = _mix(state[i], _NULL)
        else:
            state[i] = _mix(state[i], np.uint64((byte_at(values, index >> 3) >> np.uint8(index & 7)) & np.uint8(1)))


@helper
def _offset(offsets: int, wide: bool, index: int) -> np.int64:
    if wide:
        return np.int64(word(offsets, index))
    return (
        np.int64(word_at(offsets, index * 4) & LOW_HALF)
        if index == 0
        else np.int64(word_at(offsets, index * 4 - 4) >> HALF)
    )


@kernel(types.void(UINTS, U64, types.boolean, U64, U64, I64))
def mix_bytes(state: NDArray[np.uint64], offsets: int, wide: bool, data: int, validity: int, offset: int) -> None:
    """Mix in a column of byte strings with 32-bit or (`wide`) 64-bit offsets; row 0 is string number `offset`."""
    for i in range(state.size):
        index = i + offset
        if _is_null(validity, index):
            state[i] = _mix(state[i], _NULL)
            continue
        start = _offset(offsets, wide, index)
        length = _offset(offsets, wide, index + 1) - start
        mixed = _mix(state[i], np.uint64(length))
        whole = length >> 3
        for w in range(whole):
            mixed = _mix(mixed, word_at(data, start + 8 * w))
        tail_bytes = length & 7
        if tail_bytes > 0 and length >= 8:
            mixed = _mix(mixed, word_at(data, start + length - 8))
        elif tail_bytes > 0:
            tail = np.uint64(0)
            for b in range(tail_bytes):
                tail |= np.uint64(byte_at(data, start + b)) << np.uint64(8 * b)
            mixed = _mix(mixed, tail)
        state[i] = mixed


@kernel(types.void(UINTS, U64, types.boolean, UINTS, I64, U64, I64))
def mix_lists(
    state: NDArray[np.uint64],
    offsets: int,
    wide: bool,
    elements: NDArray[np.uint64],
    first: int,
    validity: int,
    offset: int,
) -> None:
    """Mix in a column of lists, given the digests of their elements; `elements[0]` is element number `first`."""
    for i in range(state.size):
        index = i + offset
        if _is_null(validity, index):
            state[i] = _mix(state[i], _NULL)
            continue
        start = _offset(offsets, wide, index) - first
        stop = _offset(offsets, wide, index + 1) - first
        mixed = _mix(state[i], np.uint64(stop - start))
        for e in range(start, stop):
            mixed = _mix(mixed, elements[e])
        state[i] = mixed


@kernel(types.void(UINTS, U64, I64))
def mix_validity(state: NDArray[np.uint64], validity: int, offset: int) -> None:
    """Mix in the validity of rows (of structs, whose fields are mixed in separately)."""
    for i in range(state.size):
        state[i] = _mix(state[i], _NULL if _is_null(validity, i + offset) else _ONE)


@kernel(U64(UINTS))
def total(state: NDArray[np.uint64]) -> np.uint64:
    """Sum the rows' digests, each scrambled first, so that the sum does not depend on row order."""
    result = np.uint64(0)
    for i in range(state.size):
        result += mix64(state[i])
    return result

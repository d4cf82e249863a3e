"""Conversion of Arrow columns to state words and back: one kernel per kind of column."""


# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import (
    BYTES,
    BYTES_IN,
    FLOATS_IN,
    HALF,
    I64,
    INTS,
    INTS_IN,
    SHORTS_IN,
    U64,
    WORDS,
    WORDS_IN,
    copy_between,
    float_bits,
    load_up_to_8,
    store64,
)
from millpond.layout import INLINE, LENGTH

Array = NDArray[Any]

_CANONICAL_NAN = np.uint64(0x7FF8000000000000)
_ZERO = np.uint64(0)


@kernel(types.void(WORDS, INTS_IN, I64))
def put_header(words: Array, hashes: Array, start: int) -> None:
    """Write the hash words, and clear the words from there to the first column word `start`."""
    for i in range(words.shape[0]):
        words[i, 0] = np.uint64(hashes[i])
        for w in range(1, start):
            words[i, w] = _ZERO


@kernel(types.void(WORDS, I64, I64, U64, INTS_IN, BYTES_IN))
def put_ints(words: Array, offset: int, null_word: int, null_bit: int, values: Array, valid: Array) -> None:
    """Write a column of integers; rows with `valid` 0 become null (an empty `valid` means no nulls)."""
    if valid.size == 0:
        for i in range(words.shape[0]):
            words[i, offset] = np.uint64(values[i])
        return
    for i in range(words.shape[0]):
        if valid[i] != 0:
            words[i, offset] = np.uint64(values[i])
        else:
            words[i, offset] = _ZERO
            words[i, null_word] |= null_bit


@kernel(types.void(WORDS, I64, I64, U64, FLOATS_IN, BYTES_IN))
def put_floats(words: Array, offset: int, null_word: int, null_bit: int, values: Array, valid: Array) -> None:
    """Write a column of doubles as a key: −0.0 becomes 0.0, and all NaNs become the same NaN."""
    nullable = valid.size != 0
    for i in range(words.shape[0]):
        if nullable and valid[i] == 0:
            words[i, offset] = _ZERO
            words[i, null_word] |= null_bit
            continue
        value = values[i]
        if value != value:
            words[i, offset] = _CANONICAL_NAN
        else:
            words[i, offset] = float_bits(value + 0.0)


@kernel(types.void(WORDS, I64, I64, U64, WORDS_IN, BYTES_IN))
def put_pairs(words: Array, offset: int, null_word: int, null_bit: int, values: Array, valid: Array) -> None:
    """Write a column of word pairs (128-bit decimals, packed byte strings)."""
    nullable = valid.size != 0
    for i in range(words.shape[0]):
        if nullable and valid[i] == 0:
            words[i, offset] = _ZERO
            words[i, offset + 1] = _ZERO
            words[i, null_word] |= null_bit
        else:
            words[i, offset] = values[i, 0]
            words[i, offset + 1] = values[i, 1]


@inlined
def _pack(words: Array, i: int, offset: int, data: Array, start: int, length: int, base: int) -> None:
    head = load_up_to_8(data, start, min(length, 4))
    words[i, offset] = np.uint64(length) | (head << HALF)
    if length > INLINE:
        words[i, offset + 1] = np.uint64(base + start)
    elif length > 4:
        words[i, offset + 1] = load_up_to_8(data, start + 4, length - 4)
    else:
        words[i, offset + 1] = _ZERO


@kernel(
    types.void(WORDS, I64, I64, U64, SHORTS_IN, BYTES_IN, I64, BYTES_IN),
    types.void(WORDS, I64, I64, U64, INTS_IN, BYTES_IN, I64, BYTES_IN),
)
def pack_bytes(
    words: Array, offset: int, null_word: int, null_bit: int, offsets: Array, data: Array, base: int, valid: Array
) -> None:
    """Write a column of byte strings given by Arrow offsets into `data`, which is at `base` in the heap."""
    nullable = valid.size != 0
    for i in range(words.shape[0]):
        if nullable and valid[i] == 0:
            words[i, offset] = _ZERO
            words[i, offset + 1] = _ZERO
            words[i, null_word] |= null_bit
            continue
        start = np.int64(offsets[i])
        _pack(words, i, offset, data, start, np.int64(offsets[i + 1]) - start, base)


@kernel(types.void(WORDS_IN, I64, INTS))
def byte_offsets(words: Array, offset: int, offsets: Array) -> None:
    """Compute offsets of a bytes column: `offsets[i + 1] - offsets[i]` is the length of row i."""
    total = np.int64(0)
    offsets[0] = 0
    for i in range(words.shape[0]):
        total += np.int64(words[i, offset] & LENGTH)
        offsets[i + 1] = total


@kernel(types.void(WORDS_IN, I64, BYTES_IN, INTS_IN, BYTES))
def unpack_bytes(words: Array, offset: int, heap: Array, offsets: Array, out: Array) -> None:
    """Copy the values of a bytes column to the offsets from `byte_offsets`; `out` needs 8 spare bytes."""
    for i in range(words.shape[0]):
        target = offsets[i]
        length = offsets[i + 1] - target
        first = words[i, offset]
        second = words[i, offset + 1]
        if length > INLINE:
            copy_between(out, target, heap, np.int64(second), length)
        elif length > 4:  # the next rows overwrite the spilled bytes
            store64(out, target, (first >> HALF) | (second << HALF))
            store64(out, target + 4, second)
        elif length > 0:
            store64(out, target, first >> HALF)

"""Lists and sketches as state: byte blobs that grow by half and are written in place.

A blob is four bytes of header (zeros) and then its content; its length is what it has room for. Beside it stands a word
that says how much of it is used; while a block is folded in, its upper half counts what is about to be added.
"""

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
    HALF,
    I64,
    INTS,
    INTS_IN,
    WORDS,
    WORDS_IN,
    bits_float,
    copy_bytes,
    load64,
    store64,
)
from millpond.layout import INLINE, LENGTH

Array = NDArray[Any]

HEADER = 4
"""Bytes before a blob's content: the row repeats them in its first word, so they never change."""
_CHUNK = 16
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@inlined
def _size(values: Array, i: int, width: int) -> int:
    """Bytes that a value takes in a list: its width, or for byte strings a length and the bytes."""
    return width if width > 0 else 4 + np.int64(values[i, 0] & LENGTH)


@kernel(I64(WORDS, INTS_IN, I64, INTS, INTS))
def _short(words: Array, rows: Array, offset: int, out_rows: Array, out_sizes: Array) -> int:
    """Find the rows whose blob has no room for what the upper half of the word of used bytes says, and clear that."""
    used_word = offset + 2
    count = 0
    for i in range(rows.size):
        row = rows[i]
        used = words[row, used_word] & LENGTH
        need = np.int64(words[row, used_word] >> HALF) + np.int64(used)
        if words[row, used_word] == used:
            continue
        words[row, used_word] = used
        room = np.int64(words[row, offset] & LENGTH)
        if need + HEADER > room:
            out_rows[count] = row
            grown = max(need + HEADER, room + (room >> 1))
            out_sizes[count] = (grown + _CHUNK - 1) // _CHUNK * _CHUNK
            count += 1
    return count


@kernel(I64(WORDS, INTS_IN, I64, I64, WORDS_IN, BYTES_IN, I64, INTS, INTS))
def find_short(
    words: Array,
    rows: Array,
    start: int,
    offset: int,
    values: Array,
    valid: Array,
    width: int,
    out_rows: Array,
    out_sizes: Array,
) -> int:
    """Find the rows whose blob has no room for the block's values.

    Args:
        offset: of the blob column; the word of used bytes follows it.
        values: packed byte strings, looked at only if `width` is 0.
        width: bytes of a value, 0 for byte strings.

    Returns:
        How many entries of `out_rows` (row ids, each once) and `out_sizes` (lengths to grow to) are filled.
    """
    nullable = valid.size != 0
    used_word = offset + 2
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        words[rows[i], used_word] += np.uint64(_size(values, start + i, width)) << HALF
    count: int = _short(words, rows, offset, out_rows, out_sizes)
    return count


@kernel(I64(WORDS, INTS_IN, I64, INTS_IN, INTS, INTS))
def find_short_by(words: Array, rows: Array, offset: int, sizes: Array, out_rows: Array, out_sizes: Array) -> int:
    """As `find_short`, where so many bytes are to be added to the blob of each row of the block."""
    for i in range(rows.size):
        words[rows[i], offset + 2] += np.uint64(sizes[i]) << HALF
    count: int = _short(words, rows, offset, out_rows, out_sizes)
    return count


@kernel(types.void(WORDS_IN, BYTES_IN, INTS_IN, I64, INTS_IN, WORDS, BYTES))
def grow(words: Array, heap: Array, rows: Array, offset: int, sizes: Array, pairs: Array, out: Array) -> None:
    """Copy blobs, one after the other, into larger ones.

    Args:
        sizes: their new lengths, whose sum is the length of `out` (zeroed).
        pairs: receives the packed form of the new blobs, `out` being their heap.
    """
    at = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        if words[row, offset] != _ZERO:
            content = np.int64(words[row, offset + 2] & LENGTH)
            source = np.int64(words[row, offset + 1])
            copy_bytes(out, at + HEADER, heap, source + HEADER, content)
        pairs[i, 0] = np.uint64(sizes[i])
        pairs[i, 1] = np.uint64(at)
        at += sizes[i]


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, I64, BYTES_IN, BYTES_IN, I64))
def append_fixed(
    words: Array, heap: Array, rows: Array, start: int, offset: int, values: Array, valid: Array, width: int
) -> None:
    """Append values of `width` bytes, given as the bytes of the whole batch's column."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        at = np.int64(words[row, offset + 1]) + HEADER + np.int64(words[row, offset + 2])
        copy_bytes(heap, at, values, (start + i) * width, width)
        words[row, offset + 2] += np.uint64(width)


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, I64, WORDS_IN, BYTES_IN, BYTES_IN))
def append_bytes(
    words: Array, heap: Array, rows: Array, start: int, offset: int, values: Array, values_heap: Array, valid: Array
) -> None:
    """Append byte strings, each with its length before it."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        at = np.int64(words[row, offset + 1]) + HEADER + np.int64(words[row, offset + 2])
        first = values[start + i, 0]
        second = values[start + i, 1]
        length = np.int64(first & LENGTH)
        for k in range(4):
            heap[at + k] = np.uint8((first >> np.uint64(8 * k)) & np.uint64(255))
        if length > INLINE:
            copy_bytes(heap, at + 4, values_heap, np.int64(second), length)
        else:
            for k in range(4 if length > 4 else length):
                heap[at + 4 + k] = np.uint8((first >> np.uint64(32 + 8 * k)) & np.uint64(255))
            for k in range(4, length):
                heap[at + 4 + k] = np.uint8((second >> np.uint64(8 * (k - 4))) & np.uint64(255))
        words[row, offset + 2] += np.uint64(4 + length)


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, INTS_IN, INTS_IN, BYTES_IN))
def append_blobs(
    words: Array, heap: Array, rows: Array, offset: int, sizes: Array, starts: Array, other_heap: Array
) -> None:
    """Append the contents of other blobs, given by how many bytes are used and where in their heap they start."""
    for i in range(rows.size):
        row = rows[i]
        if sizes[i]:
            at = np.int64(words[row, offset + 1]) + HEADER + np.int64(words[row, offset + 2])
            copy_bytes(heap, at, other_heap, starts[i] + HEADER, sizes[i])
            words[row, offset + 2] += np.uint64(sizes[i])


@kernel(types.void(WORDS_IN, I64, I64, INTS))
def list_offsets(words: Array, offset: int, width: int, offsets: Array) -> None:
    """Running total of the number of values in lists of fixed-width values."""
    total = np.int64(0)
    offsets[0] = 0
    for i in range(words.shape[0]):
        total += np.int64(words[i, offset + 2]) // width
        offsets[i + 1] = total


@kernel(types.void(WORDS_IN, BYTES_IN, I64, INTS_IN, I64, BYTES))
def read_fixed(words: Array, heap: Array, offset: int, offsets: Array, width: int, out: Array) -> None:
    """Copy the values of lists one after the other."""
    for i in range(words.shape[0]):
        size = np.int64(words[i, offset + 2])
        if size:
            copy_bytes(out, offsets[i] * width, heap, np.int64(words[i, offset + 1]) + HEADER, size)


@kernel(I64(WORDS_IN, BYTES_IN, I64, INTS))
def bytes_list_offsets(words: Array, heap: Array, offset: int, offsets: Array) -> int:
    """As `list_offsets` for lists of byte strings; returns the length of all strings together."""
    count = np.int64(0)
    total = np.int64(0)
    offsets[0] = 0
    for i in range(words.shape[0]):
        at = np.int64(words[i, offset + 1]) + HEADER
        stop = at + np.int64(words[i, offset + 2])
        while at < stop:
            length = np.int64(load64(heap, at - HEADER) >> HALF)
            total += length
            count += 1
            at += 4 + length
        offsets[i + 1] = count
    return total


@kernel(types.void(WORDS_IN, BYTES_IN, I64, INTS, BYTES))
def read_bytes(words: Array, heap: Array, offset: int, ends: Array, out: Array) -> None:
    """Copy the strings of lists one after the other; `ends[j + 1]` receives where string j ends."""
    count = np.int64(0)
    total = np.int64(0)
    ends[0] = 0
    for i in range(words.shape[0]):
        at = np.int64(words[i, offset + 1]) + HEADER
        stop = at + np.int64(words[i, offset + 2])
        while at < stop:
            length = np.int64(load64(heap, at - HEADER) >> HALF)
            copy_bytes(out, total, heap, at + 4, length)
            total += length
            count += 1
            ends[count] = total
            at += 4 + length


@kernel(types.void(WORDS_IN, BYTES, INTS_IN, I64, I64, INTS_IN, BYTES_IN, I64))
def add_to_registers(
    words: Array, heap: Array, rows: Array, start: int, offset: int, hashes: Array, valid: Array, precision: int
) -> None:
    """Enter hashes into HyperLogLog registers: ten of six bits to a word of the row's blob."""
    nullable = valid.size != 0
    p = np.uint64(precision)
    padding = _ONE << np.uint64(precision - 1)
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        hashed = np.uint64(hashes[start + i])
        index = np.int64(hashed >> np.uint64(64 - precision))
        rest = (hashed << p) | padding
        zeros = np.uint64(1)
        while (rest >> np.uint64(63)) == _ZERO:
            rest <<= _ONE
            zeros += _ONE
        at = np.int64(words[rows[i], offset + 1]) + HEADER + index // 10 * 8
        word = load64(heap, at)
        shift = np.uint64(6 * (index % 10))
        if zeros > ((word >> shift) & np.uint64(63)):
            store64(heap, at, (word & ~(np.uint64(63) << shift)) | (zeros << shift))


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, INTS_IN, BYTES_IN, I64))
def merge_registers(
    words: Array, heap: Array, rows: Array, offset: int, starts: Array, other_heap: Array, size: int
) -> None:
    """Raise the registers of blobs of `size` bytes to those of others, given by where in their heap they start."""
    mask = np.uint64(63)
    for i in range(rows.size):
        base = np.int64(words[rows[i], offset + 1])
        for at in range(HEADER, size, 8):
            own = load64(heap, base + at)
            other = load64(other_heap, starts[i] + at)
            merged = _ZERO
            for register in range(10):
                shift = np.uint64(6 * register)
                merged |= max((own >> shift) & mask, (other >> shift) & mask) << shift
            store64(heap, base + at, merged)


@kernel(types.void(WORDS_IN, BYTES_IN, I64, I64, types.float64[::1], types.float64[::1]))
def read_registers(words: Array, heap: Array, offset: int, precision: int, inverse: Array, empty: Array) -> None:
    """For each row the sum of 2^−register, in register order, and the number of registers that are zero."""
    registers = np.int64(1) << precision
    for i in range(words.shape[0]):
        total = 0.0
        zeros = 0.0
        if words[i, offset] == _ZERO:
            total = zeros = float(registers)
        else:
            base = np.int64(words[i, offset + 1]) + HEADER
            for k in range(registers):
                register = (load64(heap, base + k // 10 * 8) >> np.uint64(6 * (k % 10))) & np.uint64(63)
                total += bits_float((np.uint64(1023) - register) << np.uint64(52))  # 2^−register
                if register == _ZERO:
                    zeros += 1.0
        inverse[i] = total
        empty[i] = zeros

"""Lists and sketches as aggregate state: byte blobs that grow by half and are updated in place.

A blob consists of a header of four zero bytes and its content; its length is its capacity. The word after the blob
column holds the number of used bytes. While a block is added, the word's upper half counts the bytes to be added.
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
    copy_between,
    load64,
    store64,
)
from millpond.layout import INLINE, LENGTH

Array = NDArray[Any]

HEADER = 4
"""Bytes of a blob's header. The row repeats them in its first word, so they must never change."""
_CHUNK = 16
_MAX_BLOB = 0xFFFFFFF0
"""Maximum bytes of a blob: the last multiple of `_CHUNK` that fits in the length word."""
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@inlined
def _size(values: Array, i: int, width: int) -> int:
    """Return the bytes of a value in a list: its width, or for byte strings a 4-byte length and the bytes."""
    return width if width > 0 else 4 + np.int64(values[i, 0] & LENGTH)


@kernel(I64(WORDS, INTS_IN, I64, INTS, INTS))
def _short(words: Array, rows: Array, offset: int, out_rows: Array, out_sizes: Array) -> int:
    """Find rows whose blob is too short for the bytes counted in the upper half of the used word; clear that half.

    Returns the number of rows; −1 if a blob would exceed `_MAX_BLOB`.
    """
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
        if need + HEADER > _MAX_BLOB:
            return -1
        if need + HEADER > room:
            out_rows[count] = row
            grown = max(need + HEADER, room + (room >> 1))
            out_sizes[count] = min((grown + _CHUNK - 1) // _CHUNK * _CHUNK, _MAX_BLOB)
            count += 1
    return count


@inlined
def _reserve(words: Array, row: int, used_word: int, size: int) -> bool:
    """Count bytes to be added in the upper half of a used word; return whether that half has overflowed."""
    before = words[row, used_word]
    words[row, used_word] = before + (np.uint64(size) << HALF)
    return bool(words[row, used_word] < before)


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
        words, rows, start, valid: as for `numeric`.
        offset: first word of the blob column; the used word is at `offset + 2`.
        values: packed byte strings, read only if `width` is 0.
        width: bytes of a value, 0 for byte strings.
        out_rows: filled with row ids, distinct.
        out_sizes: filled with lengths to grow to, in bytes.

    Returns:
        Number of filled entries of `out_rows` and `out_sizes`; −1 if a blob would take 4 GiB or more.
    """
    nullable = valid.size != 0
    used_word = offset + 2
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        if _reserve(words, rows[i], used_word, _size(values, start + i, width)):
            return -1
    count: int = _short(words, rows, offset, out_rows, out_sizes)
    return count


@kernel(I64(WORDS, INTS_IN, I64, INTS_IN, INTS, INTS))
def find_short_by(words: Array, rows: Array, offset: int, sizes: Array, out_rows: Array, out_sizes: Array) -> int:
    """Find the rows whose blob has no room for `sizes[i]` more bytes; see `find_short`."""
    for i in range(rows.size):
        if _reserve(words, rows[i], offset + 2, sizes[i]):
            return -1
    count: int = _short(words, rows, offset, out_rows, out_sizes)
    return count


@kernel(types.void(WORDS_IN, BYTES_IN, INTS_IN, I64, INTS_IN, WORDS, BYTES))
def grow(words: Array, heap: Array, rows: Array, offset: int, sizes: Array, pairs: Array, out: Array) -> None:
    """Copy blobs into larger ones, one after another.

    Args:
        words, heap, rows, offset: as for `find_short`.
        sizes: new lengths in bytes; their sum is the length of `out`.
        pairs: filled with the packed form of the new blobs, with `out` as their heap.
        out: zeroed.
    """
    target = np.int64(0)
    for i in range(rows.size):
        row = rows[i]
        if words[row, offset] != _ZERO:
            content = np.int64(words[row, offset + 2] & LENGTH)
            source = np.int64(words[row, offset + 1])
            copy_between(out, target + HEADER, heap, source + HEADER, content)
        pairs[i, 0] = np.uint64(sizes[i])
        pairs[i, 1] = np.uint64(target)
        target += sizes[i]


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
        target = np.int64(words[row, offset + 1]) + HEADER + np.int64(words[row, offset + 2])
        copy_between(heap, target, values, (start + i) * width, width)
        words[row, offset + 2] += np.uint64(width)


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, I64, WORDS_IN, BYTES_IN, BYTES_IN))
def append_bytes(
    words: Array, heap: Array, rows: Array, start: int, offset: int, values: Array, values_heap: Array, valid: Array
) -> None:
    """Append byte strings, each preceded by its length (4 bytes)."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        row = rows[i]
        target = np.int64(words[row, offset + 1]) + HEADER + np.int64(words[row, offset + 2])
        first = values[start + i, 0]
        second = values[start + i, 1]
        length = np.int64(first & LENGTH)
        for k in range(4):
            heap[target + k] = np.uint8((first >> np.uint64(8 * k)) & np.uint64(255))
        if length > INLINE:
            copy_between(heap, target + 4, values_heap, np.int64(second), length)
        else:
            for k in range(4 if length > 4 else length):
                heap[target + 4 + k] = np.uint8((first >> np.uint64(32 + 8 * k)) & np.uint64(255))
            for k in range(4, length):
                heap[target + 4 + k] = np.uint8((second >> np.uint64(8 * (k - 4))) & np.uint64(255))
        words[row, offset + 2] += np.uint64(4 + length)


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, INTS_IN, INTS_IN, BYTES_IN))
def append_blobs(
    words: Array, heap: Array, rows: Array, offset: int, sizes: Array, starts: Array, other_heap: Array
) -> None:
    """Append the contents of other blobs, given by used bytes and start in `other_heap`."""
    for i in range(rows.size):
        row = rows[i]
        if sizes[i]:
            target = np.int64(words[row, offset + 1]) + HEADER + np.int64(words[row, offset + 2])
            copy_between(heap, target, other_heap, starts[i] + HEADER, sizes[i])
            words[row, offset + 2] += np.uint64(sizes[i])


@kernel(types.void(WORDS_IN, I64, I64, INTS))
def list_offsets(words: Array, offset: int, width: int, offsets: Array) -> None:
    """Compute Arrow list offsets for lists of fixed-width values."""
    total = np.int64(0)
    offsets[0] = 0
    for i in range(words.shape[0]):
        total += np.int64(words[i, offset + 2]) // width
        offsets[i + 1] = total


@kernel(types.void(WORDS_IN, BYTES_IN, I64, INTS_IN, I64, BYTES))
def read_fixed(words: Array, heap: Array, offset: int, offsets: Array, width: int, out: Array) -> None:
    """Copy the values of lists one after another."""
    for i in range(words.shape[0]):
        size = np.int64(words[i, offset + 2])
        if size:
            copy_between(out, offsets[i] * width, heap, np.int64(words[i, offset + 1]) + HEADER, size)


@kernel(I64(WORDS_IN, BYTES_IN, I64, INTS))
def bytes_list_offsets(words: Array, heap: Array, offset: int, offsets: Array) -> int:
    """Compute Arrow list offsets for lists of byte strings; return the total bytes of all strings."""
    count = np.int64(0)
    total = np.int64(0)
    offsets[0] = 0
    for i in range(words.shape[0]):
        position = np.int64(words[i, offset + 1]) + HEADER
        stop = position + np.int64(words[i, offset + 2])
        while position < stop:
            length = np.int64(load64(heap, position - HEADER) >> HALF)
            total += length
            count += 1
            position += 4 + length
        offsets[i + 1] = count
    return total


@kernel(types.void(WORDS_IN, BYTES_IN, I64, INTS, BYTES))
def read_bytes(words: Array, heap: Array, offset: int, ends: Array, out: Array) -> None:
    """Copy the strings of lists one after another; `ends[j + 1]` is set to the end of string j."""
    count = np.int64(0)
    total = np.int64(0)
    ends[0] = 0
    for i in range(words.shape[0]):
        position = np.int64(words[i, offset + 1]) + HEADER
        stop = position + np.int64(words[i, offset + 2])
        while position < stop:
            length = np.int64(load64(heap, position - HEADER) >> HALF)
            copy_between(out, total, heap, position + 4, length)
            total += length
            count += 1
            ends[count] = total
            position += 4 + length


@kernel(types.void(WORDS_IN, BYTES, INTS_IN, I64, I64, INTS_IN, BYTES_IN, I64))
def add_to_registers(
    words: Array, heap: Array, rows: Array, start: int, offset: int, hashes: Array, valid: Array, precision: int
) -> None:
    """Add hashes to HyperLogLog registers. Each word of the row's blob holds ten registers of six bits."""
    nullable = valid.size != 0
    p = np.uint64(precision)
    # The padding bit bounds the number of leading zeros when all remaining bits of the hash are zero.
    padding = _ONE << np.uint64(precision - 1)
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        hashed = np.uint64(hashes[start + i])
        index = np.int64(hashed >> np.uint64(64 - precision))
        suffix = (hashed << p) | padding
        zeros = np.uint64(1)
        while (suffix >> np.uint64(63)) == _ZERO:
            suffix <<= _ONE
            zeros += _ONE
        position = np.int64(words[rows[i], offset + 1]) + HEADER + index // 10 * 8
        word = load64(heap, position)
        shift = np.uint64(6 * (index % 10))
        if zeros > ((word >> shift) & np.uint64(63)):
            store64(heap, position, (word & ~(np.uint64(63) << shift)) | (zeros << shift))


@kernel(types.void(WORDS, BYTES, INTS_IN, I64, INTS_IN, BYTES_IN, I64))
def merge_registers(
    words: Array, heap: Array, rows: Array, offset: int, starts: Array, other_heap: Array, size: int
) -> None:
    """Merge HyperLogLog registers by maximum with other blobs of `size` bytes, given by start in `other_heap`."""
    mask = np.uint64(63)
    for i in range(rows.size):
        base = np.int64(words[rows[i], offset + 1])
        for position in range(HEADER, size, 8):
            own = load64(heap, base + position)
            other = load64(other_heap, starts[i] + position)
            merged = _ZERO
            for register in range(10):
                shift = np.uint64(6 * register)
                merged |= max((own >> shift) & mask, (other >> shift) & mask) << shift
            store64(heap, base + position, merged)


@kernel(types.void(WORDS_IN, BYTES_IN, I64, I64, types.float64[::1], types.float64[::1]))
def read_registers(words: Array, heap: Array, offset: int, precision: int, inverse: Array, empty: Array) -> None:
    """Compute each row's sum of 2^−register, in register order, and number of zero registers."""
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

"""Count-min sketches (Count-Min §3) as blobs of fixed size, with Spark's hashes.

A blob's content (after `collect.HEADER`) is the total count, then `depth` rows of `width` counters, 8 bytes each.
Hashes are those of Spark's `CountMinSketchImpl`. An integer is multiplied with each row's multiplier, modulo 2^31 −
1. For bytes there are two Murmur3 hashes, the second seeded with the first; the rows' hashes are linear combinations
of them.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value,no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from millpond.kernels.aggregate.collect import HEADER
from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.memory import BYTES, BYTES_IN, I64, INTS_IN, WORDS_IN, load64, store64
from millpond.layout import INLINE, LENGTH

Array = NDArray[Any]

_PRIME = np.int64((1 << 31) - 1)
_PAIRS = types.Array(types.int32, 2, "C")


@inlined
def _rotated(word: int, by: int) -> int:
    return np.uint32((word << np.uint32(by)) | (word >> np.uint32(32 - by)))


@inlined
def _mixed(hashed: int, word: int) -> int:
    word = np.uint32(word * np.uint32(0xCC9E2D51))
    word = np.uint32(_rotated(word, 15) * np.uint32(0x1B873593))
    return np.uint32(_rotated(np.uint32(hashed ^ word), 13) * np.uint32(5) + np.uint32(0xE6546B64))


@inlined
def _byte(first: int, second: int, heap: Array, length: int, k: int) -> int:
    """Return byte `k` of a packed byte string."""
    if length > INLINE:
        return heap[np.int64(second) + k]
    if k < 4:
        return np.uint8((first >> np.uint64(32 + 8 * k)) & np.uint64(255))
    return np.uint8((second >> np.uint64(8 * (k - 4))) & np.uint64(255))


@inlined
def _murmur(first: int, second: int, heap: Array, length: int, seed: int) -> int:
    """Compute Spark's Murmur3 of a packed byte string: each byte of the tail is mixed in as a signed word."""
    hashed = np.uint32(seed)
    aligned = length - length % 4
    for position in range(0, aligned, 4):
        word = np.uint32(0)
        for k in range(4):
            word |= np.uint32(_byte(first, second, heap, length, position + k)) << np.uint32(8 * k)
        hashed = _mixed(hashed, word)
    for position in range(aligned, length):
        hashed = _mixed(hashed, np.uint32(np.int32(np.int8(_byte(first, second, heap, length, position)))))
    hashed = np.uint32(hashed ^ np.uint32(length))
    hashed = np.uint32((hashed ^ (hashed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    hashed = np.uint32((hashed ^ (hashed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(hashed ^ (hashed >> np.uint32(16)))


@kernel(types.void(WORDS_IN, BYTES_IN, _PAIRS))
def hash_bytes(values: Array, heap: Array, out: Array) -> None:
    """Compute the two hashes of each packed byte string, int32[n, 2]."""
    for i in range(values.shape[0]):
        length = np.int64(values[i, 0] & LENGTH)
        first = _murmur(values[i, 0], values[i, 1], heap, length, np.uint32(0))
        out[i, 0] = np.int32(first)
        out[i, 1] = np.int32(_murmur(values[i, 0], values[i, 1], heap, length, first))


@inlined
def _add(heap: Array, at: int, more: int) -> None:
    store64(heap, at, load64(heap, at) + np.uint64(more))


@kernel(types.void(WORDS_IN, BYTES, INTS_IN, I64, I64, INTS_IN, BYTES_IN, INTS_IN, I64))
def count_ints(
    words: Array,
    heap: Array,
    rows: Array,
    start: int,
    offset: int,
    values: Array,
    valid: Array,
    multipliers: Array,
    width: int,
) -> None:
    """Count integers in the sketches of rows."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        base = np.int64(words[rows[i], offset + 1]) + HEADER
        _add(heap, base, 1)
        for level in range(multipliers.size):
            hashed = multipliers[level] * values[start + i]
            hashed += hashed >> 32
            _add(heap, base + 8 * (1 + level * width + (hashed & _PRIME) % width), 1)


@kernel(types.void(WORDS_IN, BYTES, INTS_IN, I64, I64, _PAIRS, BYTES_IN, I64, I64))
def count_hashes(
    words: Array,
    heap: Array,
    rows: Array,
    start: int,
    offset: int,
    hashes: Array,
    valid: Array,
    depth: int,
    width: int,
) -> None:
    """Count byte strings, given by their hashes, in the sketches of rows."""
    nullable = valid.size != 0
    for i in range(rows.size):
        if nullable and valid[start + i] == 0:
            continue
        base = np.int64(words[rows[i], offset + 1]) + HEADER
        _add(heap, base, 1)
        for level in range(depth):
            hashed = np.int64(np.int32(np.int64(hashes[start + i, 0]) + level * np.int64(hashes[start + i, 1])))
            _add(heap, base + 8 * (1 + level * width + abs(hashed) % width), 1)


@kernel(types.void(WORDS_IN, BYTES, INTS_IN, I64, INTS_IN, BYTES_IN, I64))
def add_sketches(
    words: Array, heap: Array, rows: Array, offset: int, starts: Array, other_heap: Array, size: int
) -> None:
    """Add the counts of other sketches of `size` bytes, given by start in `other_heap`, to those of rows."""
    for i in range(rows.size):
        base = np.int64(words[rows[i], offset + 1])
        for position in range(HEADER, size, 8):
            _add(heap, base + position, np.int64(load64(other_heap, starts[i] + position)))


@kernel(types.void(WORDS_IN, BYTES_IN, I64, BYTES_IN, types.Array(types.uint8, 2, "C")))
def serialise(words: Array, heap: Array, offset: int, header: Array, out: Array) -> None:
    """Write sketches in Spark's format: big-endian, after a header without the total count; empty blobs as zeros.

    Args:
        words, heap, offset: rows, their heap and the first word of the blob column.
        header: bytes before the counters; the total count is written after the first four.
        out: uint8, one line per row; filled.
    """
    count = (out.shape[1] - header.size) // 8
    for row in range(words.shape[0]):
        for k in range(header.size):
            out[row, k] = header[k]
        empty = words[row, offset] == np.uint64(0)
        base = np.int64(words[row, offset + 1]) + HEADER
        for index in range(count + 1):
            value = np.uint64(0) if empty else load64(heap, base + 8 * index)
            position = 4 if index == 0 else header.size + 8 * (index - 1)
            for k in range(8):
                out[row, position + k] = np.uint8((value >> np.uint64(56 - 8 * k)) & np.uint64(255))

"""Copying rows from anywhere into one array, their long values packed into one heap."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.pointers import address, copy_bytes, prefetch, put_word, step, word
from millpond.layout import INLINE, LENGTH

_AHEAD = 12


@kernel("int64(uint64[::1], int64, int64[::1])")
def heap_bytes(rows_at: NDArray[np.uint64], count: int, blobs: NDArray[np.int64]) -> int:
    """Bytes that the long values of the first `count` rows (addresses) take; `blobs`: first words of bytes columns."""
    total = 0
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(rows_at[i + _AHEAD], blobs[0] * 8)
        for c in range(len(blobs)):
            size = np.int64(word(rows_at[i], blobs[c]) & LENGTH)
            if size > INLINE:
                total += size
    return total


@inlined
def copy_row(
    source: int, source_heap: int, target: int, width: int, blobs: NDArray[np.int64], heap: int, used: int
) -> int:
    """Copy a row, and its long values behind the first `used` bytes of a heap; returns the bytes now used."""
    for w in range(width):
        put_word(target, w, word(source, w))
    for c in range(len(blobs)):
        size = np.int64(word(source, blobs[c]) & LENGTH)
        if size > INLINE:
            copy_bytes(step(heap, used), step(source_heap, np.int64(word(source, blobs[c] + 1))), size)
            put_word(target, blobs[c] + 1, np.uint64(used))
            used += size
    return used


@kernel("int64(uint64[::1], uint64[::1], int64, int64, int64[::1], uint64, uint64, int64)")
def gather(
    rows_at: NDArray[np.uint64],
    heaps_at: NDArray[np.uint64],
    count: int,
    width: int,
    blobs: NDArray[np.int64],
    target: int,
    heap: int,
    used: int,
) -> int:
    """Copy rows one after another, and their long values behind the first `used` bytes of a heap.

    Args:
        rows_at, heaps_at: addresses of `count` rows and of the heaps they point into.
        width: words per row; blobs: first words of the bytes columns.
        target, heap: addresses of the words and of the heap written to; both are large enough.

    Returns:
        The bytes of the heap now used.
    """
    lines = (width * 8 + 63) // 64
    for i in range(count):
        if i + _AHEAD < count:
            for line in range(lines):
                prefetch(rows_at[i + _AHEAD], line * 64)
        used = copy_row(rows_at[i], heaps_at[i], step(target, i * width * 8), width, blobs, heap, used)
    return used


@kernel(
    "int64(uint64[::1], uint64[::1], int64[::1], int64, int64, int64[::1], uint64, uint64, int64)",
)
def gather_to(
    rows_at: NDArray[np.uint64],
    heaps_at: NDArray[np.uint64],
    places: NDArray[np.int64],
    count: int,
    width: int,
    blobs: NDArray[np.int64],
    target: int,
    heap: int,
    used: int,
) -> int:
    """Copy rows, each to a place (row number) of its own; the rest is as for `gather`."""
    for i in range(count):
        used = copy_row(rows_at[i], heaps_at[i], step(target, places[i] * width * 8), width, blobs, heap, used)
    return used


@kernel("int64(int64[::1], int64[::1], int64[::1], int64, int64, int64, int64[::1], int64[::1])")
def spread_ranges(
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    targets: NDArray[np.int64],
    begin: int,
    low: int,
    high: int,
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
) -> int:
    """The single rows from `low` to `high` (excluded) of ascending ranges, counted from `low`, and where each goes.

    Args:
        starts, counts: the ranges. targets: where the first row of each goes. begin: the first range to look at.
        rows, places: filled.

    Returns:
        How many rows there are.
    """
    found = 0
    for i in range(begin, len(starts)):
        if starts[i] >= high:
            break
        for row in range(max(starts[i], low), min(starts[i] + counts[i], high)):
            rows[found] = row - low
            places[found] = targets[i] + row - starts[i]
            found += 1
    return found


@kernel("int64(uint64, int64, int64, int64[::1], uint64)")
def stray(rows: int, count: int, width: int, blobs: NDArray[np.int64], limit: int) -> int:
    """The first of `count` rows with a long value beyond `limit` bytes of heap, or -1."""
    for i in range(count):
        for c in range(len(blobs)):
            size = word(rows, i * width + blobs[c]) & LENGTH
            if size > INLINE:
                offset = word(rows, i * width + blobs[c] + 1)
                if size > limit or offset > limit - size:
                    return i
    return -1


@kernel("void(uint64, int64, int64, int64[::1], int64)")
def rebase(rows: int, count: int, width: int, blobs: NDArray[np.int64], shift: int) -> None:
    """Add `shift` to the heap offsets of `count` rows in place, for a heap that was appended to another."""
    for i in range(count):
        for c in range(len(blobs)):
            if (word(rows, i * width + blobs[c]) & LENGTH) > INLINE:
                put_word(rows, i * width + blobs[c] + 1, word(rows, i * width + blobs[c] + 1) + np.uint64(shift))


@kernel("int64(uint64, int64, int64, int64[::1], int64, int64, int64, int64[::1], int64[::1])")
def cut(
    rows: int,
    count: int,
    width: int,
    blobs: NDArray[np.int64],
    most_rows: int,
    most_heap: int,
    most: int,
    stops: NDArray[np.int64],
    heaps: NDArray[np.int64],
) -> int:
    """Cut rows into blocks of at most so many rows and, unless it is a single row, bytes of long values, and of both.

    Args:
        stops, heaps: filled with the row behind each block, and its bytes of long values; as large as `count`.

    Returns:
        The number of blocks.
    """
    blocks = 0
    begin = 0
    heap = 0
    for i in range(count):
        size = 0
        for c in range(len(blobs)):
            length = np.int64(word(rows, i * width + blobs[c]) & LENGTH)
            if length > INLINE:
                size += length
        together = (i - begin + 1) * width * 8 + heap + size
        if i > begin and (i - begin == most_rows or heap + size > most_heap or together > most):
            stops[blocks], heaps[blocks] = i, heap
            blocks += 1
            begin = i
            heap = 0
        heap += size
    if count > begin:
        stops[blocks], heaps[blocks] = count, heap
        blocks += 1
    return blocks


def gather_rows(
    rows_at: NDArray[np.uint64], heaps_at: NDArray[np.uint64], width: int, blobs: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """The rows at some addresses (of words and heaps) as fresh words and a fresh compact heap."""
    count = len(rows_at)
    words = np.empty((count, width), np.uint64)
    heap = np.empty(heap_bytes(rows_at, count, blobs) if len(blobs) else 0, np.uint8)
    gather(rows_at, heaps_at, count, width, blobs, address(words), address(heap), 0)
    return words, heap


def addresses(words: NDArray[np.uint64], heap: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The address of each row of an array, and of the heap for each."""
    first = np.uint64(address(words))
    at = first + np.arange(len(words), dtype=np.uint64) * np.uint64(words.strides[0])
    return at, np.full(len(words), address(heap), np.uint64)

"""Copies of scattered rows into one array, with their long values packed into one heap."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import inlined, kernel
from millpond.kernels.pointers import address, advance, copy_bytes, prefetch, put_word, word
from millpond.layout import INLINE, LENGTH

_PREFETCH_DISTANCE = 12


@kernel("int64(uint64[::1], int64, int64[::1])")
def heap_bytes(rows_at: NDArray[np.uint64], count: int, blobs: NDArray[np.int64]) -> int:
    """Return the bytes of long values of the first `count` rows (addresses); `blobs`: first words of byte columns."""
    total = 0
    for i in range(count):
        if i + _PREFETCH_DISTANCE < count:
            prefetch(rows_at[i + _PREFETCH_DISTANCE], blobs[0] * 8)
        for c in range(len(blobs)):
            size = np.int64(word(rows_at[i], blobs[c]) & LENGTH)
            if size > INLINE:
                total += size
    return total


@inlined
def copy_row(
    source: int, source_heap: int, target: int, width: int, blobs: NDArray[np.int64], heap: int, used: int
) -> int:
    """Copy a row, and its long values behind the first `used` bytes of a heap; return the bytes now used."""
    for w in range(width):
        put_word(target, w, word(source, w))
    for c in range(len(blobs)):
        size = np.int64(word(source, blobs[c]) & LENGTH)
        if size > INLINE:
            copy_bytes(advance(heap, used), advance(source_heap, np.int64(word(source, blobs[c] + 1))), size)
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
        rows_at, heaps_at: addresses of `count` rows and of their heaps.
        count: number of rows.
        width: words per row.
        blobs: first words of the byte columns.
        target, heap: addresses of the target words and heap; both are large enough.
        used: bytes of the target heap in use.

    Returns:
        Bytes of the target heap in use afterwards.
    """
    lines = (width * 8 + 63) // 64
    for i in range(count):
        if i + _PREFETCH_DISTANCE < count:
            for line in range(lines):
                prefetch(rows_at[i + _PREFETCH_DISTANCE], line * 64)
        used = copy_row(rows_at[i], heaps_at[i], advance(target, i * width * 8), width, blobs, heap, used)
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
    """Copy rows to the given row numbers (`places`) of the target; see `gather`."""
    for i in range(count):
        used = copy_row(rows_at[i], heaps_at[i], advance(target, places[i] * width * 8), width, blobs, heap, used)
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
    """Expand ascending row ranges, clipped to `low` … `high` (excluded), into rows and their targets.

    Args:
        starts, counts: the ranges.
        targets: target of each range's first row.
        begin: the first range to process.
        low, high: the rows to include.
        rows: filled with the rows, counted from `low`.
        places: filled with their targets.

    Returns:
        Number of rows.
    """
    filled = 0
    for i in range(begin, len(starts)):
        if starts[i] >= high:
            break
        for row in range(max(starts[i], low), min(starts[i] + counts[i], high)):
            rows[filled] = row - low
            places[filled] = targets[i] + row - starts[i]
            filled += 1
    return filled


@kernel("int64(uint64, int64, int64, int64[::1], uint64)")
def stray(rows: int, count: int, width: int, blobs: NDArray[np.int64], limit: int) -> int:
    """Find the first of `count` rows with a long value outside of `limit` bytes of heap, else −1."""
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
    """Add `shift` to the heap offsets of `count` rows in place, after their heap was appended to another."""
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
    """Split rows into blocks with limits on rows, bytes of long values and total bytes; a single row may exceed them.

    Args:
        rows, count, width, blobs: address and number of the rows, words per row, first words of byte columns.
        most_rows, most_heap, most: limits of a block: rows, bytes of long values, and bytes of both together.
        stops: filled with the end of each block; as long as `count`.
        heaps: filled with each block's bytes of long values; as long as `count`.

    Returns:
        Number of blocks.
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
        total = (i - begin + 1) * width * 8 + heap + size
        if i > begin and (i - begin == most_rows or heap + size > most_heap or total > most):
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
    """Copy the rows at the given addresses (of words and heaps) into a new array with a new compact heap."""
    count = len(rows_at)
    words = np.empty((count, width), np.uint64)
    heap = np.empty(heap_bytes(rows_at, count, blobs) if len(blobs) else 0, np.uint8)
    gather(rows_at, heaps_at, count, width, blobs, address(words), address(heap), 0)
    return words, heap


def addresses(words: NDArray[np.uint64], heap: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the address of each row of an array, and of the heap for each row."""
    first = np.uint64(address(words))
    rows_at = first + np.arange(len(words), dtype=np.uint64) * np.uint64(words.strides[0])
    return rows_at, np.full(len(words), address(heap), np.uint64)

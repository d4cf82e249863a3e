"""Scans of rows ordered by (hash, time) (see `kernels.ordered.order`): mark, select by time, merge."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.ordered.order import MATCHED
from millpond.kernels.pointers import advance, prefetch, put_word, word


@kernel("int64(uint64[::1], int64[::1], int64, uint64[::1], boolean, uint8[::1], int64[::1])")
def mark(
    rows_at: NDArray[np.uint64],
    positions: NDArray[np.int64],
    count: int,
    marks: NDArray[np.uint64],
    once: bool,
    keep: NDArray[np.uint8],
    fresh: NDArray[np.int64],
) -> int:
    """Set the matched bits of pairs' rows.

    Args:
        rows_at, positions, count: addresses of the rows, their positions in the part, number of pairs.
        marks: matched bits of the part, by row position.
        once: clear `keep` for pairs whose row had matched before.
        keep: which pairs to process.
        fresh: filled with the positions of rows that had not matched before.

    Returns:
        Number of those rows.
    """
    new = 0
    for i in range(count):
        if keep[i] == 0:
            continue
        position = positions[i]
        bit = np.uint64(1) << np.uint64(position & 63)
        if word(rows_at[i], 1) & np.uint64(MATCHED) != 0 or marks[position >> 6] & bit != 0:
            if once:
                keep[i] = 0
            continue
        marks[position >> 6] |= bit
        fresh[new] = position
        new += 1
    return new


@kernel("void(uint64, int64, int64, uint64[::1])")
def set_deleted(rows: int, count: int, stride: int, marks: NDArray[np.uint64]) -> None:
    """Move matched bits into the meta words of contiguous rows, and clear the bits."""
    for i in range(count):
        if marks[i >> 6] >> np.uint64(i & 63) & np.uint64(1) != 0:
            row = advance(rows, i * stride)
            put_word(row, 1, word(row, 1) | np.uint64(MATCHED))
    marks[:] = np.uint64(0)


@kernel("void(uint64, int64, int64, int64[::1])")
def flag(rows: int, count: int, stride: int, positions: NDArray[np.int64]) -> None:
    """Set the matched flag of contiguous rows at the given positions."""
    for i in range(count):
        row = advance(rows, positions[i] * stride)
        put_word(row, 1, word(row, 1) | np.uint64(MATCHED))


@kernel(
    "int64(uint64, int64, int64, int64, uint64[::1], int64, int64, int64, uint64, uint64, int64[::1])",
)
def unmatched_between(
    rows: int,
    count: int,
    stride: int,
    time_word: int,
    marks: NDArray[np.uint64],
    base: int,
    after: int,
    until: int,
    lowest: int,
    highest: int,
    out: NDArray[np.int64],
) -> int:
    """Select the rows of a block with a time in (`after`, `until`] that have not matched.

    Args:
        rows, count, stride, time_word: the block.
        marks: matched bits of the part; may be empty.
        base: position of the block's first row in the part.
        after, until: the time interval.
        lowest, highest: range of hashes, both included.
        out: filled with row numbers within the block.

    Returns:
        Number of rows.
    """
    selected = 0
    for i in range(count):
        row = advance(rows, i * stride)
        t = np.int64(word(row, time_word))
        if t <= after or t > until:
            continue
        if word(row, 0) < lowest or word(row, 0) > highest:
            continue
        position = base + i
        if word(row, 1) & np.uint64(MATCHED) != 0:
            continue
        if len(marks) and marks[position >> 6] >> np.uint64(position & 63) & np.uint64(1) != 0:
            continue
        out[selected] = i
        selected += 1
    return selected


@kernel(
    "int64(int64[::1], int64[::1], int64[::1], uint64[::1], uint64[::1], uint64[::1],"
    "uint64, uint64, int64, int64, int64, int64, int64, boolean, uint64[::1], uint64[::1], int64[::1])",
)
def merge_parts(
    first: NDArray[np.int64],
    rows_in: NDArray[np.int64],
    bases: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    heap_at: NDArray[np.uint64],
    marks_at: NDArray[np.uint64],
    lowest: int,
    highest: int,
    stride: int,
    time_word: int,
    seq_word: int,
    after: int,
    until: int,
    drop_matched: bool,
    out_at: NDArray[np.uint64],
    out_heap: NDArray[np.uint64],
    out_matched: NDArray[np.int64],
) -> int:
    """Merge parts in the order of (hash, time, number), restricted to a hash range and a time interval.

    Args:
        first: the first block of each part, and the number of blocks at the end.
        rows_in, bases, words_at, heap_at: of each block: number of rows, position of the first one in its part,
            addresses.
        marks_at: address of each part's matched bits (0: none).
        lowest, highest: range of hashes, both included.
        stride, time_word, seq_word: layout of rows; `seq_word` 0 means no number.
        after, until: the time interval, (`after`, `until`].
        drop_matched: leave out matched rows.
        out_at, out_heap: filled with the addresses of the rows and of their heaps; as long as there are rows.
        out_matched: filled with whether the rows' matched bits are set.

    Returns:
        Number of rows.
    """
    parts = len(first) - 1
    block = np.empty(parts, np.int64)
    current = np.empty(parts, np.int64)
    heads = np.empty(parts, np.uint64)
    times = np.empty(parts, np.int64)
    numbers = np.empty(parts, np.int64)
    live = np.empty(parts, np.int64)
    alive = 0
    for p in range(parts):
        b = first[p]
        i = 0
        while b < first[p + 1]:
            if i >= rows_in[b]:
                b += 1
                i = 0
                continue
            if word(advance(words_at[b], i * stride), 0) >= lowest:
                break
            i += 1
        if b < first[p + 1]:
            row = advance(words_at[b], i * stride)
            if word(row, 0) <= highest:
                block[p] = b
                current[p] = i
                heads[p] = word(row, 0)
                times[p] = np.int64(word(row, time_word))
                numbers[p] = np.int64(word(row, seq_word)) if seq_word else 0
                live[alive] = p
                alive += 1
    filled = 0
    while alive > 0:
        best = 0
        p = live[0]
        for k in range(1, alive):
            c = live[k]
            if heads[c] < heads[p] or (
                heads[c] == heads[p] and (times[c] < times[p] or (times[c] == times[p] and numbers[c] < numbers[p]))
            ):
                best = k
                p = c
        b = block[p]
        i = current[p]
        row = advance(words_at[b], i * stride)
        if times[p] > after and times[p] <= until:
            marked = np.int64(0)
            if marks_at[p] != 0:
                position = bases[b] + i
                marked = np.int64(word(marks_at[p], position >> 6) >> np.uint64(position & 63) & np.uint64(1))
            if not drop_matched or (marked == 0 and word(row, 1) & np.uint64(MATCHED) == 0):
                out_at[filled] = row
                out_heap[filled] = heap_at[b]
                out_matched[filled] = marked
                filled += 1
        i += 1
        if i >= rows_in[b]:
            b += 1
            i = 0
            while b < first[p + 1] and rows_in[b] == 0:
                b += 1
        if b < first[p + 1] and word(advance(words_at[b], i * stride), 0) <= highest:
            row = advance(words_at[b], i * stride)
            prefetch(row, 4 * stride)
            block[p] = b
            current[p] = i
            heads[p] = word(row, 0)
            times[p] = np.int64(word(row, time_word))
            numbers[p] = np.int64(word(row, seq_word)) if seq_word else 0
        else:
            alive -= 1
            live[best] = live[alive]
    return filled

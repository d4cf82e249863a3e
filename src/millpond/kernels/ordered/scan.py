"""Passes over rows ordered by (hash, time) (see `kernels.ordered.order`): marking, choosing by time, merging."""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.ordered.order import MATCHED
from millpond.kernels.pointers import prefetch, put_word, step, word


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
    """Mark the rows of pairs as matched, in the bits beside their part.

    Args:
        rows_at, positions, count: addresses of the rows and their positions in the part.
        marks: a bit for each row of the part.
        once: whether a row counts only the first time; then `keep` is cleared where it was matched before.
        keep: which pairs count.
        fresh: filled with the positions of rows that were not matched before.

    Returns:
        How many those are.
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
def burn(rows: int, count: int, stride: int, marks: NDArray[np.uint64]) -> None:
    """Move marks into the meta words of rows that lie one after another, and clear them."""
    for i in range(count):
        if marks[i >> 6] >> np.uint64(i & 63) & np.uint64(1) != 0:
            row = step(rows, i * stride)
            put_word(row, 1, word(row, 1) | np.uint64(MATCHED))
    marks[:] = np.uint64(0)


@kernel("void(uint64, int64, int64, int64[::1])")
def flag(rows: int, count: int, stride: int, positions: NDArray[np.int64]) -> None:
    """Set the flag of matched rows at some positions, in rows that lie one after another."""
    for i in range(count):
        row = step(rows, positions[i] * stride)
        put_word(row, 1, word(row, 1) | np.uint64(MATCHED))


@kernel(
    "int64(uint64, int64, int64, int64, uint64[::1], int64, int64, int64, boolean, uint64, uint64, int64[::1])",
)
def between(
    rows: int,
    count: int,
    stride: int,
    time_word: int,
    marks: NDArray[np.uint64],
    base: int,
    after: int,
    until: int,
    unmatched: bool,
    lowest: int,
    highest: int,
    out: NDArray[np.int64],
) -> int:
    """The rows of a block with a time in (`after`, `until`], perhaps only those without a partner.

    Args:
        rows, count, stride, time_word: the block. marks, base: bits beside its part (may be empty), and the position of
            the block's first row.
        lowest, highest: hashes that count, both included.
        out: filled with row numbers within the block.

    Returns:
        How many there are.
    """
    found = 0
    for i in range(count):
        row = step(rows, i * stride)
        t = np.int64(word(row, time_word))
        if t <= after or t > until:
            continue
        if word(row, 0) < lowest or word(row, 0) > highest:
            continue
        if unmatched:
            position = base + i
            if word(row, 1) & np.uint64(MATCHED) != 0:
                continue
            if len(marks) and marks[position >> 6] >> np.uint64(position & 63) & np.uint64(1) != 0:
                continue
        out[found] = i
        found += 1
    return found


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
    """The rows of some parts in order, with hashes from `lowest` to `highest` and times in (`after`, `until`].

    Args:
        first: the first block of each part, and the number of blocks at the end.
        rows_in, bases, words_at, heap_at: of each block: rows, position of the first one in its part, addresses.
        marks_at: address of each part's bits (0: none).
        drop_matched: leave out matched rows.
        out_at, out_heap, out_matched: addresses of the rows and of their heaps, and whether they are marked beside
            their part; as long as there are rows.

    Returns:
        The number of rows.
    """
    parts = len(first) - 1
    block = np.empty(parts, np.int64)
    at = np.empty(parts, np.int64)
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
            if word(step(words_at[b], i * stride), 0) >= lowest:
                break
            i += 1
        if b < first[p + 1]:
            row = step(words_at[b], i * stride)
            if word(row, 0) <= highest:
                block[p] = b
                at[p] = i
                heads[p] = word(row, 0)
                times[p] = np.int64(word(row, time_word))
                numbers[p] = np.int64(word(row, seq_word)) if seq_word else 0
                live[alive] = p
                alive += 1
    found = 0
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
        i = at[p]
        row = step(words_at[b], i * stride)
        if times[p] > after and times[p] <= until:
            marked = np.int64(0)
            if marks_at[p] != 0:
                position = bases[b] + i
                marked = np.int64(word(marks_at[p], position >> 6) >> np.uint64(position & 63) & np.uint64(1))
            if not drop_matched or (marked == 0 and word(row, 1) & np.uint64(MATCHED) == 0):
                out_at[found] = row
                out_heap[found] = heap_at[b]
                out_matched[found] = marked
                found += 1
        i += 1
        if i >= rows_in[b]:
            b += 1
            i = 0
            while b < first[p + 1] and rows_in[b] == 0:
                b += 1
        if b < first[p + 1] and word(step(words_at[b], i * stride), 0) <= highest:
            row = step(words_at[b], i * stride)
            prefetch(row, 4 * stride)
            block[p] = b
            at[p] = i
            heads[p] = word(row, 0)
            times[p] = np.int64(word(row, time_word))
            numbers[p] = np.int64(word(row, seq_word)) if seq_word else 0
        else:
            alive -= 1
            live[best] = live[alive]
    return found

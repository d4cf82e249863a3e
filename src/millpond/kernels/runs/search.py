"""Finding keys in hash-ordered runs: which block, which row of it, and is it the key.

Hashes are uniform, so a row's place in its block follows from its hash to within a few rows. Memory is far: the kernels
work on groups of keys and ask for the lines that they will need before they need them.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.pointers import prefetch, same_key, step, word

DELETED = np.uint64(1)
"""Stands for a row's address when the newest version of the key is a tombstone."""

_GROUP = 32
_REFINEMENTS = 2
_AHEAD = 8


@kernel("void(uint64[::1], int32[::1], int64, uint64[::1], int32[::1])")
def locate(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    count: int,
    fence: NDArray[np.uint64],
    blocks: NDArray[np.int32],
) -> None:
    """For each of the first `count` selected hashes (ascending), the first block that may hold it.

    That is the last block whose first hash is smaller, since rows of one hash may begin at the end of a block.
    """
    last = len(fence) - 1
    block = 0
    for i in range(count):
        h = hashes[select[i]]
        if block < last and fence[block + 1] < h:
            # Gallop: the next block is usually near, and always found in logarithmic time.
            stride = 1
            low = block + 1
            while low + stride <= last and fence[low + stride] < h:
                low += stride
                stride <<= 1
            high = min(low + stride, last + 1)
            while high - low > 1:
                middle = (low + high) >> 1
                if fence[middle] < h:
                    low = middle
                else:
                    high = middle
            block = low
        blocks[i] = block


@kernel()
def lower_bound(rows_at: int, width: int, count: int, guess: int, h: int) -> int:
    """The first of `count` rows at an address whose hash is not below `h`, sought from a guess outwards."""
    if count == 0:
        return 0
    guess = min(max(guess, 0), count - 1)
    stride = 1
    if word(rows_at, guess * width) < h:
        low = guess
        while low + stride < count and word(rows_at, (low + stride) * width) < h:
            low += stride
            stride <<= 1
        high = min(low + stride, count)
    else:
        high = guess
        while high - stride >= 0 and word(rows_at, (high - stride) * width) >= h:
            high -= stride
            stride <<= 1
        low = max(high - stride, -1)
    while high - low > 1:
        middle = (low + high) >> 1
        if word(rows_at, middle * width) < h:
            low = middle
        else:
            high = middle
    return high


@kernel()
def _match(
    h: int,
    rows_at: int,
    heap: int,
    row: int,
    rows: int,
    key: int,
    keys_heap: int,
    null_mask: int,
    key_start: int,
    key_stop: int,
    width: int,
    references: int,
) -> int:
    # The first of a block's rows, from `row` on, with the hash and the key; `rows` if they end without, -1 if none has.
    while row < rows:
        candidate = step(rows_at, row * width * 8)
        if word(candidate, 0) != h:
            return -1
        if same_key(candidate, heap, key, keys_heap, null_mask, key_start, key_stop, references):
            return row
        row += 1
    return row


@kernel(
    "int64(uint64[::1], int32[::1], int32[::1], int32[::1], int64, uint64[::1], int64[::1], uint64[::1], uint64[::1],"
    "uint64, int64[::1], uint64, int64, uint64, uint64, int64, int64, int64, uint64, uint64[::1], uint64[::1],"
    "uint8[::1])",
)
def probe(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    blocks: NDArray[np.int32],
    admitted: NDArray[np.int32],
    count: int,
    fence: NDArray[np.uint64],
    starts: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    heap_at: NDArray[np.uint64],
    highest: int,
    order: NDArray[np.int64],
    keys_at: int,
    keys_width: int,
    keys_heap: int,
    null_mask: int,
    key_start: int,
    key_stop: int,
    width: int,
    references: int,
    found_at: NDArray[np.uint64],
    found_heap: NDArray[np.uint64],
    done: NDArray[np.uint8],
) -> int:
    """Look for keys in the blocks of one run, all of which that are needed are in memory.

    Args:
        hashes, order: hashes in ascending order, and the row of the key table that each comes from.
        select: positions in `hashes` still sought; blocks: first block to search, by position in `select`.
        admitted: the first `count` are the positions in `select` to look for.
        fence, starts, words_at, heap_at: per block, first hash, number of rows before it (one more entry at the end),
            and the addresses of its words and of its heap; highest: the run's highest hash.
        keys_at, keys_width, keys_heap: the key table: address of its words, words per row, address of its heap.
        null_mask, key_start, key_stop, references: the key's null bits, its words, and the address of a byte
            for each word: whether it is a heap offset.
        width: words per row of the run.
        found_at, found_heap: by position in `hashes`, filled with the addresses of the row found and of its heap, or
            `DELETED`; left alone if the run holds no version of the key.
        done: by position in `select`, set to 1 if the run holds a version of the key.

    Returns:
        How many were found or deleted.
    """
    nearby = np.empty(_GROUP, np.int64)
    hits = 0
    last = len(fence) - 1
    for begin in range(0, count, _GROUP):
        size = min(_GROUP, count - begin)
        for j in range(size):
            i = admitted[begin + j]
            h = hashes[select[i]]
            block = blocks[i]
            low = fence[block]
            high = fence[block + 1] if block < last else highest
            rows = starts[block + 1] - starts[block]
            guess = 0
            if h > low:
                guess = min(
                    np.int64(np.float64(h - low) * (np.float64(rows) / (np.float64(high - low) + 1.0))), rows - 1
                )
            nearby[j] = guess
            prefetch(words_at[block], guess * width * 8)
            prefetch(keys_at, order[select[i]] * keys_width * 8)
        for refinement in range(_REFINEMENTS):
            for j in range(size):
                i = admitted[begin + j]
                h = hashes[select[i]]
                block = blocks[i]
                low = fence[block]
                high = fence[block + 1] if block < last else highest
                rows = starts[block + 1] - starts[block]
                guess = nearby[j]
                there = word(words_at[block], guess * width)
                rate = np.float64(rows) / (np.float64(high - low) + 1.0)
                if there < h:
                    guess = min(guess + np.int64(np.float64(h - there) * rate), rows - 1)
                else:
                    guess = max(guess - np.int64(np.float64(there - h) * rate), 0)
                nearby[j] = guess
                prefetch(words_at[block], guess * width * 8)
                if refinement == _REFINEMENTS - 1:
                    prefetch(words_at[block], guess * width * 8 - 64)
                    prefetch(words_at[block], guess * width * 8 + 64)
        for j in range(size):
            i = admitted[begin + j]
            at = select[i]
            h = hashes[at]
            block = np.int64(blocks[i])
            rows = starts[block + 1] - starts[block]
            row = lower_bound(words_at[block], width, rows, nearby[j], h)
            key = step(keys_at, order[at] * keys_width * 8)
            while True:
                row_found = _match(
                    h,
                    words_at[block],
                    heap_at[block],
                    row,
                    rows,
                    key,
                    keys_heap,
                    null_mask,
                    key_start,
                    key_stop,
                    width,
                    references,
                )
                # Rows of one hash may go on in the next block.
                if row_found < rows or block == last or fence[block + 1] != h:
                    break
                block += 1
                rows = starts[block + 1] - starts[block]
                row = 0
            if row_found >= 0 and row_found < rows:
                row_at = step(words_at[block], row_found * width * 8)
                dead = (word(row_at, 1) & np.uint64(1)) != np.uint64(0)
                found_at[at] = DELETED if dead else row_at
                found_heap[at] = heap_at[block]
                done[i] = 1
                hits += 1
    return hits


@kernel(
    "int64(uint64[::1], int32[::1], int32[::1], int32[::1], int64, uint64[::1], int64[::1], uint64[::1], uint64[::1],"
    "uint64, int64[::1], uint64, int64, uint64, uint64, int64, int64, int64, uint64, uint64[::1], uint64[::1],"
    "uint8[::1])",
)
def walk(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    blocks: NDArray[np.int32],
    admitted: NDArray[np.int32],
    count: int,
    fence: NDArray[np.uint64],
    starts: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    heap_at: NDArray[np.uint64],
    highest: int,
    order: NDArray[np.int64],
    keys_at: int,
    keys_width: int,
    keys_heap: int,
    null_mask: int,
    key_start: int,
    key_stop: int,
    width: int,
    references: int,
    found_at: NDArray[np.uint64],
    found_heap: NDArray[np.uint64],
    done: NDArray[np.uint8],
) -> int:
    """Look for keys like `probe`, reading all rows of the blocks touched: quicker for many keys a block."""
    hits = 0
    last = len(fence) - 1
    current = np.int64(-1)
    row = np.int64(0)
    rows = np.int64(0)
    for j in range(count):
        if j + _AHEAD < count:
            prefetch(keys_at, order[select[admitted[j + _AHEAD]]] * keys_width * 8)
        i = admitted[j]
        at = select[i]
        h = hashes[at]
        block = np.int64(blocks[i])
        if block != current:
            current = block
            row = 0
            rows = starts[block + 1] - starts[block]
        base = words_at[block]
        while row < rows and word(base, row * width) < h:
            row += 1
        key = step(keys_at, order[at] * keys_width * 8)
        while True:
            row_found = _match(
                h,
                words_at[block],
                heap_at[block],
                row,
                rows,
                key,
                keys_heap,
                null_mask,
                key_start,
                key_stop,
                width,
                references,
            )
            # Rows of one hash may go on in the next block.
            if row_found < rows or block == last or fence[block + 1] != h:
                break
            block += 1
            current = block
            rows = starts[block + 1] - starts[block]
            row = 0
        if row_found >= 0 and row_found < rows:
            row_at = step(words_at[block], row_found * width * 8)
            dead = (word(row_at, 1) & np.uint64(1)) != np.uint64(0)
            found_at[at] = DELETED if dead else row_at
            found_heap[at] = heap_at[block]
            done[i] = 1
            hits += 1
    return hits


@kernel(
    "void(uint64[::1], int32[::1], int32[::1], int32[::1], int64, uint64[::1], int64[::1], uint64[::1], uint64, int64,"
    "uint64[::1])",
)
def likely_places(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    blocks: NDArray[np.int32],
    admitted: NDArray[np.int32],
    count: int,
    fence: NDArray[np.uint64],
    starts: NDArray[np.int64],
    words_at: NDArray[np.uint64],
    highest: int,
    width: int,
    places: NDArray[np.uint64],
) -> None:
    """Fill `places` with the addresses near which `probe` will look (its arguments), touching none of them."""
    last = len(fence) - 1
    for j in range(count):
        i = admitted[j]
        h = hashes[select[i]]
        block = blocks[i]
        low = fence[block]
        high = fence[block + 1] if block < last else highest
        rows = starts[block + 1] - starts[block]
        guess = 0
        if h > low:
            guess = min(np.int64(np.float64(h - low) * (np.float64(rows) / (np.float64(high - low) + 1.0))), rows - 1)
        places[j] = step(words_at[block], guess * width * 8)


@kernel("int64(int32[::1], int64, uint8[::1], int32[::1])")
def remaining(select: NDArray[np.int32], count: int, done: NDArray[np.uint8], left: NDArray[np.int32]) -> int:
    """Copy those of the first `count` selected positions that are not done to `left` (which may be `select`)."""
    kept = 0
    for i in range(count):
        left[kept] = select[i]
        kept += 1 - np.int64(done[i])
    return kept

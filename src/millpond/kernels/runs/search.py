"""Finding keys in hash-ordered runs: which block, which row of it, and is it the key.

Hashes are uniform, so a row's place in its block follows from its hash to within a few rows. Memory is far: the kernels
work on groups of keys and ask for the lines that they will need before they need them.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import BYTES, I64, INTS, SHORTS, U64, UINTS
from millpond.kernels.pointers import prefetch, same_key, step, word


class Sought(NamedTuple):
    """Keys that are looked up together, in the order of their hashes, and what has been found of them.

    Attributes:
        hashes: ascending; order: the row of the key table that each comes from.
        found_at, found_heap: addresses of the rows found and of their heaps; 0: not found yet, `DELETED`: a tombstone.
    """

    hashes: NDArray[np.uint64]
    order: NDArray[np.int64]
    found_at: NDArray[np.uint64]
    found_heap: NDArray[np.uint64]


class RunBlocks(NamedTuple):
    """The blocks of a run.

    Attributes:
        fence: first hash of each; starts: number of rows before each, and at the end of all.
        words_at, heap_at: addresses of their words and of their heaps.
    """

    fence: NDArray[np.uint64]
    starts: NDArray[np.int64]
    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]


KEY_PLACES = np.dtype(
    [
        ("null_mask", np.uint64),  # the key's null bits
        ("start", np.int64),  # its first word, and the one behind its last
        ("stop", np.int64),
        ("width", np.int64),  # words of a row
        ("references", np.uint64),  # address of a byte for each word: whether it is a heap offset
    ]
)
"""Where the key stands in the rows of a run: the one record of an array, made once for each layout."""

_SOUGHT = types.NamedTuple((UINTS, INTS, UINTS, UINTS), Sought)
_BLOCKS = types.NamedTuple((UINTS, INTS, UINTS, UINTS), RunBlocks)
_PLACES = types.Array(from_dtype(KEY_PLACES), 1, "C")

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
def _match(h: int, rows_at: int, heap: int, row: int, rows: int, key: int, keys_heap: int, places: Any) -> int:
    # The first of a block's rows, from `row` on, with the hash and the key; `rows` if they end without, -1 if none has.
    while row < rows:
        candidate = step(rows_at, row * places.width * 8)
        if word(candidate, 0) != h:
            return -1
        if same_key(candidate, heap, key, keys_heap, places.null_mask, places.start, places.stop, places.references):
            return row
        row += 1
    return row


@helper
def _guess(h: int, low: int, high: int, rows: int) -> int:
    """The likely place of a hash among the rows of a block with hashes from `low` to `high`."""
    if h <= low:
        return 0
    return min(np.int64(np.float64(h - low) * (np.float64(rows) / (np.float64(high - low) + 1.0))), rows - 1)


@helper
def _version(row_at: int) -> int:
    """What is noted of the newest version of a key, given its address."""
    return DELETED if (word(row_at, 1) & np.uint64(1)) != np.uint64(0) else row_at


_SIGNATURE = I64(
    _SOUGHT, SHORTS, SHORTS, SHORTS, _BLOCKS, U64, U64, I64, U64, _PLACES, BYTES
)  # fmt: skip


@kernel(_SIGNATURE)
def probe(
    sought: Sought,
    select: NDArray[np.int32],
    blocks: NDArray[np.int32],
    admitted: NDArray[np.int32],
    run: RunBlocks,
    highest: int,
    keys_at: int,
    keys_width: int,
    keys_heap: int,
    layout: NDArray[Any],
    done: NDArray[np.uint8],
) -> int:
    """Look for keys in the blocks of one run, all of which that are needed are in memory.

    Args:
        sought: the keys; what is found is noted there, which is left alone if the run holds no version of the key.
        select: positions of those still sought; blocks: first block to search, by position in `select`.
        admitted: the positions in `select` to look for.
        run, highest: its blocks, and its highest hash.
        keys_at, keys_width, keys_heap: the key table: address of its words, words per row, address of its heap.
        layout: of the run, as `KEY_PLACES`.
        done: by position in `select`, set to 1 if the run holds a version of the key.

    Returns:
        How many were found or deleted.
    """
    hashes, order, found_at, found_heap = sought
    fence, starts, words_at, heap_at = run
    places = layout[0]
    width = places.width
    nearby = np.empty(_GROUP, np.int64)
    hits = 0
    last = len(fence) - 1
    count = len(admitted)
    for begin in range(0, count, _GROUP):
        size = min(_GROUP, count - begin)
        for j in range(size):
            i = admitted[begin + j]
            h = hashes[select[i]]
            block = blocks[i]
            high = fence[block + 1] if block < last else highest
            guess = _guess(h, fence[block], high, starts[block + 1] - starts[block])
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
                row = _match(h, words_at[block], heap_at[block], row, rows, key, keys_heap, places)
                # Rows of one hash may go on in the next block.
                if row < rows or block == last or fence[block + 1] != h:
                    break
                block += 1
                rows = starts[block + 1] - starts[block]
                row = 0
            if row >= 0 and row < rows:
                found_at[at] = _version(step(words_at[block], row * width * 8))
                found_heap[at] = heap_at[block]
                done[i] = 1
                hits += 1
    return hits


@kernel(_SIGNATURE)
def walk(
    sought: Sought,
    select: NDArray[np.int32],
    blocks: NDArray[np.int32],
    admitted: NDArray[np.int32],
    run: RunBlocks,
    highest: int,
    keys_at: int,
    keys_width: int,
    keys_heap: int,
    layout: NDArray[Any],
    done: NDArray[np.uint8],
) -> int:
    """Look for keys like `probe`, reading all rows of the blocks touched: quicker for many keys a block."""
    hashes, order, found_at, found_heap = sought
    fence, starts, words_at, heap_at = run
    places = layout[0]
    width = places.width
    hits = 0
    last = len(fence) - 1
    count = len(admitted)
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
            found = _match(h, words_at[block], heap_at[block], row, rows, key, keys_heap, places)
            # Rows of one hash may go on in the next block.
            if found < rows or block == last or fence[block + 1] != h:
                break
            block += 1
            current = block
            rows = starts[block + 1] - starts[block]
            row = 0
        if found >= 0 and found < rows:
            found_at[at] = _version(step(words_at[block], found * width * 8))
            found_heap[at] = heap_at[block]
            done[i] = 1
            hits += 1
    return hits


@kernel(types.void(UINTS, SHORTS, SHORTS, SHORTS, _BLOCKS, U64, I64, UINTS))
def likely_places(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    blocks: NDArray[np.int32],
    admitted: NDArray[np.int32],
    run: RunBlocks,
    highest: int,
    width: int,
    places: NDArray[np.uint64],
) -> None:
    """Fill `places` with the addresses near which `probe` will look (its arguments), touching none of them."""
    fence, starts, words_at, _ = run
    last = len(fence) - 1
    for j in range(len(admitted)):
        i = admitted[j]
        block = blocks[i]
        high = fence[block + 1] if block < last else highest
        guess = _guess(hashes[select[i]], fence[block], high, starts[block + 1] - starts[block])
        places[j] = step(words_at[block], guess * width * 8)


@kernel("int64(int32[::1], int64, uint8[::1], int32[::1])")
def remaining(select: NDArray[np.int32], count: int, done: NDArray[np.uint8], left: NDArray[np.int32]) -> int:
    """Copy those of the first `count` selected positions that are not done to `left` (which may be `select`)."""
    kept = 0
    for i in range(count):
        left[kept] = select[i]
        kept += 1 - np.int64(done[i])
    return kept

"""Search for keys in hash-ordered runs: find the block, the row in it, and compare the key.

Hashes are uniform, so a row's position in its block follows from its hash to within a few rows. To hide memory
latency, kernels process keys in groups and prefetch the cache lines that they will need.
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from millpond.kernels.compiled import helper, kernel
from millpond.kernels.memory import BYTES, I64, INTS, SHORTS, U64, UINTS
from millpond.kernels.pointers import advance, prefetch, same_key, word


class PrefetchKeys(NamedTuple):
    """Keys that are looked up together, in hash order, and the rows found for them.

    Attributes:
        hashes: ascending.
        order: row of the key table for each hash.
        found_at, found_heap: addresses of the found rows and of their heaps; 0 if not found yet, `DELETED` for a
            tombstone.
    """

    hashes: NDArray[np.uint64]
    order: NDArray[np.int64]
    found_at: NDArray[np.uint64]
    found_heap: NDArray[np.uint64]


class RunBlocks(NamedTuple):
    """The blocks of a run.

    Attributes:
        fence: first hash of each block.
        starts: number of rows before each block, and of all blocks at the end.
        words_at, heap_at: addresses of the blocks' words and heaps.
    """

    fence: NDArray[np.uint64]
    starts: NDArray[np.int64]
    words_at: NDArray[np.uint64]
    heap_at: NDArray[np.uint64]


KEY_PLACES = np.dtype(
    [
        ("null_mask", np.uint64),  # the key's null bits
        ("start", np.int64),  # its first word, and the one after its last
        ("stop", np.int64),
        ("width", np.int64),  # words of a row
        ("references", np.uint64),  # address of a byte for each word: whether it is a heap offset
    ]
)
"""Position of the key in the rows of a run: one record in an array, made once per layout."""

_SOUGHT = types.NamedTuple((UINTS, INTS, UINTS, UINTS), PrefetchKeys)
_BLOCKS = types.NamedTuple((UINTS, INTS, UINTS, UINTS), RunBlocks)
_PLACES = types.Array(from_dtype(KEY_PLACES), 1, "C")

DELETED = np.uint64(1)
"""Replaces a row's address if the newest version of the key is a tombstone."""

_GROUP = 32
_REFINEMENTS = 2
_PREFETCH_DISTANCE = 8


@kernel("void(uint64[::1], int32[::1], int64, uint64[::1], int32[::1])")
def locate(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    count: int,
    fence: NDArray[np.uint64],
    blocks: NDArray[np.int32],
) -> None:
    """Find, for each of the first `count` selected hashes (ascending), the first block that may contain it.

    That is the last block whose first hash is smaller, since rows of one hash may start at the end of a block.
    """
    last = len(fence) - 1
    block = 0
    for i in range(count):
        h = hashes[select[i]]
        if block < last and fence[block + 1] < h:
            # Gallop: the next block is usually near, and is always found in logarithmic time.
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
    """Find the first of `count` rows whose hash is not below `h`, galloping from a guess, then bisecting."""
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
    # Find the first row of a block, from `row` on, with the hash and the key; `rows` at the end of the block, else
    # -1.
    while row < rows:
        candidate = advance(rows_at, row * places.width * 8)
        if word(candidate, 0) != h:
            return -1
        if same_key(candidate, heap, key, keys_heap, places.null_mask, places.start, places.stop, places.references):
            return row
        row += 1
    return row


@helper
def _guess(h: int, low: int, high: int, rows: int) -> int:
    """Interpolate the position of a hash among the rows of a block with hashes from `low` to `high`."""
    if h <= low:
        return 0
    return min(np.int64(np.float64(h - low) * (np.float64(rows) / (np.float64(high - low) + 1.0))), rows - 1)


@helper
def _version(row_at: int) -> int:
    """Return a row's address, or `DELETED` for a tombstone."""
    return DELETED if (word(row_at, 1) & np.uint64(1)) != np.uint64(0) else row_at


_SIGNATURE = I64(
    _SOUGHT, SHORTS, SHORTS, SHORTS, _BLOCKS, U64, U64, I64, U64, _PLACES, BYTES
)  # fmt: skip


@kernel(_SIGNATURE)
def probe(
    sought: PrefetchKeys,
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
    """Search keys in the blocks of one run; all blocks that are needed must be in memory.

    Args:
        sought: the keys; results are written to `found_at` and `found_heap`, unless the run has no version of the
            key.
        select: positions of the keys still searched.
        blocks: first block to search, by position in `select`.
        admitted: positions in `select` to search.
        run: the run's blocks.
        highest: the run's highest hash.
        keys_at, keys_width, keys_heap: the key table: address of its words, words per row, address of its heap.
        layout: of the run, as `KEY_PLACES`.
        done: set to 1, by position in `select`, if the run has a version of the key.

    Returns:
        Number of keys that were found or deleted.
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
        # Refine the guess by interpolation from the probed row, and prefetch the next one.
        for refinement in range(_REFINEMENTS):
            for j in range(size):
                i = admitted[begin + j]
                h = hashes[select[i]]
                block = blocks[i]
                low = fence[block]
                high = fence[block + 1] if block < last else highest
                rows = starts[block + 1] - starts[block]
                guess = nearby[j]
                probed = word(words_at[block], guess * width)
                rate = np.float64(rows) / (np.float64(high - low) + 1.0)
                if probed < h:
                    guess = min(guess + np.int64(np.float64(h - probed) * rate), rows - 1)
                else:
                    guess = max(guess - np.int64(np.float64(probed - h) * rate), 0)
                nearby[j] = guess
                prefetch(words_at[block], guess * width * 8)
                if refinement == _REFINEMENTS - 1:
                    prefetch(words_at[block], guess * width * 8 - 64)
                    prefetch(words_at[block], guess * width * 8 + 64)
        for j in range(size):
            i = admitted[begin + j]
            position = select[i]
            h = hashes[position]
            block = np.int64(blocks[i])
            rows = starts[block + 1] - starts[block]
            row = lower_bound(words_at[block], width, rows, nearby[j], h)
            key = advance(keys_at, order[position] * keys_width * 8)
            while True:
                row = _match(h, words_at[block], heap_at[block], row, rows, key, keys_heap, places)
                # Rows of one hash may continue in the next block.
                if row < rows or block == last or fence[block + 1] != h:
                    break
                block += 1
                rows = starts[block + 1] - starts[block]
                row = 0
            if row >= 0 and row < rows:
                found_at[position] = _version(advance(words_at[block], row * width * 8))
                found_heap[position] = heap_at[block]
                done[i] = 1
                hits += 1
    return hits


@kernel(_SIGNATURE)
def walk(
    sought: PrefetchKeys,
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
    """Search keys by a scan of all rows of the accessed blocks; faster than `probe` for many keys per block."""
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
        if j + _PREFETCH_DISTANCE < count:
            prefetch(keys_at, order[select[admitted[j + _PREFETCH_DISTANCE]]] * keys_width * 8)
        i = admitted[j]
        position = select[i]
        h = hashes[position]
        block = np.int64(blocks[i])
        if block != current:
            current = block
            row = 0
            rows = starts[block + 1] - starts[block]
        base = words_at[block]
        while row < rows and word(base, row * width) < h:
            row += 1
        key = advance(keys_at, order[position] * keys_width * 8)
        while True:
            match_row = _match(h, words_at[block], heap_at[block], row, rows, key, keys_heap, places)
            # Rows of one hash may continue in the next block.
            if match_row < rows or block == last or fence[block + 1] != h:
                break
            block += 1
            current = block
            rows = starts[block + 1] - starts[block]
            row = 0
        if match_row >= 0 and match_row < rows:
            found_at[position] = _version(advance(words_at[block], match_row * width * 8))
            found_heap[position] = heap_at[block]
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
    """Fill `places` with the addresses near which `probe` will search, without accessing them; arguments as there."""
    fence, starts, words_at, _ = run
    last = len(fence) - 1
    for j in range(len(admitted)):
        i = admitted[j]
        block = blocks[i]
        high = fence[block + 1] if block < last else highest
        guess = _guess(hashes[select[i]], fence[block], high, starts[block + 1] - starts[block])
        places[j] = advance(words_at[block], guess * width * 8)


@kernel("int64(int32[::1], int64, uint8[::1], int32[::1])")
def remaining(select: NDArray[np.int32], count: int, done: NDArray[np.uint8], left: NDArray[np.int32]) -> int:
    """Copy those of the first `count` selected positions that are not done to `left` (which may be `select`)."""
    kept = 0
    for i in range(count):
        left[kept] = select[i]
        kept += 1 - np.int64(done[i])
    return kept

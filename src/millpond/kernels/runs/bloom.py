"""Blocked bloom filters: one cache line per query, ten bits per key.

Each block of a run has its own lines. So the filter is read in hash order like the rows, covers a restricted range
without waste, and can be loaded block by block. (Putze, Sanders, Singler: Cache-, Hash- and Space-Efficient Bloom
Filters.)
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import HALF
from millpond.kernels.pointers import advance, prefetch, word

LINE = 64
"""Bytes per filter line: a cache line."""
BITS_PER_KEY = 10
_PROBES = 6
_PREFETCH_DISTANCE = 16


def lines_for(rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the number of filter lines for a block of `rows` rows."""
    return np.maximum(1, -(-rows * BITS_PER_KEY // (8 * LINE))).astype(np.int32)


@kernel()
def _mix(h: int) -> int:
    # Hashes of one block share their top bits: multiplication mixes all other bits into the top.
    x = (h ^ (h >> HALF)) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


@kernel()
def _line(mixed: int, lines: int) -> int:
    return np.int64(((mixed >> np.uint64(40)) * np.uint64(lines)) >> np.uint64(24))


@kernel()
def _spread(mixed: int) -> int:
    # The 54 bits that select the six probes must be independent of those that select the line.
    return (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB) >> np.uint64(8)


@kernel()
def _build_filter(rows_at: int, stride: int, count: int, lines: int, target: NDArray[np.uint64], start: int) -> None:
    """Add `count` rows (address of the first, words per row) to `lines` zeroed lines at word `start` of `target`."""
    for i in range(count):
        mixed = _mix(word(rows_at, i * stride))
        base = start + _line(mixed, lines) * 8
        bits = _spread(mixed)
        for _ in range(_PROBES):
            bit = bits & np.uint64(511)
            target[base + np.int64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))
            bits >>= np.uint64(9)


@kernel("void(uint64, int64, int64[::1], int32[::1], uint64[::1])")
def build_filters(
    rows_at: int, stride: int, counts: NDArray[np.int64], lines: NDArray[np.int32], target: NDArray[np.uint64]
) -> None:
    """Build the filters of blocks from contiguous rows.

    Args:
        rows_at, stride: address of the first row, words per row.
        counts: rows of each block.
        lines: lines of each block's filter.
        target: the filters, zeroed, one after another.
    """
    start = 0
    for b in range(len(counts)):
        _build_filter(rows_at, stride, counts[b], lines[b], target, start)
        rows_at = advance(rows_at, counts[b] * stride * 8)
        start += lines[b] * (LINE // 8)


@kernel(
    "int64(uint64[::1], int32[::1], int64, int32[::1], uint64[::1], int32[::1], uint64[::1], int32[::1])",
)
def admit(
    hashes: NDArray[np.uint64],
    select: NDArray[np.int32],
    count: int,
    blocks: NDArray[np.int32],
    fence: NDArray[np.uint64],
    lines: NDArray[np.int32],
    filter_at: NDArray[np.uint64],
    admitted: NDArray[np.int32],
) -> int:
    """Keep those of the first `count` selected hashes that their block's filter does not exclude.

    Args:
        hashes: ascending.
        select: positions in `hashes`.
        count: number of selected positions.
        blocks: first block to search, by position in `select`.
        fence, lines, filter_at: per block: first hash, number of filter lines, address of the filter (0: none).
        admitted: filled with positions in `select`; must not be `select` itself.

    Returns:
        Number of admitted hashes.
    """
    kept = 0
    last = len(fence) - 1
    for i in range(count):
        if i + _PREFETCH_DISTANCE < count:
            ahead = blocks[i + _PREFETCH_DISTANCE]
            if filter_at[ahead] != np.uint64(0):
                prefetch(filter_at[ahead], _line(_mix(hashes[select[i + _PREFETCH_DISTANCE]]), lines[ahead]) * 64)
        h = hashes[select[i]]
        block = blocks[i]
        base = filter_at[block]
        present = True
        # A hash that starts the next block may be in both blocks, and only the first block's filter is tested.
        if base != np.uint64(0) and not (block < last and fence[block + 1] == h):
            mixed = _mix(h)
            line = _line(mixed, lines[block]) * 8
            bits = _spread(mixed)
            for _ in range(_PROBES):
                bit = bits & np.uint64(511)
                if (word(base, line + np.int64(bit >> np.uint64(6))) >> (bit & np.uint64(63))) & np.uint64(
                    1
                ) == np.uint64(0):
                    present = False
                    break
                bits >>= np.uint64(9)
        # Branch-free append: the entry is overwritten if the hash is excluded.
        admitted[kept] = i
        kept += present
    return kept

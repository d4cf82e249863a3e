"""Blocked bloom filter: one cache line a question, ten bits a key.

Each block of a run has its own few lines, so that the filter is read in hash order like the rows themselves, covers a
narrowed range without waste, and can be brought in piece by piece. (Putze, Sanders, Singler: Cache-, Hash- and
Space-Efficient Bloom Filters.)
"""

# mypy: disable-error-code="untyped-decorator,assignment,return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.kernels.memory import HALF
from millpond.kernels.pointers import prefetch, step, word

LINE = 64
"""Bytes per filter line: a cache line."""
BITS_PER_KEY = 10
_PROBES = 6
_AHEAD = 16


def lines_for(rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """How many lines the filter of a block of so many rows has."""
    return np.maximum(1, -(-rows * BITS_PER_KEY // (8 * LINE))).astype(np.int32)


@kernel()
def _mix(h: int) -> int:
    # Hashes of one block share their top bits: multiply so that every bit of them reaches the top.
    x = (h ^ (h >> HALF)) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


@kernel()
def _line(mixed: int, lines: int) -> int:
    return np.int64(((mixed >> np.uint64(40)) * np.uint64(lines)) >> np.uint64(24))


@kernel()
def _spread(mixed: int) -> int:
    # The 54 bits that choose the six probes must not follow from those that chose the line.
    return (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB) >> np.uint64(8)


@kernel()
def _build_filter(rows_at: int, stride: int, count: int, lines: int, target: NDArray[np.uint64], start: int) -> None:
    """Enter `count` rows (address of the first, words a row) into `lines` zeroed lines at word `start` of `target`."""
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
    """Enter rows that stand one after another (address of the first, words a row) into the zeroed filters of blocks.

    Args:
        counts, lines: rows of each block, and lines of its filter. target: the filters, one behind the other.
    """
    start = 0
    for b in range(len(counts)):
        _build_filter(rows_at, stride, counts[b], lines[b], target, start)
        rows_at = step(rows_at, counts[b] * stride * 8)
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
        hashes: ascending; select: positions in it; blocks: first block to search, by position in `select`.
        fence, lines, filter_at: per block, first hash, number of filter lines and address of the filter (0: none).
        admitted: filled with positions in `select`; may not be `select` itself.

    Returns:
        How many were admitted.
    """
    kept = 0
    last = len(fence) - 1
    for i in range(count):
        if i + _AHEAD < count:
            ahead = blocks[i + _AHEAD]
            if filter_at[ahead] != np.uint64(0):
                prefetch(filter_at[ahead], _line(_mix(hashes[select[i + _AHEAD]]), lines[ahead]) * 64)
        h = hashes[select[i]]
        block = blocks[i]
        base = filter_at[block]
        present = True
        # A hash that begins the next block may stand in both, and only the first one's filter is looked at.
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
        admitted[kept] = i
        kept += present
    return kept

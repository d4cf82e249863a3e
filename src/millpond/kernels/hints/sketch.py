"""A count-min sketch of recent keys, with small counters that age (Keyed Prefetching §IV-B)."""

# mypy: disable-error-code="untyped-decorator,assignment"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.layout import Words

_DEPTH = 4
_WIDTH = 1 << 14
"""Counters in a row; after as many keys they are halved, so that they hold two of keys that never come again."""


@kernel("int64(uint8[:, ::1], uint64[::1], int64[::1], int64, uint8[::1])")
def count_rare(
    counters: NDArray[np.uint8], hashes: Words, times: NDArray[np.int64], hot: int, rare: NDArray[np.uint8]
) -> int:
    """Count keys as often as they came, and mark those that came less than `hot` times; returns how many these are."""
    depth, width = counters.shape
    found = 0
    for i in range(len(hashes)):
        least = 255
        mixed = hashes[i]
        for row in range(depth):
            # The top bits say which partition a key is of, so that those below tell its keys apart.
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            at = np.int64((mixed >> np.uint64(32)) % np.uint64(width))
            count = min(np.int64(counters[row, at]) + times[i], 255)
            counters[row, at] = np.uint8(count)
            least = min(least, count)
        rare[i] = least < hot
        found += np.int64(rare[i])
    return found


class Sketch:
    """How often keys were seen lately, at most.

    Args:
        hot: from how many times on, each aging halving what was before, a key is surely hot.
    """

    def __init__(self, hot: int = 8) -> None:
        self._hot = hot
        self._counters = np.zeros((_DEPTH, _WIDTH), np.uint8)
        self._counted = 0

    def rare(self, hashes: Words, times: NDArray[np.int64]) -> Words:
        """Count keys, each of which came so many times, and give those that are not surely hot."""
        marks = np.empty(len(hashes), np.uint8)
        found = count_rare(self._counters, hashes, times, self._hot, marks)
        self._counted += len(hashes)
        if self._counted >= _WIDTH:
            self._counters >>= np.uint8(1)
            self._counted = 0
        return hashes if found == len(hashes) else hashes[marks.view(np.bool_)]

"""A count-min sketch of recent keys with small counters that decay (Keyed Prefetching §IV-B)."""

# mypy: disable-error-code="untyped-decorator,assignment"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.compiled import kernel
from millpond.layout import Words

_DEPTH = 4
_WIDTH = 1 << 14
"""Counters per row. Counts are halved after as many keys, so that a counter holds about two from keys that never
return.
"""


@kernel("int64(uint8[:, ::1], uint64[::1], int64[::1], int64, uint8[::1])")
def count_rare(
    counters: NDArray[np.uint8], hashes: Words, times: NDArray[np.int64], hot: int, rare: NDArray[np.uint8]
) -> int:
    """Count keys with multiplicity `times`, and mark those with fewer than `hot` occurrences; return their number."""
    depth, width = counters.shape
    rare_count = 0
    for i in range(len(hashes)):
        least = 255
        mixed = hashes[i]
        for row in range(depth):
            # the top bits select the partition, so only the lower bits distinguish its keys
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            column = np.int64((mixed >> np.uint64(32)) % np.uint64(width))
            count = min(np.int64(counters[row, column]) + times[i], 255)
            counters[row, column] = np.uint8(count)
            least = min(least, count)
        rare[i] = least < hot
        rare_count += np.int64(rare[i])
    return rare_count


class Sketch:
    """Upper bounds of how often keys occurred recently.

    Args:
        hot: number of occurrences from which a key is certainly hot; decay halves earlier ones.
    """

    def __init__(self, hot: int = 8) -> None:
        self._hot = hot
        self._counters = np.zeros((_DEPTH, _WIDTH), np.uint8)
        self._counted = 0

    def rare(self, hashes: Words, times: NDArray[np.int64]) -> Words:
        """Count keys with multiplicity `times`, and return those that are not certainly hot."""
        marks = np.empty(len(hashes), np.uint8)
        rare_count = count_rare(self._counters, hashes, times, self._hot, marks)
        self._counted += len(hashes)
        if self._counted >= _WIDTH:
            self._counters >>= np.uint8(1)
            self._counted = 0
        return hashes if rare_count == len(hashes) else hashes[marks.view(np.bool_)]

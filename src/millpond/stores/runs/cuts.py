"""Cuts of sorted files into intervals of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def cut_evenly(fences: Sequence[NDArray[np.uint64]], sizes: Sequence[NDArray[np.int64]], step: int) -> list[int]:
    """Divide what several sorted files hold into intervals, each with blocks of about `step` in size.

    Rows of one value may fill several blocks. They stay together, so an interval may be larger.

    Args:
        fences: per file (one at least), the first value of each block, ascending.
        sizes: per file, the size of each block.
        step: in the unit of `sizes`; above 0.

    Returns:
        The exclusive ends of all intervals but the last, ascending.
    """
    block_fences, block_sizes = np.concatenate(fences), np.concatenate(sizes)
    order = np.argsort(block_fences, kind="stable")
    before = np.cumsum(block_sizes[order]) - block_sizes[order]
    cuts = np.searchsorted(before, np.arange(step, block_sizes.sum(), step), "left")
    ends: list[int] = np.unique(block_fences[order[cuts[cuts < len(order)]]]).tolist()
    return ends

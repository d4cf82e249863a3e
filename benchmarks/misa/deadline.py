"""Batches that are cut so that they meet a deadline, as zStream's dynamic buffering does (MiSA §5.1).

Spark reads the largest size of a batch (`maxFilesPerTrigger`, `maxOffsetsPerTrigger`) only when a query starts. So
files wait outside the source, and a loop beside the query releases those of one batch at a time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_REMEMBERED = 8
"""The time of the next batch is estimated from this number of last batches."""
_DIFFERENT = 1.5
"""From this ratio of the largest batch to the smallest on, a line through them gives the time of an empty batch."""
_MOST_FIXED = 0.9
"""At most this share of the batches' mean time counts as fixed, if batches have become faster."""


class Deadline:
    """Decides when a batch starts, and how many rows it has.

    Args:
        seconds: a batch starts early enough to end this long after its first row came, and takes no longer than this.
        first_rows: the most rows of a batch until the first batch has ended.
    """

    def __init__(self, seconds: float, first_rows: int) -> None:
        self._seconds = seconds
        self._first_rows = first_rows
        # Until sizes differ, half of the time counts as fixed: then batches grow while they end early.
        self._fixed: float | None = None
        self._batches: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def learn(self, rows: int, seconds: float) -> None:
        """Record how long a batch took."""
        self._batches.append((rows, seconds))
        sizes, durations = np.array(self._batches, float).T
        if sizes.max() >= _DIFFERENT * sizes.min():
            row, fixed = np.polyfit(sizes, durations, 1)
            if row > 0:
                self._fixed = max(0.0, float(fixed))

    def most_rows(self) -> float:
        """Return how many rows are processed within the deadline.

        Returns:
            Infinity if no size meets the deadline: then smaller batches would only add to the delay.
        """
        if not self._batches:
            return float(self._first_rows)
        fixed, row = self._costs()
        left = self._seconds - fixed
        return left / row if left > 0 else np.inf

    def due(self, waiting: Sequence[int], waited: float) -> int:
        """Return the number of waiting files that make the next batch; 0 = it is too early for a batch.

        Args:
            waiting: rows of each file, in the order of arrival. waited: seconds since the first file came.
        """
        rows = np.cumsum(waiting)
        if not len(rows):
            return 0
        fixed, row = self._costs() if self._batches else (0.0, 0.0)
        if rows[-1] < self.most_rows() and waited + fixed + rows[-1] * row < self._seconds:
            return 0
        return max(1, int(np.searchsorted(rows, self.most_rows(), "right")))

    def _costs(self) -> tuple[float, float]:
        """Return the seconds of a batch without rows, and the seconds for each row."""
        rows, seconds = np.array(self._batches, float).mean(axis=0).tolist()
        fixed = seconds / 2 if self._fixed is None else min(self._fixed, _MOST_FIXED * seconds)
        return fixed, (seconds - fixed) / rows


class Gate:
    """Releases waiting files into a source that reads `folders/*`: all files of a batch at once.

    Attributes:
        released: number of batches so far.
    """

    def __init__(self, waiting: Path, folders: Path) -> None:
        self._waiting = waiting
        self._folders = folders
        self.released = 0

    def release(self, names: Sequence[str]) -> None:
        """Move files into a folder, and the folder to the source."""
        half = self._waiting / f".{self.released:08}"
        half.mkdir()
        for name in names:
            os.rename(self._waiting / name, half / name)
        half.rename(self._folders / half.name[1:])
        self.released += 1

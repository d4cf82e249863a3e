"""An index of a part's unmatched rows by time, so that their expiry does not scan the part again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.layout import NEVER


class ExpiryIndex(NamedTuple):
    """The rows of a part with a time in (`after`, `until`] that were unmatched when the part was scanned.

    `times` (microseconds) ascend; `positions` are those of the same rows in the part.
    """

    after: int
    until: int
    times: NDArray[np.int64]
    positions: NDArray[np.int64]

    @property
    def memory(self) -> int:
        """Bytes of memory in use."""
        return self.times.nbytes + self.positions.nbytes

    def covers(self, after: int, until: int) -> bool:
        """Return whether the index has all rows with a time in (`after`, `until`] that may be unmatched."""
        return self.after <= after and until <= self.until

    def between(self, after: int, until: int) -> NDArray[np.int64]:
        """Return the positions (ascending) of the rows with a time in (`after`, `until`]."""
        first, last = np.searchsorted(self.times, np.array([after, until]), "right")
        return np.sort(self.positions[first:last])


class ExpiryIndexBuilder:
    """Collects the rows of an `ExpiryIndex`; of too many rows, only the earliest.

    Args:
        after: the rows' times are later than this.
        max_rows: rows in the index, at most.

    Attributes:
        until: rows later than this need not be added.
    """

    def __init__(self, after: int, max_rows: int) -> None:
        self._after = after
        self._max_rows = max_rows
        self.until = NEVER - 1
        self._times = [np.empty(0, np.int64)]
        self._positions = [np.empty(0, np.int64)]
        self._count = 0

    def add(self, times: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Add rows by their times and positions."""
        self._times.append(times)
        self._positions.append(positions)
        self._count += len(times)
        # Not at each excess, so that each row is copied a few times at most.
        if self._count > 2 * self._max_rows:
            self._drop_latest()

    def _drop_latest(self) -> None:
        times, positions = np.concatenate(self._times), np.concatenate(self._positions)
        # Rows of one time stay or go together, because `until` separates the rows in the index from the others.
        self.until = int(np.partition(times, self._max_rows)[self._max_rows]) - 1
        kept = times <= self.until
        self._times, self._positions = [times[kept]], [positions[kept]]
        self._count = len(self._times[0])

    def build(self) -> ExpiryIndex:
        """Build the index of the rows added."""
        if self._count > self._max_rows:
            self._drop_latest()
        times = np.concatenate(self._times)
        order = np.argsort(times, kind="stable")
        return ExpiryIndex(self._after, self.until, times[order], np.concatenate(self._positions)[order])

"""Streams of records made second by second: how many come in a second, and which of their subjects report."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

START = 1_700_000_000
"""Event time of a stream's first second, in seconds since the epoch."""
TIME = pa.timestamp("us", tz="UTC")
RECORD_BYTES = 65
"""Size of a record in MiSA §5.1; the columns of SegSpeedStr have 64."""
SPREAD = 0.1
"""Standard deviation of the number of records in a second, as a share of their rate."""

Rows = NDArray[np.void]
"""A structured array: one row for each vehicle or task."""


class Stream(Protocol):
    """Makes the records of one second after another."""

    def second(self, number: int, count: int) -> pa.Table:
        """Make `count` records of second `number`; seconds have to be asked for in order, from 0."""


def counts(rate: float, seconds: int, seed: int) -> NDArray[np.int64]:
    """Draw the number of records in each second, from a normal distribution around the rate (MiSA §5.1)."""
    drawn = np.random.default_rng([seed, 0]).normal(rate, SPREAD * rate, seconds)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def timestamps(second: int, count: int) -> pa.Array:
    """Event times of a second's records: whole seconds, as in Linear Road."""
    return pa.array(np.full(count, (START + second) * 1_000_000), TIME)


class Calendar:
    """Rows that are due in later seconds.

    Args:
        dtype: fields of a row.
        horizon: seconds; a row may be due less than this after the current second.
    """

    def __init__(self, dtype: np.dtype[np.void], horizon: int) -> None:
        self._buckets: list[list[Rows]] = [[] for _ in range(horizon)]
        self._none = np.empty(0, dtype)

    def take(self, second: int, count: int) -> Rows:
        """Take up to `count` rows that are due in a second; the others are due in the next."""
        bucket = self._buckets[second % len(self._buckets)]
        due = np.concatenate([self._none, *bucket])
        bucket.clear()
        if len(due) > count:
            self._at(second + 1).insert(0, due[count:])
        return due[:count]

    def put(self, rows: Rows, seconds: NDArray[np.int64]) -> None:
        """Make rows due, each in its second."""
        order = np.argsort(seconds, kind="stable")
        different, starts = np.unique(seconds[order], return_index=True)
        pieces = np.split(rows[order], starts[1:])
        for second, piece in zip(different.tolist(), pieces, strict=False):  # without rows there is one empty piece
            self._at(second).append(piece)

    def _at(self, second: int) -> list[Rows]:
        return self._buckets[second % len(self._buckets)]

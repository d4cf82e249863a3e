"""Percentiles of how long rows took from their arrival to the end of the batch that gave their results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class Latency(msgspec.Struct, frozen=True):
    """Percentiles, in milliseconds."""

    p50: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Compute the percentiles of durations in seconds."""
        values = np.percentile(np.asarray(seconds, float) * 1000, [50, 99, 99.9, 100])
        return cls(*(round(float(value), 1) for value in values))

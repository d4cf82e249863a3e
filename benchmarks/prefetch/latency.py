"""Percentiles of how long rows took from their arrival to the end of the batch that gave their results."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.measuring.percentiles import percentile


class Latency(msgspec.Struct, frozen=True):
    """Percentiles, in milliseconds."""

    p50: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Compute the percentiles of durations in seconds."""
        milliseconds = [1000 * duration for duration in seconds]
        return cls(*(round(percentile(milliseconds, share), 1) for share in (50, 99, 99.9, 100)))

"""Find the highest rate of arrival that an engine keeps up with (FlowKV §6.2 compares batch times at given rates)."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from benchmarks.measuring.result import Result
from benchmarks.workloads.config import RunConfig

_STEP, _PRECISION = 0.15, 0.05
"""Largest and smallest step between two rates that are tried, as shares of the rate in batches of fixed size."""
_KEPT_UP = 0.97


def at_highest_rate(config: RunConfig, measure: Callable[[RunConfig], Result]) -> Result:
    """Measure an engine at the highest rate that it keeps up with, found by trying.

    Args:
        config: what to run; its `rate` is not used.
        measure: runs one engine.

    Returns:
        The run at that rate, or the first run without figures.
    """
    fixed = measure(msgspec.structs.replace(config, rate=0))
    if not fixed.rows_per_second:
        return fixed
    highest: Result | None = None
    kept, missed, share = 0.0, math.inf, 1.0
    while missed - kept > _PRECISION and share > 0:
        result = measure(msgspec.structs.replace(config, rate=max(1, round(fixed.rows_per_second * share))))
        if result.error is not None:
            return highest or result
        if keeps_up(result):
            highest, kept = result, share
            share = min(share + _STEP, (kept + missed) / 2)
        else:
            missed = share
            share = max(share - _STEP, (kept + missed) / 2) if highest else share - _STEP
    if highest is None:
        fixed.error = "no rate was kept up with"
    return highest or fixed


def keeps_up(result: Result) -> bool:
    """Return whether an engine took rows as fast as they came, a batch more or less."""
    return result.rows_per_second >= _KEPT_UP * result.rate

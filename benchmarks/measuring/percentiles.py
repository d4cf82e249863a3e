"""Percentiles of measured values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def percentile(values: Sequence[float] | NDArray[np.float64], share: float) -> float:
    """Return a percentile of values, interpolated between the two nearest ones.

    Args:
        values: one at least, in any order.
        share: in percent; 50 = the median, 100 = the largest value.
    """
    return float(np.percentile(np.asarray(values, np.float64), share))

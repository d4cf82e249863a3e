"""Latencies of rows, where a clock starts batches of equal size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring.percentiles import percentile
from benchmarks.measuring.timing import batch_end, batch_start

SHARES = (50, 99, 99.9)
"""The percentiles that are reported."""

_SAMPLES = 1000
"""Number of rows that stand for all rows of a batch."""


def row_latencies(
    ends: Sequence[float] | NDArray[np.float64], first_trigger: float, interval: float, samples: int = _SAMPLES
) -> NDArray[np.float64]:
    """Return the latencies of sampled rows: from a row's arrival to the end of its batch, in seconds, batch by batch.

    Rows arrive evenly. The rows of a batch arrive in the interval before the batch is due. The first batch is due at
    the first trigger, and each following one an interval later, however late earlier batches are. So an engine that
    falls behind is charged with all rows that wait. After a batch of several intervals, Spark takes one more batch at
    once and then waits for the clock again. The rows that have piled up by then count as late until the end.

    Args:
        ends: when each batch ended, in order, in seconds. first_trigger: when the first batch could have started.
        interval: seconds between two triggers. samples: number of rows that stand for all rows of a batch.
    """
    due = first_trigger + interval * np.arange(len(ends))
    waited = interval * (np.arange(samples) + 0.5) / samples  # until the trigger
    return (np.asarray(ends, np.float64) - due)[:, None].repeat(samples, 1).ravel() + np.tile(waited, len(ends))


def latencies_of(progress: Sequence[Mapping[str, Any]], interval: float) -> NDArray[np.float64]:
    """Return the latencies of `row_latencies` for the batches of a query's progress reports.

    Args:
        progress: reports of all batches, without gaps; the first batch began within its interval.
        interval: seconds between two triggers; Spark starts batches at multiples of it.
    """
    first_trigger = batch_start(progress[0]) // interval * interval
    return row_latencies([batch_end(batch) for batch in progress], first_trigger, interval)


def latency_metrics(latencies: NDArray[np.float64]) -> dict[str, int]:
    """Return percentiles of latencies in seconds, as milliseconds by the metric's name."""
    return {f"row_p{share:g}_ms".replace(".", ""): round(1000 * percentile(latencies, share)) for share in SHARES}

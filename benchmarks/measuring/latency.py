"""Latencies of rows, where a clock starts the batches of a source that gives each as many rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring.timing import batch_end, batch_start

SHARES = (50, 99, 99.9)
"""The percentiles that are reported."""

_SAMPLES = 1000
"""Rows of a batch that stand for all."""


def row_latencies(
    ends: Sequence[float] | NDArray[np.float64], first_trigger: float, interval: float, samples: int = _SAMPLES
) -> NDArray[np.float64]:
    """From when a row was there to when its result was out, in seconds, of rows that stand for all.

    Rows come evenly. Those of a batch came in the interval before it could have started: at the first trigger, and an
    interval later for each following one, however late the batches before it were. Their results are out when it ends.
    So who falls behind is charged with all of what waits. After a batch of several intervals, Spark takes one more
    batch at once and then waits for the clock again: what has piled up by then counts until the end.

    Args:
        ends: when each batch ended, one after the other, in seconds. first_trigger: when the first could have started.
        interval: between two triggers. samples: rows of each batch.
    """
    due = first_trigger + interval * np.arange(len(ends))
    waited = interval * (np.arange(samples) + 0.5) / samples  # until the trigger
    return (np.asarray(ends, np.float64) - due)[:, None].repeat(samples, 1).ravel() + np.tile(waited, len(ends))


def latencies_of(progress: Sequence[Mapping[str, Any]], interval: float) -> NDArray[np.float64]:
    """Return the latencies of `row_latencies` for the batches of a query's progress reports.

    Args:
        progress: of each batch, without gaps; the first batch began within its interval.
        interval: seconds between two triggers; Spark starts batches at multiples of it.
    """
    first_trigger = batch_start(progress[0]) // interval * interval
    return row_latencies([batch_end(batch) for batch in progress], first_trigger, interval)


def percentiles(latencies: NDArray[np.float64]) -> dict[str, int]:
    """Their percentiles, in milliseconds."""
    return {
        f"row_p{share:g}_ms".replace(".", ""): round(1000 * float(np.percentile(latencies, share))) for share in SHARES
    }

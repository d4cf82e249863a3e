"""Latencies of rows, where a clock starts the batches of a source that gives each as many rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress

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


def latencies_of(progress: Sequence[StreamingQueryProgress], interval: float) -> NDArray[np.float64]:
    """The same from what a query says of batches, of which none is missing; the first began within its interval.

    Args:
        progress: of each batch. interval: of the trigger; Spark starts batches at multiples of it.
    """
    starts = [datetime.fromisoformat(one.timestamp).timestamp() for one in progress]
    ends = [start + one.durationMs["triggerExecution"] / 1000 for start, one in zip(starts, progress, strict=True)]
    return row_latencies(ends, starts[0] // interval * interval, interval)


def percentiles(latencies: NDArray[np.float64]) -> dict[str, int]:
    """Their percentiles, in milliseconds."""
    return {
        f"row_p{share:g}_ms".replace(".", ""): round(1000 * float(np.percentile(latencies, share))) for share in SHARES
    }

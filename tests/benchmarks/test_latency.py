"""Latencies of rows, by hand."""

import numpy as np
import pytest
from benchmarks.latency import percentiles, row_latencies


def test_batches_in_time() -> None:
    """Rows wait for the trigger, half an interval on average, and then for their batch."""
    found = row_latencies([10.2, 12.4], first_trigger=10.0, interval=2.0, samples=4)
    assert found.tolist() == pytest.approx([0.45, 0.95, 1.45, 1.95, 0.65, 1.15, 1.65, 2.15])


def test_rows_that_had_to_wait_for_earlier_batches() -> None:
    """The second batch could have started at 11, whatever the first one took."""
    found = row_latencies([13.0, 13.5], first_trigger=10.0, interval=1.0)
    assert found[:1000].mean() == pytest.approx(3.5)
    assert found[1000:].mean() == pytest.approx(3.0)


def test_what_is_told() -> None:
    assert percentiles(np.arange(1001) / 1000) == {"row_p50_ms": 500, "row_p99_ms": 990, "row_p999_ms": 999}

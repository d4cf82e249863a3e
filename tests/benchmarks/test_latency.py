"""Latencies of rows, worked out by hand."""

import numpy as np
import pytest
from benchmarks.measuring.latency import latencies_of, latency_metrics, row_latencies


def test_batches_in_time() -> None:
    """Rows wait for the trigger, half an interval on average, and then for their batch."""
    latencies = row_latencies([10.2, 12.4], first_trigger=10.0, interval=2.0, samples=4)
    assert latencies.tolist() == pytest.approx([0.45, 0.95, 1.45, 1.95, 0.65, 1.15, 1.65, 2.15])


def test_late_batches_delay_later_rows() -> None:
    """The second batch could have started at 11, whatever the first one took."""
    latencies = row_latencies([13.0, 13.5], first_trigger=10.0, interval=1.0)
    assert latencies[:1000].mean() == pytest.approx(3.5)
    assert latencies[1000:].mean() == pytest.approx(3.0)


def test_batches_by_their_progress() -> None:
    """The first batch began 0.1 s after its trigger."""
    times = (("2026-01-01T00:00:10.100Z", 200), ("2026-01-01T00:00:12.000Z", 400))
    progress = [{"timestamp": time, "durationMs": {"triggerExecution": ms}} for time, ms in times]
    expected = row_latencies([10.3, 12.4], first_trigger=10.0, interval=2.0)
    assert latencies_of(progress, 2.0) == pytest.approx(expected, abs=1e-5)


def test_latency_metrics() -> None:
    assert latency_metrics(np.arange(1001) / 1000) == {"row_p50_ms": 500, "row_p99_ms": 990, "row_p999_ms": 999}

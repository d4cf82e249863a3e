"""Each engine runs MiSA's workloads at toy size, and is measured."""

from pathlib import Path

import pytest
from benchmarks.misa.measure import measure
from benchmarks.misa.settings import ENGINES, Settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_is_measured(tmp_path: Path, engine: str) -> None:
    settings = Settings(
        query="LR4", engine=engine, rate=200, trigger=1.0, batches=4, warmup=1, events=str(tmp_path), driver_memory="1g"
    )
    result = measure(settings)
    assert result.error is None
    if engine == "spark-async":
        assert result.refused is not None
        assert "async progress tracking" in result.refused
        return
    assert result.refused is None
    assert result.batches
    assert all(batch.rows > 0 and batch.row_mean_ms is not None and batch.log_ms > 0 for batch in result.batches)
    assert sum(batch.rows for batch in result.batches) <= 1.5 * 200 * settings.seconds
    assert all(batch.commit_ms is not None for batch in result.batches)
    assert result.memory_peak_bytes > 0
    assert result.cores > 0


def test_an_engine_gets_as_many_rows_as_it_takes(tmp_path: Path) -> None:
    settings = Settings(
        query="CM1", engine="millpond", rate=0, batches=2, warmup=1, rows_per_batch=30_000, events=str(tmp_path)
    )
    result = measure(settings)
    assert result.error is None
    assert [batch.rows for batch in result.batches] == pytest.approx([30_000] * 2, rel=0.3)
    assert result.kept_up is None
    assert result.row_max_ms is None

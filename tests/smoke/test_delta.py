"""Delta Lake as a sink of `foreachBatch`: what a batch writes is there once, also when the batch comes twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from examples import delta_merge
from tests.differential.harness import plain


@pytest.fixture(autouse=True)
def _needs_delta(delta: bool) -> None:
    if not delta:
        pytest.skip("delta-spark is not installed")


def rows(spark: SparkSession, folder: Path, table: str) -> list[object]:
    return sorted(plain(row) for row in spark.read.format("delta").load(str(folder / table)).collect())


CHANGES = [("ann", 70, 1), ("ann", 100, 0), ("bob", 20, 0), ("bob", 21, 2), ("cid", 5, 1)]


def test_example(spark: SparkSession, tmp_path: Path) -> None:
    assert delta_merge.main(spark, tmp_path) == [("ann", 70), ("bob", 21), ("cid", 5)]
    assert rows(spark, tmp_path, "changes") == CHANGES


def test_a_batch_that_failed_after_its_merge(spark: SparkSession, tmp_path: Path) -> None:
    """Each batch is written whole, fails before Spark commits it, and comes again after the restart."""
    spark.sql(f"CREATE TABLE delta.`{tmp_path}/balances` (account STRING, balance LONG) USING delta")
    merge = delta_merge.merging(tmp_path)
    seen: list[int] = []

    def failing(batch: DataFrame, number: int) -> None:
        merge(batch, number)
        seen.append(number)
        if seen.count(number) == 1:
            raise RuntimeError(f"batch {number} fails once")

    delta_merge.write_payments(tmp_path / "input", range(3))
    for number in range(3):
        with pytest.raises(StreamingQueryException, match=f"batch {number} fails once"):
            delta_merge.run(spark, tmp_path, failing)
    delta_merge.run(spark, tmp_path, failing)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert rows(spark, tmp_path, "balances") == [("ann", 70), ("bob", 21), ("cid", 5)]
    assert rows(spark, tmp_path, "changes") == CHANGES

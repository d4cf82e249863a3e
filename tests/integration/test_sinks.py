"""Sinks that skip the batches they have, after a crash on either side of their commit: every row arrives once.

Spark commits a batch (`commits/C`) after its sink has; the state of it becomes durable before or after that. So a crash
leaves the batch in the sink or not, in Spark's commit log or not, and its state durable or lost.
"""

import json
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from tests.query.test_recovery import Job

LAST = 2
"""The batch during which the application is killed."""

CRASHES = {
    "before the sink's commit": ("sink", "commits"),
    "after the sink's commit, without commits/C": ("commits",),
    "after the sink's commit, with commits/C": (),
}
"""What is missing after the crash."""


class TransactionalJob(Job):
    """Its sink is like Delta: with a batch's rows it records the batch's id, and skips the ids it has."""

    def aggregate(self) -> None:
        self.sink.mkdir(exist_ok=True)

        def write_once(batch: DataFrame, number: int) -> None:
            done = self.sink / f"{number}.json"
            if not done.exists():
                done.write_text(json.dumps([list(row) for row in batch.collect()]))

        counts = self.stream().groupBy("key").agg(F.count("*"), F.sum("amount"))
        self._run(millpond.writeStream(counts).outputMode("update").foreachBatch(write_once))

    def rows(self) -> dict[int, set[tuple[int, ...]]]:
        return {int(path.stem): set(map(tuple, json.loads(path.read_text()))) for path in self.sink.glob("*.json")}


def crash(job: Job, entry: Path, missing: tuple[str, ...], *, durable: bool) -> None:
    """Leave things as a crash during the last batch would; `entry` is what commits it in the sink."""
    if "sink" in missing:
        entry.unlink()
        (entry.parent / f".{entry.name}.crc").unlink(missing_ok=True)
    if "commits" in missing:
        job.forget("commits", LAST)
    if not durable:
        job.forget_state(LAST + 1)


@pytest.mark.parametrize("durable", [True, False], ids=["state durable", "state lost"])
@pytest.mark.parametrize("name", CRASHES)
def test_parquet_sink(spark: SparkSession, tmp_path: Path, name: str, durable: bool) -> None:
    job = Job(spark, tmp_path)
    job.write([1, 2, 3], [2, 3, 4], [3, 4, 5])
    job.deduplicate()
    crash(job, job.sink / "_spark_metadata" / str(LAST), CRASHES[name], durable=durable)
    job.write([1, 3, 5, 6], [6, 7, 2])
    assert job.deduplicate() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("durable", [True, False], ids=["state durable", "state lost"])
@pytest.mark.parametrize("name", CRASHES)
def test_transactional_sink(spark: SparkSession, tmp_path: Path, name: str, durable: bool) -> None:
    job = TransactionalJob(spark, tmp_path)
    job.write([1, 2, 3], [2, 3, 4], [3, 4, 5])
    job.aggregate()
    crash(job, job.sink / f"{LAST}.json", CRASHES[name], durable=durable)
    job.write([1, 3, 5], [6])
    job.aggregate()
    assert job.rows() == {batch: job.expected(batch) for batch in range(5)}

"""`millpond.read_state`: what it says where there is nothing to read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.errors import TransientError, UsageError
from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints.ownership import Ownership
from millpond.query.running import runs
from tests.servers.s3 import s3
from tests.slot.test_damage import Counts, rows_of


@pytest.mark.parametrize("location", ["", " ", "no such:place", "nowhere:/place"])
def test_what_is_no_location_is_a_usage_error(spark: SparkSession, location: str) -> None:
    with pytest.raises(UsageError, match="checkpointLocation"):
        millpond.read_state(spark, location)


def test_where_no_query_has_been_is_a_usage_error(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Millpond state here") as raised:
        millpond.read_state(spark, str(tmp_path))
    assert raised.value.file == f"file:{tmp_path}/millpond"


def test_state_that_lies_elsewhere_is_found_from_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    Counts(tmp_path / "state").through(1)
    query_logs, files = (open_filesystem(str(tmp_path / name)) for name in ("ledger", "state/millpond"))
    Ownership(query_logs.url, query_logs, str(tmp_path / "state"), files).note(1)
    assert millpond.read_state(spark, str(tmp_path / "ledger")).count() == len(rows_of(0))
    assert millpond.read_state(spark, tmp_path / "ledger").count() == len(rows_of(0))


def test_operators_are_named_where_there_is_no_such(spark: SparkSession, tmp_path: Path) -> None:
    Counts(tmp_path).through(1)
    with pytest.raises(UsageError, match=r"has no operator 7 .* Those that have state: 0 \("):
        millpond.read_state(spark, tmp_path, 7)


def test_state_is_that_of_the_last_batch_as_soon_as_the_query_has_ended(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit takes two seconds, which is longer than reading does. What is not there in time is no older state."""
    monkeypatch.setattr(runs, "_RELEASE_TIMEOUT_SECONDS", 0.2)
    long = F.expr("array_join(transform(sequence(1, 60), x -> sha2(cast(id * 60 + x as string), 256)), '')")
    for _ in range(2):
        spark.range(100, numPartitions=1).withColumn("v", long).write.mode("append").parquet(str(tmp_path / "rows"))
    session = spark.newSession()
    session.conf.set("spark.millpond.state.location", f"faults+file:{tmp_path}/store?bandwidth_mb=0.2")
    read = (
        session.readStream.schema("id long, v string").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "rows"))
    )
    counts = read.groupBy("id").agg(F.count("*").alias("rows"), F.max("v"))
    writer: Any = millpond.writeStream(counts).outputMode("update").format("noop").trigger(availableNow=True)
    writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()
    (execution,) = (each for each in runs._executions.values() if not each.query.isActive)
    task = execution.task
    hasty = msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, commit_timeout=0.1))
    with monkeypatch.context() as patch:
        patch.setitem(runs._executions, task.run, replace(execution, task=hasty))
        with pytest.raises(TransientError, match="which has ended, are not durable after 0 s"):
            millpond.read_state(spark, str(tmp_path / "checkpoint"))
    assert millpond.read_state(spark, str(tmp_path / "checkpoint"), version=1).count() == 100
    state = millpond.read_state(spark, str(tmp_path / "checkpoint")).toDF("id", "rows", "v")
    assert {row.rows: row["count"] for row in state.groupBy("rows").count().collect()} == {2: 100}


def test_an_object_store_that_spark_has_no_connector_for_is_looked_at(spark: SparkSession) -> None:
    with s3() as bucket, pytest.raises(UsageError, match="no Millpond state here") as raised:
        millpond.read_state(spark, f"{bucket}/nothing")
    assert raised.value.file == f"{bucket}/nothing/millpond"

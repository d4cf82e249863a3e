"""Stateful operators of Spark beside, above and below those that run here; and what Spark refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.plan.decide import decide
from tests.differential.data import DDL, batch, write
from tests.differential.harness import Batches, assert_equal, run, stream

EVENTS = pa.schema([("id", pa.int64()), ("ts", pa.timestamp("us", tz="UTC"))])
HOUR = 3_600_000_000


def events(rows: list[tuple[int, float]]) -> pa.Table:
    """Rows of an id and the hour at which they happened."""
    return pa.table({"id": [one for one, _ in rows], "ts": [int(hour * HOUR) for _, hour in rows]}, EVENTS)


def watermarked(rows: DataFrame) -> DataFrame:
    return rows.withWatermark("ts", "30 minutes")


WATERMARKS: dict[str, tuple[Callable[[DataFrame], DataFrame], int]] = {
    "above the deduplication": (lambda rows: watermarked(rows.dropDuplicates(["id"])), 2),
    "below the deduplication": (lambda rows: watermarked(rows).dropDuplicates(["id"]), 2),
}


@pytest.mark.parametrize("name", WATERMARKS)
def test_windows_close_above_deduplication(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """Windows close, and late rows go, when they do in Spark."""
    tables = [
        events([(1, 0.1), (2, 0.2), (1, 0.1), (3, 1.1)]),
        events([(4, 3.5), (2, 0.2), (5, 1.2)]),
        events([(6, 0.3), (7, 3.6), (8, 6.0)]),  # the first is late
        events([(9, 3.7), (10, 9.0)]),
    ]
    build, here = WATERMARKS[name]

    def query(session: SparkSession) -> DataFrame:
        return (
            build(stream(session, tmp_path / "in", "id bigint, ts timestamp")).groupBy(F.window("ts", "1 hour")).count()
        )

    outputs: list[Batches] = [{}, {}]
    for number, table in enumerate(tables):
        write(tmp_path / "in", number, table)
    for ours, into in enumerate(outputs):
        df = query(spark.newSession())
        run(df, "append", tmp_path / f"checkpoint{ours}", ours=bool(ours), into=into)
    assert len(decide(query(spark.newSession()), "append").on_millpond) == here
    assert (tmp_path / "checkpoint1" / "millpond").exists() == bool(here)
    assert (tmp_path / "checkpoint1" / "state").exists()
    assert_equal(outputs[1], outputs[0])
    assert sum(len(rows) for rows in outputs[1].values()) >= 3, "windows have closed"


Build = Callable[[DataFrame], DataFrame]

REFUSED: dict[str, tuple[Build, str, dict[str, str]]] = {
    "a native aggregate above ours": (
        lambda df: df.groupBy("k").agg(F.count("*").alias("n")).groupBy("n").agg(F.expr("percentile(n, 0.5)")),
        "update",
        {},
    ),
    "our aggregate above a native one": (
        lambda df: df.groupBy("k").agg(F.expr("percentile(i32, 0.5)").alias("p")).groupBy("p").count(),
        "update",
        {},
    ),
    "append without a watermark": (lambda df: df.groupBy("k").count(), "append", {}),
    "complete without an aggregate": (lambda df: df.dropDuplicates(["k"]), "complete", {}),
    "sorted updates": (lambda df: df.groupBy("k").count().orderBy("k"), "update", {}),
    "limited updates": (lambda df: df.groupBy("k").count().limit(3), "update", {}),
    "several operators, which a setting forbids": (
        lambda df: df.dropDuplicates(["k"]).groupBy("s").count(),
        "append",
        {"spark.sql.streaming.statefulOperator.allowMultiple": "false"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_spark_would_accept_of_the_rewritten_query_is_refused(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    """The rewritten query looks stateless and starts unchecked; the one that the user wrote is what counts."""
    build, mode, settings = REFUSED[name]
    write(tmp_path / "in", 0, batch(0, 5))
    session = spark.newSession()
    for key, value in settings.items():
        session.conf.set(key, value)
    said = []
    for start in (lambda df: df.writeStream, millpond.writeStream):
        writer: Any = start(build(stream(session, tmp_path / "in", DDL))).outputMode(mode).format("noop")
        with pytest.raises(AnalysisException) as refused:
            writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        said.append((refused.value.getCondition(), str(refused.value).split(";")[0]))
    assert said[1] == said[0]
    assert not (tmp_path / "checkpoint" / "millpond").exists()
    assert session.conf.get("spark.sql.streaming.unsupportedOperationCheck") == "true"


@pytest.mark.parametrize("trigger", [{"continuous": "1 second"}, {"realTime": "5 minutes"}])
def test_triggers_without_micro_batches_are_left_to_spark(spark: SparkSession, trigger: dict[str, str]) -> None:
    df = spark.readStream.format("rate").load().dropDuplicates(["value"])
    said = []
    for start in (lambda df: df.writeStream, millpond.writeStream):
        with pytest.raises(Exception) as refused:  # noqa: PT011 — whatever Spark raises
            start(df).format("noop").trigger(**trigger).start()
        said.append((type(refused.value), str(refused.value).split("\n")[0]))
    assert said[1] == said[0]

"""The events alone have every source and the columns that operators ask for, and no state."""

import pytest
from benchmarks.engines.events import events_alone
from benchmarks.workloads.config import RunConfig
from benchmarks.workloads.dataframes import build, output_mode
from pyspark.sql import SparkSession

from millpond.plan.catalyst.jvm import Catalyst

STATEFUL = {"MapInArrow", "Aggregate", "Join", "Deduplicate", "DeduplicateWithinWatermark", "Window"}


@pytest.mark.parametrize(
    ("query", "columns", "sources"),
    [
        ("q0", 5, 1),
        ("q5", 3, 1),  # auction, time, hash; what the second operator counts is not made of events
        ("q7", 10, 2),  # a bid's columns for the join, and again for the window
        ("q12", 3, 1),
        ("q23", 37, 3),  # two sides of one join, one of the other
    ],
)
def test_events_alone_have_every_source(spark: SparkSession, query: str, columns: int, sources: int) -> None:
    config = RunConfig(engine="events", workload="nexmark", query=query, work="/tmp/x", rows_per_batch=100)
    alone = events_alone(build(spark, config), output_mode(config))
    assert alone.isStreaming
    assert len(alone.columns) == columns
    kinds = [node.kind for node in Catalyst(spark).analyzed(alone).walk()]
    assert sum(kind.startswith("StreamingRelation") for kind in kinds) == sources
    assert not STATEFUL & set(kinds)

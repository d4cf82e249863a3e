"""Markers with preferred hosts: with the rows of their partition, first, and checked by the task that gets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.errors import MillpondError
from millpond.key_groups import KEY_GROUP_BITS
from millpond.plan.catalyst.exchange.located import PARTITION_KEY, LocatedPartitions, keeps_partitions
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.exchange.map_side import exchanged
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.tasks.operator_task import OperatorTask
from millpond.tasks.rows import located_rows
from millpond.worker.slot_stage import SlotStage


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    return spark.newSession()


def located(session: SparkSession, partitions: int, hash_: Column | None = None) -> DataFrame:
    """A thousand rows behind their exchange."""
    catalyst = Catalyst(session)
    hash_ = F.xxhash64("id") if hash_ is None else hash_
    rows = session.range(1000).select("id", hash_.alias("__hash"), F.lit(False).alias("__mark"))
    partition_markers = LocatedPartitions(catalyst, partitions)
    # A batch DataFrame: the markers of a stream are planned in the same way.
    markers = partition_markers.markers
    partition_markers.markers = lambda *args: markers(*args, streaming=False)  # type: ignore[method-assign]
    return exchanged(catalyst, rows, partitions, located=partition_markers)


def per_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    table = pa.Table.from_batches(list(batches))
    groups = table["__hash"].to_numpy().view(np.uint64) >> np.uint64(64 - KEY_GROUP_BITS)
    yield pa.RecordBatch.from_pydict(
        {
            "marks": [table["__mark"].to_pylist().index(True), sum(table["__mark"].to_pylist())],
            "groups": [int(groups.min()), int(groups.max())],
            "rows": [table.num_rows] * 2,
        }
    )


@pytest.mark.parametrize("partitions", [2, 7])
def test_rows_without_keys_are_in_one_task_of_all(session: SparkSession, partitions: int) -> None:
    rows = located(session, partitions, F.lit(-1).cast("bigint"))
    tasks = rows.mapInArrow(per_task, "marks bigint, groups bigint, rows bigint").collect()
    assert [task.marks for task in tasks] == [0, 1] * partitions
    assert sorted(task.rows for task in tasks[::2]) == [1] * (partitions - 1) + [1001]


@pytest.mark.parametrize("partitions", [1, 2, 7, 200])
@pytest.mark.parametrize("adaptive", ["true", "false"])
def test_each_task_has_one_partition_and_its_marker_first(
    session: SparkSession, partitions: int, adaptive: str
) -> None:
    session.conf.set("spark.sql.adaptive.enabled", adaptive)
    tasks = located(session, partitions).mapInArrow(per_task, "marks bigint, groups bigint, rows bigint").collect()
    firsts, counts = tasks[::2], tasks[1::2]
    assert len(firsts) == partitions
    assert {task.marks for task in firsts} == {0}
    assert {task.marks for task in counts} == {1}
    assert sum(task.rows for task in firsts) == 1000 + partitions
    found = [low.groups * partitions >> KEY_GROUP_BITS for low in firsts]
    assert found == [high.groups * partitions >> KEY_GROUP_BITS for high in counts]
    assert sorted(found) == list(range(partitions))


def test_a_union_that_does_not_keep_partitions_is_noticed(session: SparkSession) -> None:
    assert keeps_partitions(Catalyst(session))
    session.conf.set("spark.sql.unionOutputPartitioning", "false")
    assert not keeps_partitions(Catalyst(session))


def test_preferred_hosts_can_change(session: SparkSession) -> None:
    catalyst = Catalyst(session)
    partitions = LocatedPartitions(catalyst, 2)
    for hosts in ({0: "a", 1: "b"}, {1: "a"}):
        partitions.prefer(catalyst, hosts)
        assert all(str(partitions._hosts.apply(p)) == f"Vector({host}, {host}, {host})" for p, host in hosts.items())


TASK = OperatorTask("app", "0f3c", "run", 0, AggregateSpec((), (), (), "update"), 4, 1, "/tmp", 1, "/tmp", located=True)


def batch(*hashes: int, marked: int = 0) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "__hash": pa.array(hashes, pa.int64()),
            "__mark": [index < marked for index in range(len(hashes))],
            PARTITION_KEY: pa.array([5] * len(hashes), pa.int32()),
            "value": pa.array([7] * len(hashes), pa.int64()),
        }
    )


def test_the_partitioning_key_is_removed() -> None:
    (passed,) = located_rows(iter([batch(0, 1, marked=1)]), *TASK.hash_range(0))
    assert passed.schema.names == ["__hash", "__mark", "value"]


@pytest.mark.parametrize("hashes", [(0, 1 << 62), (-1,), (1 << 62,)])
def test_rows_of_another_partition_are_refused(hashes: tuple[int, ...]) -> None:
    with pytest.raises(MillpondError, match="another extension of Spark has changed the plan"):
        list(located_rows(iter([batch(0, 5), batch(*hashes)]), *TASK.hash_range(0)))


def test_a_task_without_its_marker_is_refused() -> None:
    with pytest.raises(MillpondError, match=r"did not send rows to their partition .*query 0f3c, operator 0"):
        list(SlotStage(TASK)(iter([batch(3)])))


def test_a_task_without_rows_is_none_of_the_operators() -> None:
    empty: Any = batch().slice(0, 0)
    assert list(SlotStage(msgspec.structs.replace(TASK))(iter([empty]))) == []

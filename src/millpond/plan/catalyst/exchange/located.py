"""Marker rows with preferred hosts, so that Spark runs each partition's task where its state is.

The markers come from an RDD with preferred locations that declares the partitioning of the exchange. Spark then unions
markers and rows partition by partition (`SQLPartitioningAwareUnionRDD`), and the union's preferred location is that of
the marker. Executors run Spark's own classes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Node

PARTITION_KEY = "__partition_key"
"""Name of the column that Spark's exchange hashes: a constant per partition, which Spark sends there."""

_VOTES = 3
"""Times that a marker names its host: more often than the shuffle, which names each host with many rows once."""
_KEYS_PER_PARTITION = 16


class LocatedPartitions:
    """Partitions of a query's exchanges, each with the host that its task should run on.

    Args:
        catalyst: of the session.
        partitions: the number of partitions.

    Attributes:
        keys: for each partition, an int that Spark's hash sends there (`PARTITION_KEY`).
    """

    def __init__(self, catalyst: Catalyst, partitions: int) -> None:
        self.keys = _keys(catalyst, partitions)
        # Spark reads it when it schedules a stage, in another thread than the one that changes it.
        self._hosts = catalyst.new("scala.collection.concurrent.TrieMap")

    def prefer(self, catalyst: Catalyst, hosts: Mapping[int, str]) -> None:
        """Prefer these hosts, by partition, in stages that begin from now on."""
        for partition, host in hosts.items():
            self._hosts.put(partition, catalyst.seq([host] * _VOTES))

    def markers(self, catalyst: Catalyst, values: Sequence[int], name: str, *, streaming: bool = True) -> DataFrame:
        """Return one row per partition: a bigint, and `PARTITION_KEY`.

        Args:
            catalyst: of the session.
            values: the bigint of each partition.
            name: the bigint's column.
            streaming: whether the rows arrive in every batch of a stream.
        """
        count = len(self.keys)
        pairs = ", ".join(f"({value}L, {key})" for value, key in zip(values, self.keys, strict=True))
        rows = catalyst.local_relation(catalyst.spark.sql(f"VALUES {pairs} AS t({name}, {PARTITION_KEY})"))
        row_class = catalyst.object("java.lang.Class").forName("org.apache.spark.sql.catalyst.InternalRow")
        tag = catalyst.object("scala.reflect.ClassTag").apply(row_class)
        parallelized = catalyst.object("org.apache.spark.rdd.ParallelCollectionRDD")
        context = catalyst.spark.sparkContext._jsc.sc()
        rdd = parallelized(context, rows.data(), count, self._hosts, tag).setName("millpond[markers]")
        partitioning = _partitioning(catalyst, rows.output().apply(1), count)
        return catalyst.dataframe(catalyst.scan(rows.output(), rdd, partitioning, streaming=streaming))


def keeps_partitions(catalyst: Catalyst) -> bool:
    """Return whether Spark unions markers and rows partition by partition.

    A native engine may replace the union, and `spark.sql.unionOutputPartitioning` turns it off.
    """
    partitions = 2
    try:
        located = LocatedPartitions(catalyst, partitions)
        markers = located.markers(catalyst, range(partitions), "low", streaming=False)
        rows = catalyst.spark.range(1).select(F.col("id").alias("low"), F.col("id").cast("int").alias(PARTITION_KEY))
        rows = rows.repartition(partitions, PARTITION_KEY)
        frame = catalyst.in_own_session(markers.union(rows), {"spark.sql.adaptive.enabled": "false"})
        plan = frame._jdf.queryExecution().executedPlan()
        partitioning = plan.outputPartitioning()
        kept = str(partitioning.getClass().getSimpleName()) == "HashPartitioning"
        return Node(plan).kind == "UnionExec" and kept and int(partitioning.numPartitions()) == partitions
    except (Py4JError, PySparkException, TypeError, StopIteration):  # another build of Spark
        return False


def _partitioning(catalyst: Catalyst, key: Any, partitions: int) -> Any:
    """Return the partitioning that Spark gives to `repartition(partitions, key)`."""
    physical = "org.apache.spark.sql.catalyst.plans.physical"
    if partitions == 1:
        return getattr(catalyst.object(f"{physical}.SinglePartition$"), "MODULE$")
    return catalyst.new(f"{physical}.HashPartitioning", catalyst.seq([key]), partitions)


def _keys(catalyst: Catalyst, partitions: int) -> list[int]:
    """Return for each partition the smallest natural number that Spark's hash partitioning sends there."""
    if partitions == 1:
        return [0]
    count = partitions * _KEYS_PER_PARTITION
    while True:
        # Over a local relation, so that the driver computes it without a job.
        hashed = f"transform(sequence(0, {count}), key -> pmod(hash(key), {partitions}))"
        (row,) = catalyst.spark.sql(f"SELECT {hashed} FROM VALUES (0)").collect()
        reached, keys = np.unique(np.array(row[0]), return_index=True)
        if len(reached) == partitions:
            return [int(key) for key in keys]
        count *= 4

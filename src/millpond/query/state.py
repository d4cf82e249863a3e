"""`millpond.read_state`: the state of a query as a DataFrame, read by Spark's executors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType, _parse_datatype_string

from millpond.errors import SettingError
from millpond.files.backends.filesystem import open_filesystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.workers import map_in_arrow
from millpond.query.ledger.finding import find_state
from millpond.query.starting.checks import check_spark
from millpond.query.starting.running import await_commits
from millpond.slot.reading.reader import StateReader


class _PartitionReader:
    """Turns partition numbers into the rows of those partitions, as they were in one run, whatever begins meanwhile."""

    def __init__(self, location: str, generation: int, operator: int, version: int, table: str) -> None:
        self.location = location
        self.generation = generation
        self.operator = operator
        self.version = version
        self.table = table

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader = StateReader(self.location, self.generation)
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                yield from reader.read(self.operator, partition, self.version, self.table)


def read_state(
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    operator: int | None = None,
    version: int | None = None,
    variable: str | None = None,
) -> DataFrame:
    """The state of one operator as a DataFrame: its keys and, for aggregates, their results.

    Columns have the names of the query's output; windows, and the panes that sliding ones share, are structs of `start`
    and `end` (docs/operations.md, "The state itself"). Of a processor (`transformWithState`) one variable
    is read: a row for each key, with its value, its list, its map as a list of entries, or, as `timers`, the times of
    its timers; with a time to live, each part has its `expiry`, and those that have expired may still be there.

    Args:
        spark: a classic session.
        checkpoint: the query's checkpoint location (or, with `spark.millpond.state.location`, its folder there).
        operator: which of the query's operators, as `millpond.explain` numbers them; the first that has state by
            default.
        version: the state after batch `version - 1`; the newest durable one by default, for which what a run that has
            ended on this host is still committing is waited for. Older ones can be read
            as long as they are kept (`spark.millpond.state.retain`), also where the query was started again since
            then, with another number of partitions, or changed.
        variable: of a processor, its name.

    Raises:
        UsageError: there is no such state, operator, version or variable; the message says what there is.
        StateDamagedError: the version is not whole, and some of its commits are damaged.
        TransientError: the last batches of a run that has ended cannot be made durable.
    """
    check_spark(spark)
    location = find_state(_qualified(spark, os.fspath(checkpoint)))
    if version is None:
        await_commits(location)
    reader = StateReader(location)
    chosen = reader.choose(version)
    one = reader.choose_operator(chosen, operator)
    table, fields = one.part(variable)
    schema = StructType([StructField(field.name, _parse_datatype_string(field.type)) for field in fields])
    partitions = reader.partitions_at(chosen)
    numbers = spark.range(0, partitions, 1, partitions)
    generation = reader.generation_of(chosen)
    return map_in_arrow(numbers, _PartitionReader(location, generation, one.index, chosen, table), schema)


def _qualified(spark: SparkSession, checkpoint: str) -> str:
    """The location as Spark understands it; what Millpond opens by itself stays as it is: Spark may not know it."""
    scheme, colon, _ = checkpoint.partition(":")
    if "+" in scheme:
        return checkpoint
    if colon and "/" not in scheme and scheme != "file":
        with suppress(SettingError):
            open_filesystem(checkpoint)
            return checkpoint
    return Catalyst(spark).qualified(checkpoint)

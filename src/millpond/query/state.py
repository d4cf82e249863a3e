"""`millpond.read_state`: the state of a query as a DataFrame, read by Spark's executors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType, _parse_datatype_string

from millpond.errors import SettingError
from millpond.files.locations.opening import open_filesystem
from millpond.plan.catalyst.session import qualified
from millpond.plan.exchange.workers import map_in_arrow
from millpond.query.checkpoints.finding import find_state
from millpond.query.running.runs import await_commits
from millpond.query.starting.checks import check_spark
from millpond.state_reader.reader import StateReader


class _PartitionReader:
    """Map function from partition numbers to their rows in one generation; later runs do not affect it."""

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
    """Return the state of one operator as a DataFrame. See `millpond.read_state`.

    Columns have the names of the query's output. Windows, and the panes of sliding windows, are structs of `start` and
    `end` (docs/guides/state-files.md, "Reading the state"). For a processor (`transformWithState`), one variable is
    read: a row for each key, with its value, its list, its map as a list of entries, or, as `timers`, the times of its
    timers. With a time to live, each part has its `expiry`, and expired parts may still be present.

    Args:
        spark: a classic session.
        checkpoint: the query's checkpoint location (or, with `spark.millpond.state.location`, its folder there).
        operator: the operator's number in `millpond.explain`; the first operator with state by default.
        version: the state after batch `version - 1`; the newest durable version by default. The default waits for
            pending commits of a run that has ended on this host. Older versions can be read while they are retained
            (`spark.millpond.state.retain`), also after a restart with other partitions or a changed query.
        variable: for a processor, the name of a state variable, or `timers`.

    Raises:
        UsageError: the state, operator, version or variable does not exist; the message lists those that exist.
        StateDamagedError: the version is not whole, and some of its commits are damaged.
        TransientError: the last batches of a run that has ended do not become durable.
    """
    check_spark(spark)
    location = find_state(_qualified(spark, os.fspath(checkpoint)))
    if version is None:
        await_commits(location)
    reader = StateReader(location)
    chosen = reader.choose(version)
    chosen_operator = reader.choose_operator(chosen, operator)
    table, fields = chosen_operator.part(variable)
    schema = StructType([StructField(field.name, _parse_datatype_string(field.type)) for field in fields])
    partitions = reader.partitions_at(chosen)
    numbers = spark.range(0, partitions, 1, partitions)
    generation = reader.generation_of(chosen)
    return map_in_arrow(numbers, _PartitionReader(location, generation, chosen_operator.index, chosen, table), schema)


def _qualified(spark: SparkSession, checkpoint: str) -> str:
    """Qualify a path as Spark does; a URL that Millpond can open stays as it is: Spark may not know its scheme."""
    scheme, colon, _ = checkpoint.partition(":")
    if "+" in scheme:
        return checkpoint
    if colon and "/" not in scheme and scheme != "file":
        with suppress(SettingError):
            open_filesystem(checkpoint)
            return checkpoint
    return qualified(spark, checkpoint)

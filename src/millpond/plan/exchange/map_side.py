"""The exchange below an operator: the forms of its map side, and the marker rows.

The map side of a batch runs in one of three forms (`Form`): Python writes the rows to files of the host and sends
references; Spark sends the rows themselves; or Spark combines them first. All forms have the same columns:
`__block_reference` if files are used, the operator's columns, the columns of combined rows, `__hash`, `__mark`. Columns
that a form does not use are null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, BooleanType, LongType, StructField, StructType, _parse_datatype_string

from millpond.key_groups import as_signed, hash_ranges, partition_sql
from millpond.plan.catalyst.buffers import bound
from millpond.plan.catalyst.exchange.forms import Combined, ExchangeForms
from millpond.plan.catalyst.exchange.located import PARTITION_KEY, LocatedPartitions
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.exchange.combining import Combination
from millpond.plan.exchange.workers import ArrowFunction, map_in_arrow, named_function
from millpond.tasks.block_references import BLOCK_REFERENCE
from millpond.tasks.ddl import ddl, quoted


@dataclass(frozen=True)
class MapSides:
    """The map sides of a query's exchanges.

    Attributes:
        writes: operator → the Python function that writes rows to files; empty if Spark's shuffle carries them.
        forms: chooses the form of each batch; None if the function always runs.
        ids: operator → the exchange's identifier in `forms`.
        combinations: operator → the partial aggregation of its rows; only operators that have one.
        located: the hosts that partitions' tasks should run on; None if all tasks run on one host.
    """

    writes: Sequence[ArrowFunction] = ()
    forms: ExchangeForms | None = None
    ids: Sequence[str] = ()
    combinations: Mapping[int, Combination] = field(default_factory=dict)
    located: LocatedPartitions | None = None

    def combination(self, operator: int) -> Combination | None:
        """Return the partial aggregation of an operator's rows before the exchange, if it has one."""
        return None if self.forms is None else self.combinations.get(operator)

    def map_output(self, catalyst: Catalyst, operator: int, rows: DataFrame, hash_: str, keys: int) -> DataFrame:
        """Return the output of the map side of an operator's exchange.

        Args:
            catalyst: of the session.
            operator: its number.
            rows: the operator's columns, the arguments of its combination, and the key hash last.
            hash_: SQL of the key hash.
            keys: the number of key columns.
        """
        combination = self.combination(operator)
        if not self.writes and combination is None:
            return rows.withColumn("__mark", F.lit(False))
        arguments = () if combination is None else combination.arguments
        count = len(rows.columns) - 1 - len(arguments)
        own, extra = rows.schema.fields[:count], () if combination is None else combination.fields
        fields = [
            *([StructField(BLOCK_REFERENCE, BinaryType())] if self.writes else []),
            *(StructField(column.name, column.dataType) for column in own),
            *(StructField(column.name, _parse_datatype_string(column.type)) for column in extra),
            StructField("__hash", LongType()),
            StructField("__mark", BooleanType()),
        ]
        function = self.writes[operator] if self.writes else _strategy_missing
        mapped = map_in_arrow(rows, named_function(function, "exchange", 1), StructType(fields))
        if self.forms is None:
            return mapped
        node = catalyst.analyzed(mapped)
        available, nulls = node.children[0].output, [catalyst.null_of_type(column) for column in node.output]
        first = 1 if self.writes else 0
        # In the form `rows`, the columns of files and of combined rows are null.
        as_rows = [
            *nulls[:first],
            *available[:count],
            *nulls[first + count : -2],
            available[-1],
            catalyst.literal(False),
        ]
        if combination is None:
            return self.forms.with_forms(mapped, self.ids[operator], as_rows)
        types = [ddl(column.dataType) for column in own]
        columns = {column.name: type_ for column, type_ in zip(own[:keys], types, strict=False)}
        columns |= combination.groupings(types) | combination.buffers
        results = [
            *(["null"] if self.writes else []),
            *(quoted(column.name) for column in own[:keys]),
            *(combination.input_of(position) for position in range(keys, len(own))),
            *combination.results,
            hash_,
            "false",
        ]
        # The strategy swaps one form for another, so all forms must have exactly the same column types.
        typed = [f"cast({sql} as {ddl(column.dataType)})" for sql, column in zip(results, fields, strict=True)]
        combined = Combined(
            keys=available[:keys],
            functions=combination.functions(catalyst, available[:-1], keys),
            copies=combination.copies(catalyst, available),
            results=bound(catalyst, columns, typed),
        )
        return self.forms.with_forms(mapped, self.ids[operator], as_rows, combined)


NO_SIDES = MapSides()
"""Map sides that send rows through Spark's shuffle unchanged."""


def _strategy_missing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    raise RuntimeError(
        "Spark has not used the planner strategy of Millpond: something has replaced the session's extraStrategies. "
        "Set spark.millpond.combine to off."
    )


def exchanged(
    catalyst: Catalyst,
    sent: DataFrame,
    partitions: int,
    rows_of: Callable[[Sequence[int], str], DataFrame] | None = None,
    no_data: DataFrame | None = None,
    located: LocatedPartitions | None = None,
) -> DataFrame:
    """Add one marker row per partition and batch, and send every row to its hash's partition.

    Args:
        catalyst: of the session.
        sent: rows with their hash and mark as the last columns.
        partitions: the number of partitions.
        rows_of: makes rows that arrive in every batch of a stream; None for a batch DataFrame.
        no_data: an empty source to add, so that Spark schedules no-data batches.
        located: the partitions' preferred hosts. The markers then come behind the exchange, first in each partition,
            and `PARTITION_KEY` is the last column.
    """
    # A marker's hash is the lowest of its partition's range, so that the exchange sends it there. Its low bits carry
    # the batch's time in milliseconds.
    signed = [as_signed(range_.lo) for range_ in hash_ranges(partitions)]
    # In a micro-batch this is the batch's own time, the same in every attempt; slots compare it with the offset log.
    now = F.unix_millis(F.current_timestamp())
    # Spark's plan shows these two names, unless the markers come first and name the columns of the union.
    hash_, mark = ("millpond_batch_time", "millpond_marker") if located is None else sent.columns[-2:]
    columns = [
        *(F.lit(None).cast(f.dataType).alias(f.name) for f in sent.schema.fields[:-2]),
        F.col("low").bitwiseOR(now).alias(hash_),
        F.lit(True).alias(mark),
    ]
    if located is not None:
        if no_data is not None:
            # See below for the limit. The optimiser removes both this limit and the row.
            no_rows = catalyst.streaming_rows(signed[:1], "low").select(*columns).limit(1).where(F.lit(False))
            sent = sent.union(no_rows).union(no_data)
        keys = f"element_at(array({', '.join(map(str, located.keys))}), {partition_sql('__hash', partitions)} + 1)"
        # Zero, but no constant: by a key that is the same for all rows, Spark exchanges to a single partition.
        keys += " + least(spark_partition_id(), 0)"
        rows = sent.withColumn(PARTITION_KEY, F.expr(keys)).repartition(partitions, PARTITION_KEY)
        # Nothing may stand between the union and the slot stage. After a projection without the key, Spark would not
        # know the partitioning, and would run markers and rows in different tasks.
        return located.markers(catalyst, signed, "low").select(*columns, PARTITION_KEY).union(rows)
    markers = (rows_of or catalyst.rows)(signed, "low").select(*columns)
    if no_data is None:
        return _by_partition(sent.union(markers), partitions)
    # If the plan has a limit, Spark does not check that every state store has committed when a foreachBatch function
    # returns. The store of `no_data` never commits. The optimiser removes a limit that cuts nothing.
    return _by_partition(sent.union(markers.limit(partitions)).union(no_data), partitions)


def _by_partition(rows: DataFrame, partitions: int) -> DataFrame:
    return rows.repartitionById(partitions, F.expr(partition_sql("__hash", partitions)))

"""The exchange below an operator: what its map side gives, in which forms, and the marker rows beside it.

The map side of a batch runs in one of three forms (`Form`): Python writes the rows to files of the host and sends
parcels; Spark sends the rows themselves; or Spark combines them first. All forms have the same columns: `__parcel`
where there are files, the operator's columns, those of combined rows, `__hash`, `__mark`. What a form does not give is
null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, BooleanType, LongType, StructField, StructType, _parse_datatype_string

from millpond.conf import KEY_GROUP_BITS
from millpond.ddl import ddl, quoted
from millpond.plan.catalyst.buffers import bound
from millpond.plan.catalyst.exchange.forms import Combined, ExchangeForms
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.combining import Combination
from millpond.plan.workers import ArrowFunction, map_in_arrow, named
from millpond.slot.batch.parcels import PARCEL

_TIME_BITS = 64 - KEY_GROUP_BITS


@dataclass(frozen=True)
class MapSides:
    """The map sides of a query's exchanges.

    Attributes:
        writes: by operator, the Python function that writes rows to files; empty where Spark's shuffle carries them.
        forms: chooses the form of each batch; None where the function always runs.
        ids: by operator, how `forms` knows the exchange.
        combinations: how rows are combined, by operator; not of those that cannot be.
    """

    writes: Sequence[ArrowFunction] = ()
    forms: ExchangeForms | None = None
    ids: Sequence[str] = ()
    combinations: Mapping[int, Combination] = field(default_factory=dict)

    def combination(self, operator: int) -> Combination | None:
        """How an operator's rows are combined before the exchange, where they can be."""
        return None if self.forms is None else self.combinations.get(operator)

    def sent(self, catalyst: Catalyst, operator: int, rows: DataFrame, hash_: str, keys: int) -> DataFrame:
        """What the map side of an operator's exchange gives.

        Args:
            catalyst: of the session. operator: its number.
            rows: the operator's columns, the arguments of its combination, and the key hash last.
            hash_: SQL of the key hash. keys: how many of the columns are keys.
        """
        combination = self.combination(operator)
        if not self.writes and combination is None:
            return rows.withColumn("__mark", F.lit(False))
        arguments = () if combination is None else combination.arguments
        count = len(rows.columns) - 1 - len(arguments)
        own, extra = rows.schema.fields[:count], () if combination is None else combination.fields
        fields = [
            *([StructField(PARCEL, BinaryType())] if self.writes else []),
            *(StructField(one.name, one.dataType) for one in own),
            *(StructField(one.name, _parse_datatype_string(one.type)) for one in extra),
            StructField("__hash", LongType()),
            StructField("__mark", BooleanType()),
        ]
        function = self.writes[operator] if self.writes else _never
        mapped = map_in_arrow(rows, named(function, "exchange", 1), StructType(fields))
        if self.forms is None:
            return mapped
        node = catalyst.analyzed(mapped)
        given, nulls = node.children[0].output, [catalyst.unknown(one) for one in node.output]
        first = 1 if self.writes else 0
        as_rows = [*nulls[:first], *given[:count], *nulls[first + count : -2], given[-1], catalyst.literal(False)]
        if combination is None:
            return self.forms.with_forms(mapped, self.ids[operator], as_rows)
        types = [ddl(one.dataType) for one in own]
        columns = {one.name: type_ for one, type_ in zip(own[:keys], types, strict=False)}
        columns |= combination.groupings(types) | combination.buffers
        results = [
            *(["null"] if self.writes else []),
            *(quoted(one.name) for one in own[:keys]),
            *(combination.input_of(at) for at in range(keys, len(own))),
            *combination.results,
            hash_,
            "false",
        ]
        typed = [f"cast({sql} as {ddl(one.dataType)})" for sql, one in zip(results, fields, strict=True)]
        combined = Combined(
            keys=given[:keys],
            functions=combination.functions(catalyst, given[:-1], keys),
            copies=combination.copies(catalyst, given),
            results=bound(catalyst, columns, typed),
        )
        return self.forms.with_forms(mapped, self.ids[operator], as_rows, combined)


NO_SIDES = MapSides()
"""Rows go through Spark's shuffle as they are."""


def _never(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    raise RuntimeError(
        "Spark has not used the planner strategy of Millpond: something has replaced the session's extraStrategies. "
        "Set spark.millpond.combine to off."
    )


def partition_of(partitions: int) -> str:
    """The partition of a row, by its hash, as SQL."""
    return f"cast(shiftright(shiftrightunsigned(__hash, {_TIME_BITS}) * {partitions}L, {KEY_GROUP_BITS}) as int)"


def exchanged(
    catalyst: Catalyst,
    sent: DataFrame,
    partitions: int,
    rows_of: Callable[[Sequence[int], str], DataFrame] | None = None,
    watching: DataFrame | None = None,
) -> DataFrame:
    """Add one marker row per partition and batch, and send every row to its hash's partition.

    Args:
        catalyst: of the session. sent: rows, their hash and mark last. partitions: how many there are.
        rows_of: makes rows that come with every batch of a stream; None for a batch DataFrame.
        watching: rows to be added, of which there are none.
    """
    low = [-(-(p << KEY_GROUP_BITS) // partitions) << _TIME_BITS for p in range(partitions)]
    signed = [value - (1 << 64) if value >= 1 << 63 else value for value in low]
    now = F.unix_millis(F.current_timestamp())
    markers = (rows_of or catalyst.rows)(signed, "low").select(
        *(F.lit(None).cast(f.dataType).alias(f.name) for f in sent.schema.fields[:-2]),
        F.col("low").bitwiseOR(now).alias("millpond_batch_time"),
        F.lit(True).alias("millpond_marker"),  # Spark's plan shows these two names, and the union drops them
    )
    if watching is None:
        return _by_partition(sent.union(markers), partitions)
    # While the plan has a limit, Spark does not expect every state store of the plan to have committed when a
    # foreachBatch function returns: that of `watching` never commits. The optimiser removes a limit that cuts nothing.
    return _by_partition(sent.union(markers.limit(partitions)).union(watching), partitions)


def _by_partition(rows: DataFrame, partitions: int) -> DataFrame:
    return rows.repartitionById(partitions, F.expr(partition_of(partitions)))

"""Rows of tables made from partial results that come as columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.columns.encode import (
    Leaf,
    Place,
    as_it_is,
    flatten,
    hashes_of,
    key_rows,
    plain,
    put_columns,
    validity,
)
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.functions.collect import sketch_blobs
from millpond.operators.tables.keyed import Keyed
from millpond.spec.types import DataType

_TYPES = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.date32(): "date",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
}


def partial_rows(
    batch: pa.RecordBatch,
    table: Keyed,
    types: Sequence[DataType],
    keys: Sequence[Place],
    calls: Sequence[Accumulator],
    skipped: int = 0,
) -> Rows:
    """Whole rows of a table; of its values only those of accumulators are filled.

    Args:
        batch: the column `__hash`, then the keys, then columns to skip, then the state columns of all accumulators.
        table: the table. types, keys: of the keys, and where they go. calls: its accumulators.
        skipped: how many columns to skip.
    """
    leaves = [leaf for number, dtype in enumerate(types) for leaf in flatten(batch.column(1 + number), dtype)]
    rows = key_rows(hashes_of(batch), leaves, keys, table.layout.width)
    places = [place for call in calls for place in call.places]
    first = 1 + len(types) + skipped
    columns = [as_it_is(_leaf(batch.column(first + number))) for number in range(len(places))]
    return Rows(rows.words, put_columns(rows.words, columns, places, rows.heap))


def _leaf(array: pa.Array) -> Leaf:
    array = plain(array)
    if pa.types.is_list(array.type):  # no other state comes as a list
        array = sketch_blobs(array)
    kind = array.type
    if pa.types.is_decimal128(kind):
        dtype = DataType("decimal", kind.precision, kind.scale)
    elif pa.types.is_timestamp(kind):
        dtype = DataType("timestamp")
    else:
        dtype = DataType(_TYPES[kind])
    return Leaf(array, dtype, validity(array))

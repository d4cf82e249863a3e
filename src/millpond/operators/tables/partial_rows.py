"""Rows of tables, made from columns of partial results."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.columns.encode import (
    Leaf,
    Place,
    bitwise_leaf,
    flatten_all,
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
    """Build whole rows of a table, whose only values are those of accumulators.

    Args:
        batch: the column `__hash`, then the keys, then columns to skip, then the state columns of all accumulators.
        table: the table.
        types: the types of the keys.
        keys: the places of the keys.
        calls: the table's accumulators.
        skipped: the number of columns to skip.
    """
    leaves = flatten_all(batch.columns[1 : 1 + len(types)], types)
    rows = key_rows(hashes_of(batch), leaves, keys, table.layout.width)
    places = [place for call in calls for place in call.places]
    first = 1 + len(types) + skipped
    # Bit by bit: partial results are no keys, so their zeros and NaNs stay as they are.
    columns = [bitwise_leaf(_leaf(batch.column(first + number))) for number in range(len(places))]
    return Rows(rows.words, put_columns(rows.words, columns, places, rows.heap))


def _leaf(array: pa.Array) -> Leaf:
    array = plain(array)
    if pa.types.is_list(array.type):  # only the state of sketches comes as a list
        array = sketch_blobs(array)
    kind = array.type
    if pa.types.is_decimal128(kind):
        dtype = DataType("decimal", kind.precision, kind.scale)
    elif pa.types.is_timestamp(kind):
        dtype = DataType("timestamp")
    else:
        dtype = DataType(_TYPES[kind])
    return Leaf(array, dtype, validity(array))

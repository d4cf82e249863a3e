"""Rows and frames of a test as columns, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.conversion import ArrowTableToRowsConversion, LocalDataToArrowConversion
from pyspark.sql.types import StructField, StructType

from millpond.ddl import ddl
from millpond.errors import UsageError
from millpond.slot.pipe.processors.state.schemas import spark_type
from millpond.spec.operators import Field
from millpond.spec.types import parse_type

Rows = Sequence[Row | tuple[Any, ...] | Mapping[str, Any]]
"""Rows: by the names of their columns, or, if they have none, with a value for each column in turn."""

Key = Mapping[str, Any]
"""A key: its columns and their values."""


def struct(schema: StructType | str) -> StructType:
    """Columns, from DDL as well.

    Raises:
        UsageError: they cannot be read.
    """
    if isinstance(schema, StructType):
        return schema
    try:
        made = spark_type(parse_type(f"struct<{schema}>"))
    except KeyError as error:
        raise UsageError(f"There is no type {error} here.", action="Give the columns as a StructType.") from None
    assert isinstance(made, StructType)
    return made


def fields(schema: StructType) -> tuple[Field, ...]:
    """Columns as specs have them."""
    return tuple(Field(one.name, ddl(one.dataType)) for one in schema.fields)


def with_keys(keys: StructType, schema: StructType) -> StructType:
    """The columns of the input: those of the key that the rows do not have, then those of the rows.

    Raises:
        UsageError: a column of the key is another one in the rows.
    """
    for one in keys.fields:
        if one.name in schema.names and schema[one.name].dataType != one.dataType:
            raise UsageError(
                f"The column {one.name!r} is {one.dataType.simpleString()} in the key and "
                f"{schema[one.name].dataType.simpleString()} in the rows.",
                action="Give both the same type.",
            )
    return StructType([one for one in keys.fields if one.name not in schema.names] + schema.fields)


def from_rows(rows: Rows, schema: StructType, own: StructType, key: Key | None) -> pa.Table:
    """Rows as columns of `schema`.

    Args:
        rows: the rows. schema: all columns. own: the columns that rows without names have, in turn.
        key: what columns of the key are where rows do not name them.

    Raises:
        UsageError: a row has other columns, or another key.
    """
    made = [_named(row, own if key is not None else schema, schema.names) for row in rows]
    if key is not None:
        for row in made:
            _check_key(row, key)
        made = [{**row, **key} for row in made]
    if not made:
        return arrow(schema).empty_table()
    nullable = StructType([StructField(one.name, one.dataType) for one in schema.fields])
    return LocalDataToArrowConversion.convert(made, nullable, False).cast(arrow(schema))


def to_rows(table: pa.Table, schema: StructType) -> list[Row]:
    """Columns as rows, as `collect` gives them."""
    return list(ArrowTableToRowsConversion.convert(table, schema))


def from_frame(frame: pd.DataFrame, schema: StructType, key: Key | None, zone: str) -> pa.Table:
    """A frame as columns of `schema`; arguments as of `from_rows`, and `zone`, that of times.

    Raises:
        UsageError: it has other columns, or another key.
    """
    from pyspark.sql.conversion import PandasToArrowConversion

    given: dict[Any, pd.Series] = dict(frame.items())
    _check_names(list(given), schema.names)
    if key is not None:
        for name in given.keys() & key.keys():
            if len(frame) and not (frame[name] == key[name]).all():
                raise UsageError(f"Rows have another key than {dict(key)!r}.", action="Test each key by itself.")
        given |= {name: pd.Series([value] * len(frame), frame.index, dtype=object) for name, value in key.items()}
    if not len(frame):
        return arrow(schema).empty_table()
    missing = pd.Series([None] * len(frame), frame.index, dtype=object)
    columns = [given.get(name, missing) for name in schema.names]
    batch = PandasToArrowConversion.convert(columns, schema, timezone=zone, arrow_cast=True)
    return pa.Table.from_batches([batch]).cast(arrow(schema))


def to_frame(table: pa.Table, schema: StructType, zone: str) -> pd.DataFrame:
    """Columns as a frame, of the types that Spark gives to Python."""
    from pyspark.sql.conversion import ArrowBatchTransformer

    series = ArrowBatchTransformer.to_pandas(table, timezone=zone, schema=schema)
    return pd.DataFrame(dict(zip(schema.names, series, strict=True)))


def arrow(schema: StructType) -> pa.Schema:
    """The columns that operators take."""
    return pa.schema([(one.name, parse_type(one.type).arrow) for one in fields(schema)])


def _named(row: Any, own: StructType, names: list[str]) -> dict[str, Any]:
    if isinstance(row, Mapping):
        found = dict(row)
    elif hasattr(row, "__fields__"):
        found = dict(zip(row.__fields__, row, strict=True))
    elif len(row) == len(own):
        found = dict(zip(own.names, row, strict=True))
    else:
        raise UsageError(
            f"{row!r} has {len(row)} values, not {len(own)}.", action=f"Columns are {', '.join(own.names)}."
        )
    _check_names(list(found), names)
    return found


def _check_names(given: list[Any], names: list[str]) -> None:
    if unknown := [name for name in given if name not in names]:
        raise UsageError(f"There is no column {unknown[0]!r}.", action=f"Columns are {', '.join(names)}.")


def _check_key(row: Mapping[str, Any], key: Key) -> None:
    if any(row[name] != key[name] for name in row.keys() & key.keys()):
        raise UsageError(f"{row!r} is no row of the key {dict(key)!r}.", action="Test each key by itself.")

"""Conversion of rows and pandas frames of tests to Arrow columns, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.conversion import ArrowTableToRowsConversion, LocalDataToArrowConversion
from pyspark.sql.types import StructField, StructType

from millpond.errors import UsageError
from millpond.spec.operators import Field
from millpond.spec.types import parse_type
from millpond.tasks.ddl import ddl
from millpond.worker.processors.state.schemas import spark_type

Rows = Sequence[Row | tuple[Any, ...] | Mapping[str, Any]]
"""Rows by column name, or, if unnamed, with one value per column in order."""

Key = Mapping[str, Any]
"""A key: values by column name."""


def struct(schema: StructType | str) -> StructType:
    """Parse DDL to a struct type; a struct type is returned unchanged.

    Raises:
        UsageError: the DDL is malformed.
    """
    if isinstance(schema, StructType):
        return schema
    try:
        parsed = spark_type(parse_type(f"struct<{schema}>"))
    except KeyError as error:
        raise UsageError(f"There is no type {error} here.", action="Give the columns as a StructType.") from None
    assert isinstance(parsed, StructType)
    return parsed


def fields(schema: StructType) -> tuple[Field, ...]:
    """Convert columns to fields of a spec."""
    return tuple(Field(field.name, ddl(field.dataType)) for field in schema.fields)


def with_keys(keys: StructType, schema: StructType) -> StructType:
    """Return the input's columns: key columns that the rows lack, then the rows' columns.

    Raises:
        UsageError: a column has one type in the key and another in the rows.
    """
    for field in keys.fields:
        if field.name in schema.names and schema[field.name].dataType != field.dataType:
            raise UsageError(
                f"The column {field.name!r} is {field.dataType.simpleString()} in the key and "
                f"{schema[field.name].dataType.simpleString()} in the rows.",
                action="Give both the same type.",
            )
    return StructType([field for field in keys.fields if field.name not in schema.names] + schema.fields)


def from_rows(rows: Rows, schema: StructType, own: StructType, key: Key | None) -> pa.Table:
    """Convert rows to the columns of `schema`.

    Args:
        rows: the rows.
        schema: all columns.
        own: columns of unnamed rows, in order.
        key: values of the key columns for rows that do not name them.

    Raises:
        UsageError: a row has unknown columns or another key.
    """
    named = [_named(row, own if key is not None else schema, schema.names) for row in rows]
    if key is not None:
        for row in named:
            _check_key(row, key)
        named = [{**row, **key} for row in named]
    if not named:
        return arrow(schema).empty_table()
    nullable = StructType([StructField(field.name, field.dataType) for field in schema.fields])
    return LocalDataToArrowConversion.convert(named, nullable, False).cast(arrow(schema))


def to_rows(table: pa.Table, schema: StructType) -> list[Row]:
    """Convert columns to rows, as `collect` returns them."""
    return list(ArrowTableToRowsConversion.convert(table, schema))


def from_frame(frame: pd.DataFrame, schema: StructType, key: Key | None, zone: str) -> pa.Table:
    """Convert a frame to the columns of `schema`; see `from_rows`.

    Args:
        frame: the rows.
        schema: all columns.
        key: values of the key columns where the frame lacks them.
        zone: the session's time zone, for timestamps.

    Raises:
        UsageError: the frame has unknown columns or another key.
    """
    from pyspark.sql.conversion import PandasToArrowConversion

    by_name: dict[Any, pd.Series] = dict(frame.items())
    _check_names(list(by_name), schema.names)
    if key is not None:
        for name in by_name.keys() & key.keys():
            if len(frame) and not (frame[name] == key[name]).all():
                raise UsageError(f"Rows have another key than {dict(key)!r}.", action="Test each key by itself.")
        by_name |= {name: pd.Series([value] * len(frame), frame.index, dtype=object) for name, value in key.items()}
    if not len(frame):
        return arrow(schema).empty_table()
    missing = pd.Series([None] * len(frame), frame.index, dtype=object)
    columns = [by_name.get(name, missing) for name in schema.names]
    batch = PandasToArrowConversion.convert(columns, schema, timezone=zone, arrow_cast=True)
    return pa.Table.from_batches([batch]).cast(arrow(schema))


def to_frame(table: pa.Table, schema: StructType, zone: str) -> pd.DataFrame:
    """Convert columns to a frame, with the dtypes that Spark passes to Python."""
    from pyspark.sql.conversion import ArrowBatchTransformer

    series = ArrowBatchTransformer.to_pandas(table, timezone=zone, schema=schema)
    return pd.DataFrame(dict(zip(schema.names, series, strict=True)))


def arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow schema in which operators take the columns."""
    return pa.schema([(field.name, parse_type(field.type).arrow) for field in fields(schema)])


def _named(row: Any, own: StructType, names: list[str]) -> dict[str, Any]:
    if isinstance(row, Mapping):
        values = dict(row)
    elif hasattr(row, "__fields__"):
        values = dict(zip(row.__fields__, row, strict=True))
    elif len(row) == len(own):
        values = dict(zip(own.names, row, strict=True))
    else:
        raise UsageError(
            f"{row!r} has {len(row)} values, not {len(own)}.", action=f"Columns are {', '.join(own.names)}."
        )
    _check_names(list(values), names)
    return values


def _check_names(given: list[Any], names: list[str]) -> None:
    if unknown := [name for name in given if name not in names]:
        raise UsageError(f"There is no column {unknown[0]!r}.", action=f"Columns are {', '.join(names)}.")


def _check_key(row: Mapping[str, Any], key: Key) -> None:
    if any(row[name] != key[name] for name in row.keys() & key.keys()):
        raise UsageError(f"{row!r} is no row of the key {dict(key)!r}.", action="Test each key by itself.")

"""Columns of a Spark state store: the fields of its keys and values, and its rows with one column per field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from millpond.plan.catalyst.buffers import Buffers
from millpond.spec.operators import Field

ReadStore = Callable[[str], DataFrame]
"""Reads a store of one operator: its columns are the structs `key` and `value`."""


class StoredGroups(NamedTuple):
    """Groups of an aggregate, or sessions, in Spark's state.

    Attributes:
        rows: a row for each group (see `flattened`).
        buffers: the layout of Spark's buffers, in the order of the state.
        prefix: the prefix of the columns with the groupings: `k` or `v`.
        first: the number of the first column with a buffer; the prefix of these is `v`.
    """

    rows: DataFrame
    buffers: Buffers
    prefix: str
    first: int


def fields_of(state: DataFrame, part: str) -> list[Field]:
    """Return the fields of a store's `key` or `value`."""
    struct: Any = state.schema[part].dataType
    return [Field(field.name, field.dataType.simpleString()) for field in struct.fields]


def metadata_of(state: DataFrame, part: str) -> list[dict[str, Any]]:
    """Return the metadata of the fields of a store's `key` or `value`."""
    struct: Any = state.schema[part].dataType
    return [field.metadata for field in struct.fields]


def flattened(state: DataFrame, *, keys: Sequence[Field], values: Sequence[Field]) -> DataFrame:
    """Return the rows with columns `k0`…, `v0`…, which are numbered since names of fields may repeat.

    Args:
        state: the rows of a store.
        keys: the fields of `key`: all of them, or none.
        values: the fields of `value`: all of them, or none.
    """
    parts: list[str] = []
    for part, prefix, fields in (("key", "k", keys), ("value", "v", values)):
        if fields:
            names = ", ".join(f"{prefix}{number}: {field.type}" for number, field in enumerate(fields))
            parts.append(f"cast({part} as struct<{names}>) as {prefix}")
    if not parts:
        return state.selectExpr("true as nothing")
    structs = state.selectExpr(*parts)
    return structs.selectExpr(*(f"{column}.*" for column in structs.columns))


def field_list(fields: Sequence[Field]) -> str:
    """Return the names and types of fields for people."""
    return ", ".join(f"{field.name} {field.type}" for field in fields)

"""Casts of columns to the Arrow types of Spark's schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType


class Typed:
    """Casts columns to the types that Spark gives them in Python: timestamps have a time zone.

    Args:
        columns: the columns as Spark declares them.
        zone: the time zone.

    Attributes:
        schema: Arrow schema of the result.
    """

    def __init__(self, columns: StructType, zone: str | None) -> None:
        self.schema = to_arrow_schema(columns, timezone=zone)

    def __call__(self, arrays: Sequence[pa.Array], places: Sequence[int] | None = None) -> pa.RecordBatch:
        """Cast all columns, or those at some positions."""
        fields = list(self.schema) if places is None else [self.schema.field(position) for position in places]
        arrays = [_cast(array, field.type) for array, field in zip(arrays, fields, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast an array, also where a struct is null whose fields are not nullable.

    The fields of a null struct are null, in Spark's own Arrow data, too. Arrow's cast to non-nullable fields refuses
    them, so they are declared after the cast.
    """
    if array.type == wanted:
        return array
    return pa.array(_Retyped(array.cast(_nullable(wanted)), wanted))


class _Retyped:
    """An array under another type of the same layout, by the Arrow C data interface."""

    def __init__(self, array: pa.Array, wanted: pa.DataType) -> None:
        self._array = array
        self._wanted = wanted

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
        return self._wanted.__arrow_c_schema__(), self._array.__arrow_c_array__()[1]


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Return a type with all nested fields nullable."""
    if pa.types.is_struct(kind):
        return pa.struct(map(_nullable_field, kind))
    if pa.types.is_list(kind):
        return pa.list_(_nullable_field(kind.value_field))
    if pa.types.is_map(kind):
        key = kind.key_field.with_type(_nullable(kind.key_type))  # the key itself is never null
        return pa.map_(key, _nullable_field(kind.item_field))
    return kind


def _nullable_field(field: pa.Field) -> pa.Field:
    return field.with_type(_nullable(field.type)).with_nullable(True)

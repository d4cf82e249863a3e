"""Conversion of values from external stores to Arrow columns, with per-value errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.spec.types import spark_name

Convert = Callable[[Sequence[Any], pa.DataType], pa.Array]

_CONVERSION_ERRORS = (pa.ArrowException, OverflowError, TypeError, ValueError)


def from_text(values: Sequence[bytes | None], dtype: pa.DataType) -> pa.Array:
    """Convert UTF-8 text: numbers, `true` and `false`, dates and times in ISO 8601."""
    raw = pa.array(values, pa.binary())
    if pa.types.is_binary(dtype):
        return raw
    text = raw.cast(pa.string())
    if pa.types.is_float32(dtype):
        return _to_float32(text.cast(pa.float64()))
    return text if pa.types.is_string(dtype) else text.cast(dtype)


def from_objects(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    """Convert Python objects, at any depth; reject fractions for integers, and numbers for dates and times."""
    if pa.types.is_list(dtype) and all(isinstance(value, list | None) for value in values):
        offsets = np.cumsum([0, *(len(value or ()) for value in values)])
        items = from_objects([item for value in values for item in value or ()], dtype.value_type)
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items, dtype, mask=_nulls(values))
    if pa.types.is_struct(dtype) and all(isinstance(value, dict | None) for value in values):
        fields = [from_objects([(value or {}).get(f.name) for value in values], f.type) for f in dtype]
        return pa.StructArray.from_arrays(fields, fields=list(dtype), mask=_nulls(values))
    if pa.types.is_temporal(dtype) and any(isinstance(value, Number) for value in values):
        raise TypeError
    if pa.types.is_integer(dtype):
        # Infer the type first: unlike the constructor, a safe cast is sure to raise for fractions.
        inferred = pa.array(values)
        if pa.types.is_floating(inferred.type) or pa.types.is_decimal(inferred.type):
            return inferred.cast(dtype)
    return _to_float32(pa.array(values, pa.float64())) if pa.types.is_float32(dtype) else pa.array(values, dtype)


def _nulls(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


def _to_float32(values: pa.Array) -> pa.Array:
    """Cast to single precision.

    Raises:
        OverflowError: a finite value is too large.
    """
    singles = values.cast(pa.float32(), safe=False)
    if pc.any(pc.and_(pc.is_inf(singles), pc.is_finite(values))).as_py():
        raise OverflowError
    return singles


def convert_column(values: Sequence[Any], field: pa.Field, convert: Convert) -> tuple[pa.Array, dict[int, str]]:
    """Convert values to a column; if that fails, convert them one by one.

    Args:
        values: the values; None for null.
        field: the column's name and type.
        convert: converts a sequence of values to a type.

    Returns:
        The column, with nulls for values that cannot be converted, and the errors of those values by position.
    """
    try:
        return convert(values, field.type), {}
    except _CONVERSION_ERRORS:
        pass
    wrong: dict[int, str] = {}
    for position, value in enumerate(values):  # rare path: a value has the wrong type
        try:
            convert([value], field.type)
        except _CONVERSION_ERRORS:
            wrong[position] = f"{field.name} is {_shorten(value)}, which is no {spark_name(field.type)}"
    kept = [None if position in wrong else value for position, value in enumerate(values)]
    return convert(kept, field.type), wrong


def _shorten(value: Any) -> str:
    text = repr(value.decode(errors="replace") if isinstance(value, bytes) else value)
    return text if len(text) <= 60 else f"{text[:57]}…"

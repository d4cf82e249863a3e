"""What clients of foreign stores give, as Arrow columns; and which values cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millpond.spec.types import spark_name

Convert = Callable[[Sequence[Any], pa.DataType], pa.Array]

_WRONG = (pa.ArrowException, OverflowError, TypeError, ValueError)


def texts(values: Sequence[bytes | None], dtype: pa.DataType) -> pa.Array:
    """Values that are written as text, in UTF-8: numbers, `true` and `false`, dates and times as ISO 8601 has them."""
    raw = pa.array(values, pa.binary())
    if pa.types.is_binary(dtype):
        return raw
    text = raw.cast(pa.string())
    if pa.types.is_float32(dtype):
        return _single(text.cast(pa.float64()))
    return text if pa.types.is_string(dtype) else text.cast(dtype)


def objects(values: Sequence[Any], dtype: pa.DataType) -> pa.Array:
    """Values as Python's objects. Of numbers that are none, no integers are made."""
    if pa.types.is_integer(dtype):
        said = pa.array(values)
        if pa.types.is_floating(said.type) or pa.types.is_decimal(said.type):
            return said.cast(dtype)
    return _single(pa.array(values, pa.float64())) if pa.types.is_float32(dtype) else pa.array(values, dtype)


def _single(values: pa.Array) -> pa.Array:
    """Numbers in single precision.

    Raises:
        OverflowError: one is too large for it.
    """
    made = values.cast(pa.float32(), safe=False)
    if pc.any(pc.and_(pc.is_inf(made), pc.is_finite(values))).as_py():
        raise OverflowError
    return made


def column(values: Sequence[Any], field: pa.Field, convert: Convert) -> tuple[pa.Array, dict[int, str]]:
    """Values as a column.

    Args:
        values: null is None. field: the column's name and type. convert: makes one of all values, or of one.

    Returns:
        The column, null for values that are of no use, and these by position: what is wrong with them.
    """
    try:
        return convert(values, field.type), {}
    except _WRONG:
        pass
    wrong: dict[int, str] = {}
    for position, value in enumerate(values):  # rare: a batch has something that it should not have
        try:
            convert([value], field.type)
        except _WRONG:
            wrong[position] = f"{field.name} is {_shown(value)}, which is no {spark_name(field.type)}"
    kept = [None if position in wrong else value for position, value in enumerate(values)]
    return convert(kept, field.type), wrong


def _shown(value: Any) -> str:
    text = repr(value.decode(errors="replace") if isinstance(value, bytes) else value)
    return text if len(text) <= 60 else f"{text[:57]}…"

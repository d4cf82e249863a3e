"""Arrow values as Python values, for people: Python's times end with the years 1 and 9999, Spark's do not."""

from __future__ import annotations

from datetime import date, time
from typing import Any

import pyarrow as pa

_DAY = 86_400_000_000  # microseconds
_EPOCH = date(1970, 1, 1).toordinal()
_CYCLE_DAYS, _CYCLE_YEARS = 146_097, 400
"""After this number of days, the calendar repeats itself."""


def printable_value(value: pa.Scalar) -> Any:
    """Return a value as `as_py` does; times in other years than Python has are texts, also within structs and lists.

    Args:
        value: of a state's row. Times with a zone are in UTC there (see `spec.types`).
    """
    try:
        return value.as_py()
    except OverflowError:
        if isinstance(value, pa.StructScalar):
            return {field.name: printable_value(value[index]) for index, field in enumerate(value.type)}
        if isinstance(value, pa.MapScalar):
            return [tuple(printable_value(entry[index]) for index in range(2)) for entry in _elements(value)]
        if isinstance(value, pa.ListScalar):
            return [printable_value(element) for element in _elements(value)]
        if isinstance(value, pa.Date32Scalar):
            return _date_text(value.value)
        if isinstance(value, pa.TimestampScalar):
            return _timestamp_text(value)
        raise


def _elements(value: pa.ListScalar) -> list[pa.Scalar]:
    # Iterating over a map converts its entries.
    return [value.values[index] for index in range(len(value.values))]


def _timestamp_text(value: pa.TimestampScalar) -> str:
    days, microseconds = divmod(value.value, _DAY)
    seconds, fraction = divmod(microseconds, 1_000_000)
    of_day = time(seconds // 3600, seconds // 60 % 60, seconds % 60, fraction)
    return f"{_date_text(days)} {of_day}{'' if value.type.tz is None else '+00:00'}"


def _date_text(days: int) -> str:
    """Format days since 1970 as a date with a signed year (ISO 8601), by the calendar of `datetime.date`."""
    cycles, day = divmod(_EPOCH + days - 1, _CYCLE_DAYS)
    in_cycle = date.fromordinal(day + 1)
    return f"{in_cycle.year + _CYCLE_YEARS * cycles:+05d}-{in_cycle:%m-%d}"

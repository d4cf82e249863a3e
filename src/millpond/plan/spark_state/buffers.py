"""Conversion of Spark's aggregation buffers to state columns of accumulators.

Each function's `aggBufferAttributes` documents its buffer. For functions whose buffer has separate columns, this module
returns SQL for the accumulator's columns; Spark evaluates it where the state is read. Functions whose buffer is a byte
string (lists, percentiles, all sketches but `approx_count_distinct`) are not supported here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from millpond.spec.functions import is_distinct, sketch_words
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType

_DOUBLES = frozenset({"float", "double"})
_INTEGERS = frozenset({"tinyint", "smallint", "int", "bigint"})


class StateColumn(NamedTuple):
    """One state column: SQL over the buffer's columns `{0}`, `{1}`…, and its type as DDL."""

    sql: str
    type: str


Converter = Callable[[AggregateCall, Sequence[DataType], Sequence[str], Sequence[str]], list[StateColumn] | None]
"""Function of a call, its input types (also as DDL) and the types of its buffer; None if that is unknown."""


def state_columns(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    """Return the state columns of a call's accumulator from Spark's buffers; None if they cannot be made.

    Args:
        call: the call.
        inputs: the types of its inputs.
        types: the same types as DDL.
        buffers: the types of the buffer's columns.
    """
    convert = _CONVERTERS.get(call.function)
    if convert is None or is_distinct(call):
        return None
    return convert(call, inputs, types, buffers)


def _doubles(*positions: int) -> Converter:
    """Copy doubles of a buffer that has only double columns."""

    def convert(
        call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
    ) -> list[StateColumn] | None:
        if len(buffers) <= max(positions) or set(buffers) != {"double"}:
            return None
        return [StateColumn(f"{{{position}}}", "double") for position in positions]

    return convert


def _count(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    return [StateColumn("{0}", "bigint")] if list(buffers) == ["bigint"] else None


def _bits(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    return [StateColumn("cast({0} as bigint)", "bigint")] if len(buffers) == 1 else None


def _sum(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    if inputs[0].name == "decimal":
        return _decimal_sum(inputs[0], buffers)
    if inputs[0].name in _INTEGERS and list(buffers) == ["bigint"]:
        return [StateColumn("{0}", "bigint")]
    if inputs[0].name in _DOUBLES and list(buffers) == ["double"]:
        return [StateColumn("{0}", "double")]
    return None  # sums of intervals; `try_sum` of integers, where Spark loses the amount of an overflow


def _decimal_sum(dtype: DataType, buffers: Sequence[str]) -> list[StateColumn] | None:
    if list(buffers) == ["bigint"]:  # for small decimals, Spark keeps a sum of the unscaled values
        sums = "cast({0} as decimal(38,0))"
    elif len(buffers) == 2 and buffers[0].startswith("decimal") and buffers[1] == "boolean":
        beyond = "raise_error('A sum of decimals in the state is beyond its precision.')"
        whole = (
            f"if({{0}} is null, cast({beyond} as decimal(38,{dtype.scale})), cast({{0}} as decimal(38,{dtype.scale})))"
        )
        sums = f"if({{1}}, null, {whole})"
    else:
        return None
    return [StateColumn(sums, _wide(sums)), *_excess(dtype)]


def _average(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    if len(buffers) != 2 or buffers[1] != "bigint":
        return None
    count = StateColumn("{1}", "bigint")
    if inputs[0].name != "decimal":
        return [StateColumn("{0}", "double"), count] if buffers[0] == "double" else None
    if buffers[0] == "double":  # for small decimals, Spark keeps an average of the unscaled values
        sums = "cast(round({0}) as decimal(38,0))"
    elif buffers[0].startswith("decimal"):
        sums = f"cast({{0}} as decimal(38,{inputs[0].scale}))"
    else:
        return None
    beyond = "raise_error('A sum of decimals in the state is beyond its precision.')"
    checked = f"if({{0}} is null, cast({beyond} as {_wide(sums)}), {sums})"
    return [StateColumn(checked, _wide(sums)), *_excess(inputs[0]), count]


def _wide(sql: str) -> str:
    return sql[sql.rindex("decimal(38,") :].split(")")[0] + ")"


def _excess(dtype: DataType) -> list[StateColumn]:
    """Return the column for the excess over 38 digits, if a sum may exceed them; it is 0 between batches."""
    return [StateColumn("0L", "bigint")] if dtype.precision + 10 > 38 else []


def _extreme(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    if len(buffers) != 1 or inputs[0].nested:
        return None  # nested values have extra key columns, by which they are ordered
    return [StateColumn("{0}", types[0])]


def _extreme_by(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    if len(buffers) != 2 or len(inputs) != 2 or inputs[0].nested or inputs[1].nested:
        return None
    return [StateColumn("{0}", types[0]), StateColumn("{1}", types[1])]


def _first(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    if len(buffers) != 2 or buffers[1] != "boolean" or inputs[0].nested:
        return None
    return [StateColumn("{0}", types[0]), StateColumn("cast({1} as bigint)", "bigint")]


def _last(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    columns = _first(call, inputs, types, buffers)
    counted = call.filter is not None and not call.options.get("ignore_nulls", False)
    return columns if columns is None or counted else columns[:1]


def _sketch(
    call: AggregateCall, inputs: Sequence[DataType], types: Sequence[str], buffers: Sequence[str]
) -> list[StateColumn] | None:
    if set(buffers) != {"bigint"} or len(buffers) != sketch_words(call.options):
        return None
    words = ", ".join(f"{{{position}}}" for position in range(len(buffers)))
    used = StateColumn("0L", "bigint")  # the size of growing state; a sketch does not grow
    return [StateColumn(f"array({words})", "array<bigint>"), used]


_CONVERTERS: dict[str, Converter] = {
    "count": _count,
    "count_if": _count,
    "sum": _sum,
    "avg": _average,
    "min": _extreme,
    "max": _extreme,
    "bool_and": _extreme,
    "bool_or": _extreme,
    "bit_and": _bits,
    "bit_or": _bits,
    "bit_xor": _bits,
    "product": _doubles(0),
    "first": _first,
    "any_value": _first,
    "last": _last,
    "min_by": _extreme_by,
    "max_by": _extreme_by,
    **dict.fromkeys(("stddev_samp", "stddev_pop", "var_samp", "var_pop", "regr_sxx", "regr_syy"), _doubles(0, 1, 2)),
    "approx_count_distinct": _sketch,
    "skewness": _doubles(0, 1, 2, 3),
    "kurtosis": _doubles(0, 1, 2, 3, 4),
    **dict.fromkeys(("covar_pop", "covar_samp", "regr_sxy"), _doubles(0, 1, 2, 3)),
    **dict.fromkeys(("corr", "regr_r2"), _doubles(0, 1, 2, 3, 4, 5)),
    # Spark keeps a covariance and a variance; the variance begins with a count and a mean of its own.
    **dict.fromkeys(("regr_slope", "regr_intercept"), _doubles(0, 1, 2, 3, 6)),
}

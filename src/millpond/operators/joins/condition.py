"""Conditions on pairs of rows, evaluated over Arrow columns with Spark's semantics of nulls and of NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millpond.errors import UsageError

ReadColumn = Callable[[str, int], pa.Array]
"""Returns a stored value of the pairs, given the side (`left` or `right`) and the number."""

COMPARISONS = ("=", "<=>", "<", "<=", ">", ">=")

_FUNCTIONS: dict[str, Any] = {"=": pc.equal, "<": pc.less, "<=": pc.less_equal}


def operands_of(condition: list[Any]) -> Iterator[tuple[str, int]]:
    """Yield the stored values that a condition reads."""
    if condition[0] in ("left", "right"):
        yield condition[0], condition[1]
        return
    for operand in condition[1:]:
        yield from operands_of(operand)


def evaluate(condition: list[Any], column: ReadColumn) -> pa.Array:
    """Evaluate the condition for each pair: true, false or null (see `JoinSpec.condition`).

    Raises:
        UsageError: the condition has an unknown operation.
    """
    operation, *operands = condition
    if operation in ("left", "right"):
        return column(operation, operands[0])
    values = [evaluate(operand, column) for operand in operands]
    if operation in ("and", "or"):
        # Three-valued logic, as in SQL: false and null is false, true or null is true.
        combine = pc.and_kleene if operation == "and" else pc.or_kleene
        result = values[0]
        for value in values[1:]:
            result = combine(result, value)
        return result
    if operation == "not":
        return pc.invert(values[0])
    if operation in COMPARISONS:
        return _compare(operation, *values)
    raise UsageError(f"Conditions of joins do not know {operation!r}.", action="Leave this operator on Spark.")


def _compare(operation: str, left: pa.Array, right: pa.Array) -> pa.Array:
    if operation == "<=>":
        nulls = pc.and_(pc.is_null(left), pc.is_null(right))
        return pc.or_(nulls, pc.fill_null(_compare("=", left, right), False))
    if operation in (">", ">="):
        return _compare({">": "<", ">=": "<="}[operation], right, left)
    if pa.types.is_boolean(left.type):
        left, right = left.cast(pa.int8()), right.cast(pa.int8())
    result = _FUNCTIONS[operation](left, right)
    if not pa.types.is_floating(left.type):
        return result
    # NaN equals itself and is greater than all other numbers.
    left_nan, right_nan = pc.is_nan(left), pc.is_nan(right)
    if operation == "=":
        return pc.or_(result, pc.and_(left_nan, right_nan))
    if operation == "<":
        return pc.or_(result, pc.and_(pc.invert(left_nan), right_nan))
    return pc.or_(result, right_nan)

"""Read calls of aggregate functions: Spark's function, its arguments, and its options."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark.sql.types import ArrayType, DataType, _parse_datatype_string

from millpond.plan.catalyst.function_options import count_min_options, percentile_options, sketch_tables
from millpond.plan.catalyst.nodes import Expression
from millpond.plan.catalyst.versions import merges_empty_moments
from millpond.plan.reading.reading import Reading
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.functions import BY_CATALYST, sketch_precision, unsupported_call, unsupported_key
from millpond.spec.operators import AggregateCall

_SMALL_TYPES = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double", "boolean", "date"})
"""Types small enough to be sent as they are, even if only their null flags count."""


def _all_operands(aggregate: Expression) -> list[Expression]:
    return aggregate.children


def _one_input_each(reading: Reading, operands: list[Expression]) -> list[int]:
    return [reading.add_input([operand]) for operand in operands]


def _no_options(aggregate: Expression) -> dict[str, Any]:
    return {}


def _own_type(aggregate: Expression) -> str:
    return aggregate.type


class Reader(NamedTuple):
    """Reader of one function's calls.

    Attributes:
        operands: returns the operands that depend on rows, if not all do (the remaining ones are constants).
        inputs: makes the call's inputs from its operands, if they are not simply the operands.
        options: returns the function's further parameters.
        result: returns the type of the slot's result, if it is not the function's own; the plan casts it.
    """

    operands: Callable[[Expression], list[Expression]] = _all_operands
    inputs: Callable[[Reading, list[Expression]], list[int]] = _one_input_each
    options: Callable[[Expression], dict[str, Any]] = _no_options
    result: Callable[[Expression], str] = _own_type


def read_function(reading: Reading, expression: Expression) -> AggregateCall:
    """Read one `AggregateExpression`; its arguments become inputs of the reading.

    Raises:
        Unsupported: the function, or its arguments, cannot run here.
    """
    called = expression.expression("aggregateFunction")
    assert called is not None
    aggregate = resolve_replacement(called)
    name = BY_CATALYST.get(aggregate.kind)
    if name is None:
        raise Unsupported(Reason("MP-FUNCTION", str(called.get("prettyName") or called.kind)))
    distinct = bool(expression.get("isDistinct"))
    # COUNT(DISTINCT x) needs the values, not only whether they are null.
    reader = _EVERY_INPUT if distinct and name == "count" else READERS.get(name, _EVERY_INPUT)
    operands = reader.operands(aggregate)
    inputs = reader.inputs(reading, operands)
    condition = expression.expression("filter")
    position = None if condition is None else reading.add_input([condition])
    type_ = reader.result(aggregate)
    call = AggregateCall(name, tuple(inputs), type_, position, distinct, reader.options(aggregate))
    reason = unsupported_call(call, [reading.inputs[index].field.type for index in inputs])
    if reason is not None:
        types = ", ".join(operand.type for operand in operands)
        mode = "try_" if call.options.get("eval_mode") == "try" else ""
        raise Unsupported(Reason(reason, f"{mode}{name}({'distinct ' if distinct else ''}{types})"))
    return call


def resolve_replacement(function: Expression) -> Expression:
    """Return a known function; an unknown one is replaced as Spark does (`avg` for `regr_avgx`, say)."""
    while function.kind not in BY_CATALYST:
        replacement = function.expression("replacement")
        if replacement is None:
            break
        function = replacement
    return function


def slot_result_type(expression: Expression) -> DataType:
    """Return the type of the slot's result of an `AggregateExpression`; the plan may cast it."""
    called = expression.expression("aggregateFunction")
    assert called is not None
    aggregate = resolve_replacement(called)
    reader = READERS.get(BY_CATALYST.get(aggregate.kind, ""), _EVERY_INPUT)
    own, type_ = expression.data_type, reader.result(aggregate)
    if type_ == aggregate.type:
        return own
    slot_type = _parse_datatype_string(type_)
    if isinstance(own, ArrayType) and isinstance(slot_type, ArrayType):
        slot_type.containsNull = own.containsNull
    return slot_type


def _null_flag(reading: Reading, operands: list[Expression]) -> list[int]:
    """Add the input of `count`: null where any operand is; a small operand itself, otherwise a flag."""
    operands = [operand for operand in operands if operand.nullable]
    if not operands:
        return []
    if len(operands) == 1 and operands[0].type in _SMALL_TYPES:
        return [reading.add_input(operands)]
    present = " and ".join(f"isnotnull({{{index}}})" for index in range(len(operands)))
    return [reading.add_input(operands, f"nullif({present}, false)", "boolean")]


def _value_hash(reading: Reading, operands: list[Expression]) -> list[int]:
    """Add the 64-bit hash that Spark's sketch takes of a value.

    Collations and nested types are refused: Spark hashes them in its own way.
    """
    (operand,) = operands
    if "collate" in operand.type or unsupported_key(operand.type):
        raise Unsupported(Reason("MP-INPUT-TYPE", f"approx_count_distinct({operand.type})"))
    return [reading.add_input([operand], "if(isnull({0}), null, xxhash64({0}))", "bigint")]


def _value_and_frequency(aggregate: Expression) -> list[Expression]:
    """Return the row operands of a percentile: the value, and its frequency unless that is 1."""
    value, *rest = aggregate.children
    frequency = rest[1] if len(rest) > 1 else None
    return [value] if frequency is None or str(frequency) == "1" else [value, frequency]


def _first(aggregate: Expression) -> list[Expression]:
    """Return the first operand; the remaining ones are constants."""
    return aggregate.children[:1]


def _as_double(reading: Reading, operands: list[Expression]) -> list[int]:
    """Add a number as input; decimals become doubles, as in Spark's computation."""
    (operand,) = operands
    if not operand.type.startswith("decimal"):
        return [reading.add_input(operands)]
    return [reading.add_input(operands, "cast({0} as double)", "double")]


def _doubles_for_decimals(aggregate: Expression) -> str:
    """Return the function's type, with doubles for decimals."""
    return re.sub(r"decimal\(\d+,\d+\)", "double", aggregate.type)


def _percentage_options(aggregate: Expression) -> dict[str, Any]:
    options = percentile_options(aggregate)
    return {
        "percentages": options["percentages"],
        "array": options["array"],
        "accuracy": int(aggregate.children[2].constant),
    }


def _text_and_order(aggregate: Expression) -> list[Expression]:
    """Return the operands of `listagg`: the text, and its sort columns unless the text is its own sort column."""
    text, _, *orders = aggregate.children
    return [text, *(order.children[0] for order in orders)] if aggregate.get("needSaveOrderValue") else [text]


def _with_sort_columns(reading: Reading, operands: list[Expression]) -> list[int]:
    """Add the text, or a struct of it and its sort columns; null where the text is null."""
    if len(operands) == 1:
        return [reading.add_input(operands)]
    names = [f"c{number}" for number in range(len(operands))]
    fields = ", ".join(f"'{name}', {{{number}}}" for number, name in enumerate(names))
    type_ = ", ".join(f"{name}: {operand.type}" for name, operand in zip(names, operands, strict=True))
    return [reading.add_input(operands, f"if(isnull({{0}}), null, named_struct({fields}))", f"struct<{type_}>")]


def _delimiter_and_order(aggregate: Expression) -> dict[str, Any]:
    """Return the delimiter of `listagg` as hexadecimal digits, and its sort directions, if any."""
    _, delimiter, *orders = aggregate.children
    order = [[str(sort.get("direction").toString()) == "Descending", _nulls_last(sort)] for sort in orders]
    return {"delimiter": delimiter.constant_bytes.hex()} | ({"order": order} if order else {})


def _nulls_last(order: Expression) -> bool:
    return str(order.get("nullOrdering").toString()) == "NullsLast"


def _eval_mode(aggregate: Expression) -> dict[str, Any]:
    """Return the overflow behaviour of `sum` and `avg`: `legacy`, `ansi` or `try`."""
    context = aggregate.get("evalContext")
    mode = context.evalMode() if context is not None else aggregate.get("evalMode")
    return {"eval_mode": "legacy" if mode is None else str(mode.toString()).lower()}


def _null_options(aggregate: Expression) -> dict[str, Any]:
    return {"ignore_nulls": bool(aggregate.get("ignoreNulls"))}


def _collect_options(aggregate: Expression) -> dict[str, Any]:
    return {"ignore_nulls": aggregate.get("ignoreNulls") is not False}


def _merge_options(aggregate: Expression) -> dict[str, Any]:
    """Return for all statistics how this Spark version merges states (see `operators.functions.moments`)."""
    return {"merges_empty": True} if merges_empty_moments() else {}


def _sample_options(aggregate: Expression) -> dict[str, Any]:
    return {"null_on_divide_by_zero": aggregate.get("nullOnDivideByZero") is not False} | _merge_options(aggregate)


def _division_options(aggregate: Expression) -> dict[str, Any]:
    """Return the behaviour on division by zero, from the division at the end of Spark's function."""
    result = aggregate.expression("evaluateExpression")
    assert result is not None
    division = next(part for part in result.walk() if part.kind == "Divide")
    return _sample_options(aggregate) | _eval_mode(division)


def _mode_options(aggregate: Expression) -> dict[str, Any]:
    """Return which of equally frequent values `mode` takes: Spark reverses the order to get the least."""
    return {"greatest": aggregate.get("reverseOpt") is False}


def _sketch_options(aggregate: Expression) -> dict[str, Any]:
    options = {"relative_sd": float(aggregate.get("relativeSD"))}
    return options | sketch_tables(sketch_precision(options))


_EVERY_INPUT = Reader()

READERS: dict[str, Reader] = {
    "count": Reader(inputs=_null_flag),
    "sum": Reader(options=_eval_mode),
    "avg": Reader(options=_eval_mode),
    "first": Reader(options=_null_options),
    "last": Reader(options=_null_options),
    "any_value": Reader(options=_null_options),
    **dict.fromkeys(("stddev_pop", "var_pop", "covar_pop"), Reader(options=_merge_options)),
    **dict.fromkeys(("regr_sxx", "regr_sxy", "regr_slope", "regr_intercept"), Reader(options=_merge_options)),
    "stddev_samp": Reader(options=_sample_options),
    "var_samp": Reader(options=_sample_options),
    "skewness": Reader(options=_division_options),
    "kurtosis": Reader(options=_division_options),
    "corr": Reader(options=_division_options),
    "covar_samp": Reader(options=_sample_options),
    "regr_r2": Reader(options=_division_options),
    "approx_count_distinct": Reader(inputs=_value_hash, options=_sketch_options),
    "collect_list": Reader(options=_collect_options),
    "collect_set": Reader(options=_collect_options),
    "percentile_approx": Reader(_first, _as_double, _percentage_options, _doubles_for_decimals),
    "count_min_sketch": Reader(operands=_first, options=count_min_options),
    "listagg": Reader(operands=_text_and_order, inputs=_with_sort_columns, options=_delimiter_and_order),
    "percentile": Reader(operands=_value_and_frequency, options=percentile_options),
    "mode": Reader(options=_mode_options),
}
"""Readers of functions that need more than one input per operand."""

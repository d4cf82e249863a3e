"""Reads calls of aggregate functions: which of Spark's they are, what they are called with, and their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from millpond.plan.catalyst.nodes import Expression, percentile_options, sketch_tables
from millpond.plan.reasons import Reason, Unsupported
from millpond.spec.functions import BY_CATALYST, key_supported, sketch_precision, supported
from millpond.spec.operators import AggregateCall

if TYPE_CHECKING:
    from millpond.plan.reading.aggregate import Reading

SMALL = frozenset({"tinyint", "smallint", "int", "bigint", "float", "double", "boolean", "date"})
"""Types cheap enough to be sent as they are where only their nulls count."""


def _children(aggregate: Expression) -> list[Expression]:
    return aggregate.children


def _each(reading: Reading, operands: list[Expression]) -> list[int]:
    return [reading.add_input([operand]) for operand in operands]


def _no_options(aggregate: Expression) -> dict[str, Any]:
    return {}


class Reader(NamedTuple):
    """What is read of a call beside its function.

    Attributes:
        operands: the operands that rows have, where not all are (others are constants).
        inputs: makes the call's inputs of its operands, where each is not simply an input.
        options: what the result depends on beside its inputs.
    """

    operands: Callable[[Expression], list[Expression]] = _children
    inputs: Callable[[Reading, list[Expression]], list[int]] = _each
    options: Callable[[Expression], dict[str, Any]] = _no_options


def read_function(reading: Reading, expression: Expression) -> AggregateCall:
    """Read one `AggregateExpression`; its arguments become inputs of the reading.

    Raises:
        Unsupported: the function, or its arguments, cannot run here.
    """
    called = expression.expression("aggregateFunction")
    assert called is not None
    aggregate = replaced(called)
    name = BY_CATALYST.get(aggregate.kind)
    if name is None:
        raise Unsupported(Reason("MP-FUNCTION", str(called.get("prettyName") or called.kind)))
    distinct = bool(expression.get("isDistinct"))
    reader = _EVERY_INPUT if distinct and name == "count" else READERS.get(name, _EVERY_INPUT)
    operands = reader.operands(aggregate)
    inputs = reader.inputs(reading, operands)
    condition = expression.expression("filter")
    position = None if condition is None else reading.add_input([condition])
    call = AggregateCall(name, tuple(inputs), aggregate.type, position, distinct, reader.options(aggregate))
    reason = supported(call, [reading.inputs[index].field.type for index in inputs])
    if reason is not None:
        types = ", ".join(operand.type for operand in operands)
        mode = "try_" if call.options.get("eval_mode") == "try" else ""
        raise Unsupported(Reason(reason, f"{mode}{name}({'distinct ' if distinct else ''}{types})"))
    return call


def replaced(function: Expression) -> Expression:
    """A function, or if it is not known here, what Spark runs in its place, if it does: `avg` of `regr_avgx`, say."""
    while function.kind not in BY_CATALYST:
        replacement = function.expression("replacement")
        if replacement is None:
            break
        function = replacement
    return function


def _present(reading: Reading, operands: list[Expression]) -> list[int]:
    """Of `count`: a column that is null where any operand is, the operand itself if it is small, else a flag."""
    operands = [operand for operand in operands if operand.nullable]
    if not operands:
        return []
    if len(operands) == 1 and operands[0].type in SMALL:
        return [reading.add_input(operands)]
    present = " and ".join(f"isnotnull({{{index}}})" for index in range(len(operands)))
    return [reading.add_input(operands, f"nullif({present}, false)", "boolean")]


def _hashed(reading: Reading, operands: list[Expression]) -> list[int]:
    """The 64-bit hash that Spark's sketch takes of a value; its collations and nested types are Spark's business."""
    (operand,) = operands
    if "collate" in operand.type or key_supported(operand.type):
        raise Unsupported(Reason("MP-INPUT-TYPE", f"approx_count_distinct({operand.type})"))
    return [reading.add_input([operand], "if(isnull({0}), null, xxhash64({0}))", "bigint")]


def _counted(aggregate: Expression) -> list[Expression]:
    """The operands of a percentile that rows have: the value, and its frequency unless that is 1."""
    value, *rest = aggregate.children
    frequency = rest[1] if len(rest) > 1 else None
    return [value] if frequency is None or str(frequency) == "1" else [value, frequency]


def _eval_mode(aggregate: Expression) -> dict[str, Any]:
    """`legacy`, `ansi` or `try`: what `sum` and `avg` do on overflow."""
    context = aggregate.get("evalContext")
    mode = context.evalMode() if context is not None else aggregate.get("evalMode")
    return {"eval_mode": "legacy" if mode is None else str(mode.toString()).lower()}


def _ignoring_nulls(aggregate: Expression) -> dict[str, Any]:
    return {"ignore_nulls": bool(aggregate.get("ignoreNulls"))}


def _collecting(aggregate: Expression) -> dict[str, Any]:
    return {"ignore_nulls": aggregate.get("ignoreNulls") is not False}


def _of_sample(aggregate: Expression) -> dict[str, Any]:
    return {"null_on_divide_by_zero": aggregate.get("nullOnDivideByZero") is not False}


def _quotient(aggregate: Expression) -> dict[str, Any]:
    """What a division by zero gives, told by the division in which Spark's function ends."""
    result = aggregate.expression("evaluateExpression")
    assert result is not None
    division = next(part for part in result.walk() if part.kind == "Divide")
    return _of_sample(aggregate) | _eval_mode(division)


def _most_frequent(aggregate: Expression) -> dict[str, Any]:
    """Of `mode`: Spark reverses the order of values so that its maximum is the least one."""
    return {"greatest": aggregate.get("reverseOpt") is False}


def _sketch(aggregate: Expression) -> dict[str, Any]:
    options = {"relative_sd": float(aggregate.get("relativeSD"))}
    return options | sketch_tables(sketch_precision(options))


_EVERY_INPUT = Reader()

READERS: dict[str, Reader] = {
    "count": Reader(inputs=_present),
    "sum": Reader(options=_eval_mode),
    "avg": Reader(options=_eval_mode),
    "first": Reader(options=_ignoring_nulls),
    "last": Reader(options=_ignoring_nulls),
    "any_value": Reader(options=_ignoring_nulls),
    "stddev_samp": Reader(options=_of_sample),
    "var_samp": Reader(options=_of_sample),
    "skewness": Reader(options=_quotient),
    "kurtosis": Reader(options=_quotient),
    "corr": Reader(options=_quotient),
    "covar_samp": Reader(options=_of_sample),
    "regr_r2": Reader(options=_quotient),
    "approx_count_distinct": Reader(inputs=_hashed, options=_sketch),
    "collect_list": Reader(options=_collecting),
    "collect_set": Reader(options=_collecting),
    "percentile": Reader(operands=_counted, options=percentile_options),
    "mode": Reader(options=_most_frequent),
}
"""Functions of which more is read than that each operand is an input."""

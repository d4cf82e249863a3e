"""Reads one `Aggregate` node: what to project below the exchange, what the operator computes, what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millpond.operators.catalogue import (
    KEY_COLUMNS,
    MAX_KEY_COLUMNS,
    key_supported,
    key_width,
    sketch_precision,
    supported,
)
from millpond.operators.spec import GLOBAL_HASH, AggregateCall, AggregateSpec, Field
from millpond.plan.catalyst import (
    SESSION_WINDOW,
    TIME_WINDOW,
    WATERMARK_DELAY,
    Catalyst,
    Expression,
    Node,
    sketch_tables,
)
from millpond.plan.reasons import Reason
from millpond.plan.support import FUNCTIONS, SMALL

_PATH_LIKE = str.maketrans(".`", "__")
_EVENT_TIME = {WATERMARK_DELAY, TIME_WINDOW, SESSION_WINDOW}
"""Field metadata by which Spark knows columns of event time."""


@dataclass(frozen=True)
class Derived:
    """A column of the pipe's input, computed by SQL from columns that the child's projection made.

    Attributes:
        field: its name and type in the pipe.
        raw: positions in the raw expressions.
        sql: SQL over `{0}`, `{1}`…, the raw columns' names.
    """

    field: Field
    raw: tuple[int, ...]
    sql: str


@dataclass
class Reading:
    """What was read from an `Aggregate` node.

    Attributes:
        raw: expressions over the child's columns, each projected once.
        keys, inputs: the pipe's input columns.
        calls: the aggregate functions, each computed once.
        aggregates: the expression that each call was read from.
        hash: SQL over the key columns that gives the key hash.
    """

    raw: list[Expression] = field(default_factory=list)
    keys: list[Derived] = field(default_factory=list)
    inputs: list[Derived] = field(default_factory=list)
    calls: list[AggregateCall] = field(default_factory=list)
    aggregates: list[Expression] = field(default_factory=list)
    hash: str = f"{GLOBAL_HASH}L"

    def spec(self, output_mode: str) -> AggregateSpec:
        """The operator's plain description."""
        return AggregateSpec(
            tuple(key.field for key in self.keys),
            tuple(column.field for column in self.inputs),
            tuple(self.calls),
            output_mode,
        )

    def set_hash(self, keys: list[str]) -> None:
        """Hash these columns; without any, all rows belong together.

        Raises:
            Unsupported: the key has too many columns.
        """
        fields = [column.field for column in self.keys + self.inputs if column.field.name in keys]
        if key_width(fields) > MAX_KEY_COLUMNS:
            raise Unsupported(Reason(KEY_COLUMNS, str(key_width(fields))))
        if keys:
            self.hash = f"xxhash64({', '.join(quoted(key) for key in keys)})"

    def add_raw(self, expression: Expression) -> int:
        """The position of an expression among those to project, added if new."""
        for index, known in enumerate(self.raw):
            if known.means(expression):
                return index
        self.raw.append(expression)
        return len(self.raw) - 1

    def add_input(self, expressions: list[Expression], sql: str = "{0}", type_: str | None = None) -> int:
        """The position of an input column, added if new."""
        raw = tuple(self.add_raw(expression) for expression in expressions)
        for index, known in enumerate(self.inputs):
            if known.raw == raw and known.sql == sql:
                return index
        self.inputs.append(Derived(Field(f"input{len(self.inputs)}", type_ or expressions[0].type), raw, sql))
        return len(self.inputs) - 1


class Unsupported(Exception):  # control flow within this package, not an error that a user sees
    """A part of the operator that stays on Spark."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def read_aggregate(catalyst: Catalyst, node: Node) -> Reading:
    """Read an `Aggregate`.

    Raises:
        Unsupported: with the reason why it stays on Spark.
    """
    reading = Reading()
    names: set[str] = set()
    for grouping in node.list("groupingExpressions"):
        _check_event_time(grouping)
        check_key(grouping)
        column = Field(unique(_label(node, grouping), names), grouping.type)
        reading.keys.append(Derived(column, (reading.add_raw(grouping),), "{0}"))
    reading.set_hash([key.field.name for key in reading.keys])
    for result in node.list("aggregateExpressions"):
        for expression in result.walk():
            if expression.kind == "AggregateExpression" and not any(expression.means(a) for a in reading.aggregates):
                reading.aggregates.append(expression)
                reading.calls.append(read_function(catalyst, reading, expression))
    return reading


def rewrite(
    catalyst: Catalyst, expression: Expression, replace: Callable[[Expression], Expression | None]
) -> Expression:
    """A copy of an expression with every subtree that `replace` knows replaced, outermost first."""
    new = replace(expression)
    if new is not None:
        return new
    if not expression.children:
        return expression
    return catalyst.with_operands(expression, [rewrite(catalyst, child, replace) for child in expression.children])


def quoted(name: str) -> str:
    """A column name as SQL."""
    return "`" + name.replace("`", "``") + "`"


def unique(name: str, taken: set[str]) -> str:
    """`name`, numbered if taken; case is ignored, as Spark's resolution does by default.

    Dots and backticks go, because `mapInArrow` reads column names as if they were paths.
    """
    name = name.translate(_PATH_LIKE)
    fresh, number = name, 1
    while fresh.lower() in taken or fresh.startswith("__"):
        number += 1
        fresh = f"{name.lstrip('_')}_{number}"
    taken.add(fresh.lower())
    return fresh


def _label(node: Node, grouping: Expression) -> str:
    """The name under which the query shows a grouping expression, else its SQL."""
    for result in node.list("aggregateExpressions"):
        if result.kind == "Alias" and result.children[0].means(grouping):
            return result.name
    return grouping.name


def check_key(expression: Expression) -> None:
    """Refuse a key of a type that operators do not compare."""
    reason = key_supported(expression.type)
    if reason is not None:
        raise Unsupported(Reason(reason, f"{expression.name} ({expression.type})"))


def _check_event_time(grouping: Expression) -> None:
    for part in grouping.walk():
        if part.kind in ("TimeWindow", "SessionWindow", "WindowTime"):
            raise Unsupported(Reason("MP-EVENT-TIME", grouping.name))
        if part.kind == "AttributeReference" and _EVENT_TIME & part.metadata.keys():
            raise Unsupported(Reason("MP-EVENT-TIME", part.name))


def read_function(catalyst: Catalyst, reading: Reading, expression: Expression) -> AggregateCall:
    """Read one `AggregateExpression`; its arguments become inputs of the reading.

    Raises:
        Unsupported: the function, or its arguments, cannot run here.
    """
    aggregate = expression.expression("aggregateFunction")
    assert aggregate is not None
    name = FUNCTIONS.get(aggregate.kind)
    if name is None:
        raise Unsupported(Reason("MP-FUNCTION", str(aggregate.get("prettyName") or aggregate.kind)))
    distinct = bool(expression.get("isDistinct"))
    operands = aggregate.children
    if name == "count" and not distinct:
        operands = [operand for operand in operands if operand.nullable]
        inputs = [_presence(reading, operands)] if operands else []
    elif name == "approx_count_distinct":
        inputs = [_hashed(reading, operands[0])]
    else:
        inputs = [reading.add_input([operand]) for operand in operands]
    condition = expression.expression("filter")
    position = None if condition is None else reading.add_input([condition])
    call = AggregateCall(name, tuple(inputs), aggregate.type, position, distinct, _options(catalyst, name, aggregate))
    reason = supported(call, [reading.inputs[index].field.type for index in inputs])
    if reason is not None:
        types = ", ".join(operand.type for operand in operands)
        mode = "try_" if call.options.get("eval_mode") == "try" else ""
        raise Unsupported(Reason(reason, f"{mode}{name}({'distinct ' if distinct else ''}{types})"))
    return call


def _options(catalyst: Catalyst, name: str, aggregate: Expression) -> dict[str, Any]:
    """What a function's result depends on beside its inputs."""
    if name in ("first", "last", "any_value"):
        return {"ignore_nulls": bool(aggregate.get("ignoreNulls"))}
    if name in ("collect_list", "collect_set"):
        return {"ignore_nulls": aggregate.get("ignoreNulls") is not False}
    if name in ("sum", "avg"):
        return {"eval_mode": _eval_mode(aggregate)}
    if name in ("stddev_samp", "var_samp"):
        return {"null_on_divide_by_zero": aggregate.get("nullOnDivideByZero") is not False}
    if name == "approx_count_distinct":
        options = {"relative_sd": float(aggregate.get("relativeSD"))}
        return options | sketch_tables(sketch_precision(options))
    return {}


def _presence(reading: Reading, operands: list[Expression]) -> int:
    """A column that is null where any operand of `count` is: the operand itself if it is small, else a flag."""
    if len(operands) == 1 and operands[0].type in SMALL:
        return reading.add_input(operands)
    present = " and ".join(f"isnotnull({{{index}}})" for index in range(len(operands)))
    return reading.add_input(operands, f"nullif({present}, false)", "boolean")


def _hashed(reading: Reading, operand: Expression) -> int:
    """The 64-bit hash that Spark's sketch takes of a value; its collations and nested types are Spark's business."""
    if "collate" in operand.type or key_supported(operand.type):
        raise Unsupported(Reason("MP-INPUT-TYPE", f"approx_count_distinct({operand.type})"))
    return reading.add_input([operand], "if(isnull({0}), null, xxhash64({0}))", "bigint")


def _eval_mode(aggregate: Expression) -> str:
    """`legacy`, `ansi` or `try`: what `sum` and `avg` do on overflow."""
    context = aggregate.get("evalContext")
    mode = context.evalMode() if context is not None else aggregate.get("evalMode")
    return "legacy" if mode is None else str(mode.toString()).lower()

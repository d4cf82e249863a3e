"""What reading joins asks of Spark's own optimiser and operators; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from py4j.protocol import Py4JError

from millpond.errors import UsageError
from millpond.plan.catalyst import Catalyst, Expression, Node, items

_OPTIMIZER = "org.apache.spark.sql.catalyst.optimizer"
_JOIN_HELPERS = (
    "org.apache.spark.sql.execution.streaming.operators.stateful.join.StreamingSymmetricHashJoinHelper",
    "org.apache.spark.sql.execution.streaming.StreamingSymmetricHashJoinHelper",
)
"""Where the versions of Spark have it."""
_BEFORE_JOINS = (
    "org.apache.spark.sql.catalyst.analysis.EliminateSubqueryAliases",
    "org.apache.spark.sql.catalyst.analysis.EliminateView",
    f"{_OPTIMIZER}.PushDownPredicates",
    f"{_OPTIMIZER}.BooleanSimplification",
    f"{_OPTIMIZER}.EliminateOuterJoin",
    f"{_OPTIMIZER}.PushDownPredicates",
    f"{_OPTIMIZER}.InferFiltersFromConstraints",
    f"{_OPTIMIZER}.PushDownPredicates",
    f"{_OPTIMIZER}.BooleanSimplification",
    f"{_OPTIMIZER}.ColumnPruning",
)
"""Rules of Spark's optimiser on which it depends what a streaming join is: its type, its condition, its columns; and
which rows get as far as the nodes that watch their event time."""


class EqualKeys(NamedTuple):
    """The condition of a join, split.

    Attributes:
        left, right: expressions over the sides that have to be equal, pair by pair.
        rest: the rest of the condition.
        java: the same as JVM objects.
    """

    left: list[Expression]
    right: list[Expression]
    rest: Expression | None
    java: tuple[Any, Any, Any]


def with_settled_joins(catalyst: Catalyst, plan: Node) -> Node:
    """The plan with its joins as Spark's optimiser leaves them, of type, condition and columns.

    What a join of streams does follows from these: predicates above it become part of its condition, columns that
    nobody reads are gone, and a watermark with them.
    """
    java = replaced(catalyst, plan).java
    for rule in _BEFORE_JOINS:
        java = catalyst._class(rule).apply(java)
    return Node(java)


def replaced(catalyst: Catalyst, plan: Node) -> Node:
    """The plan with what Spark replaces at run time (`BETWEEN`) replaced in filters and join conditions."""
    children = [replaced(catalyst, child) for child in plan.children]
    if any(new is not old for new, old in zip(children, plan.children, strict=True)):
        plan = catalyst.with_children(plan, children)
    java = plan.java
    if plan.kind == "Filter":
        old = Expression(java.condition())
        new = _without_replaceables(catalyst, old)
        return plan if new is old else Node(java.copy(new.java, java.child()))
    if plan.kind == "Join" and java.condition().isDefined():
        old = Expression(java.condition().get())
        new = _without_replaceables(catalyst, old)
        condition = catalyst._class("scala.Option").apply(new.java)
        return (
            plan if new is old else Node(java.copy(java.left(), java.right(), java.joinType(), condition, java.hint()))
        )
    return plan


def _without_replaceables(catalyst: Catalyst, expression: Expression) -> Expression:
    if expression.kind == "With":
        if not expression.deterministic:  # it is named in order to be computed once
            return expression
        known = [(java.id(), Expression(java.child())) for java in items(expression.java.defs())]
        body = _inlined(catalyst, Expression(expression.java.child()), known)
        return _without_replaceables(catalyst, body)
    replacement = expression.expression("replacement")
    if replacement is not None:
        return _without_replaceables(catalyst, replacement)
    operands = [_without_replaceables(catalyst, operand) for operand in expression.children]
    if all(new is old for new, old in zip(operands, expression.children, strict=True)):
        return expression
    return catalyst.with_operands(expression, operands)


def _inlined(catalyst: Catalyst, expression: Expression, known: Sequence[tuple[Any, Expression]]) -> Expression:
    if expression.kind == "CommonExpressionRef":
        return next(value for name, value in known if name.equals(expression.java.id()))
    operands = [_inlined(catalyst, operand, known) for operand in expression.children]
    if all(new is old for new, old in zip(operands, expression.children, strict=True)):
        return expression
    return catalyst.with_operands(expression, operands)


def equal_keys(catalyst: Catalyst, join: Node) -> EqualKeys | None:
    """The keys by which a join compares its sides for equality, as Spark takes them out of its condition."""
    found = catalyst._class("org.apache.spark.sql.catalyst.planning.ExtractEquiJoinKeys").unapply(join.java)
    if not found.isDefined():
        return None
    parts = found.get()
    rest = parts._4()
    return EqualKeys(
        [Expression(key) for key in items(parts._2())],
        [Expression(key) for key in items(parts._3())],
        Expression(rest.get()) if rest.isDefined() else None,
        (parts._2(), parts._3(), rest),
    )


def state_watermarks(
    catalyst: Catalyst, join: Node, keys: EqualKeys, watermark_ms: int
) -> tuple[int | None, int | None]:
    """The watermarks (ms) of the state of both sides of a streaming join, given the input's (more than 2³¹)."""
    some = catalyst._class("scala.Option").apply(watermark_ms)
    java = join.java
    arguments = (java.left().output(), java.right().output(), *keys.java, some)
    for name in _JOIN_HELPERS:
        helper = catalyst._class(name)
        for flags in ([False], []):  # whether a side may have several columns of event time
            try:
                both = helper.getStateWatermark(*arguments, *flags)
            except (Py4JError, TypeError) as error:
                if isinstance(error, Py4JError) and "does not exist" not in str(error):
                    raise
                continue
            left, right = both._1(), both._2()
            return (left.get() if left.isDefined() else None), (right.get() if right.isDefined() else None)
    raise UsageError("This version of Spark does not tell state watermarks.", action="Use a tested version.")


def is_before_43(catalyst: Catalyst) -> bool:
    """Whether this is a version before 4.3."""
    return tuple(int(part) for part in catalyst.spark.version.split(".")[:2]) < (4, 3)

"""Conditions and groupings as Spark's own optimiser leaves them; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node, items

_LOCAL = "org.apache.spark.sql.catalyst.plans.logical.LocalRelation"
_OPTIMIZER = "org.apache.spark.sql.catalyst.optimizer"
_SIMPLIFYING = tuple(
    f"{_OPTIMIZER}.{rule}"
    for rule in (
        "NullPropagation",
        "ConstantFolding",
        "BooleanSimplification",
        "SimplifyConditionals",
        "SimplifyBinaryComparison",
        "ReplaceNullWithFalseInPredicate",
    )
)
_SIMPLIFYING_FILTERS = (*_SIMPLIFYING, f"{_OPTIMIZER}.ConstantPropagation")
_UNALIASED = (
    "org.apache.spark.sql.catalyst.analysis.EliminateSubqueryAliases",
    "org.apache.spark.sql.catalyst.analysis.EliminateView",
    f"{_OPTIMIZER}.EliminateResolvedHint",
)
_SETTLING = (
    f"{_OPTIMIZER}.PushDownPredicates",
    f"{_OPTIMIZER}.ReplaceNullWithFalseInPredicate",
    f"{_OPTIMIZER}.BooleanSimplification",
    f"{_OPTIMIZER}.EliminateOuterJoin",
)
_INFERRING = (f"{_OPTIMIZER}.InferFiltersFromGenerate", f"{_OPTIMIZER}.InferFiltersFromConstraints")
_EXTRA = (f"{_OPTIMIZER}.PushExtraPredicateThroughJoin", f"{_OPTIMIZER}.PushDownPredicates")
_PRUNING = (f"{_OPTIMIZER}.ColumnPruning",)
_REPLACING = (f"{_OPTIMIZER}.ReplaceDistinctWithAggregate",)
_REPETITION = (f"{_OPTIMIZER}.RemoveRepetitionFromGroupExpressions",)
_MOST_PASSES = 100
"""As `spark.sql.optimizer.maxIterations`."""


def with_settled_conditions(catalyst: Catalyst, plan: Node, *, pruned: bool) -> Node:
    """The plan with its conditions where Spark's optimiser puts them, and its joins as it leaves them.

    Where a condition stands decides which rows get as far as the nodes that watch their event time, and so what is
    late: natively, a filter above an aggregate that asks for one key stands below the watermark. What a join of streams
    does follows from its type, condition and columns: predicates above it become part of its condition, columns that
    nobody reads are gone, and a watermark with them.

    Args:
        catalyst: of the query's session. plan: with plain conditions.
        pruned: whether columns that nobody reads go.
    """
    java = _applied(catalyst, _UNALIASED, plan.java)
    java = _applied(catalyst, _SETTLING, java, _MOST_PASSES)
    java = _applied(catalyst, _INFERRING, java)
    java = _applied(catalyst, _SETTLING, java, _MOST_PASSES)
    java = _applied(catalyst, _EXTRA, java, _MOST_PASSES)
    return Node(_applied(catalyst, _PRUNING, java) if pruned else java)


def pruned_deduplications(catalyst: Catalyst, plan: Node) -> list[frozenset[int]]:
    """Identities of the columns that each `Deduplicate` of a plan has once nobody's are gone, in the order of the walk.

    The plan in which they are gone is only looked at (see `windows.needed_columns`).

    Args:
        catalyst: of the query's session. plan: with its conditions settled.
    """
    java = _applied(catalyst, (*_UNALIASED, *_REPLACING), plan.java)
    java = _applied(catalyst, _PRUNING, java, _MOST_PASSES)
    found = [node for node in Node(java).walk() if node.kind == "Deduplicate"]
    return [frozenset(column.expr_id for column in node.output) for node in found]


def without_repeated_groupings(catalyst: Catalyst, plan: Node) -> Node:
    """The plan with what its aggregates group by twice, as one window under two names, grouped by once."""
    java = _applied(catalyst, _REPETITION, plan.java)
    return plan if java.fastEquals(plan.java) else Node(java)


def _applied(catalyst: Catalyst, rules: Sequence[str], java: Any, passes: int = 1) -> Any:
    """Apply rules in turn, for so many passes or until nothing changes."""
    objects = [catalyst._class(rule) for rule in rules]
    for _ in range(passes):
        before = java
        for rule in objects:
            java = rule.apply(java)
        if java.fastEquals(before):
            break
    return java


def with_plain_conditions(catalyst: Catalyst, plan: Node) -> Node:
    """The plan with filters and join conditions as simple as Spark's optimiser makes them.

    What Spark replaces at run time (`BETWEEN`) is replaced. Nothing but conditions is touched: how windows of event
    time are assigned is read from the plan as the analyser made it.
    """
    children = [with_plain_conditions(catalyst, child) for child in plan.children]
    if any(new is not old for new, old in zip(children, plan.children, strict=True)):
        plan = catalyst.with_children(plan, children)
    java = plan.java
    if plan.kind == "Filter":
        old = Expression(java.condition())
        new = _simplified(catalyst, without_replaceables(catalyst, old), plan, _SIMPLIFYING_FILTERS)
        return plan if new is old else Node(java.copy(new.java, java.child()))
    if plan.kind == "Join" and java.condition().isDefined():
        old = Expression(java.condition().get())
        new = _simplified(catalyst, without_replaceables(catalyst, old), plan, _SIMPLIFYING)
        condition = catalyst._class("scala.Option").apply(new.java)
        return (
            plan if new is old else Node(java.copy(java.left(), java.right(), java.joinType(), condition, java.hint()))
        )
    return plan


def _simplified(catalyst: Catalyst, condition: Expression, node: Node, rules: Sequence[str]) -> Expression:
    """A condition of a node as rules leave it when it filters rows with the columns of the node's children."""
    columns = catalyst._seq([column.java for child in node.children for column in child.output])
    nothing = catalyst._class(_LOCAL)(columns, catalyst._seq([]), False, catalyst._class("scala.Option").empty())
    alone = catalyst.filter(condition, Node(nothing)).java
    try:
        found = Expression(_applied(catalyst, rules, alone, _MOST_PASSES).condition())
    except (Py4JJavaError, PySparkException):  # what has no value yet, as the current time
        return condition
    return condition if found.java.fastEquals(condition.java) else found


def without_replaceables(catalyst: Catalyst, expression: Expression) -> Expression:
    """An expression with what Spark replaces at run time (`BETWEEN`) replaced."""
    if expression.kind == "With":
        if not expression.deterministic:  # it is named in order to be computed once
            return expression
        known = [(java.id(), Expression(java.child())) for java in items(expression.java.defs())]
        body = _inlined(catalyst, Expression(expression.java.child()), known)
        return without_replaceables(catalyst, body)
    replacement = expression.expression("replacement")
    if replacement is not None:
        return without_replaceables(catalyst, replacement)
    operands = [without_replaceables(catalyst, operand) for operand in expression.children]
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

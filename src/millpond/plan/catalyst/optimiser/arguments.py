"""Arguments of aggregate functions with a filter, which Spark evaluates only for the rows that pass it."""

from __future__ import annotations

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node

_READ_ONLY = ("AttributeReference", "GetStructField")
"""Kinds of arguments that cannot fail."""


def with_guarded_arguments(catalyst: Catalyst, plan: Node) -> Node:
    """Return the plan with null in place of each computed argument for the rows that its call's filter drops.

    An operator's arguments are projected below the exchange, its filters applied above. In ANSI mode, `sum(100 / v)
    FILTER (WHERE v <> 0)` would fail at the first zero.
    """
    plan = catalyst.with_children(plan, [with_guarded_arguments(catalyst, child) for child in plan.children])
    if plan.kind != "Aggregate" or not plan.streaming:
        return plan
    results = plan.list("aggregateExpressions")
    guarded = [_guarded(catalyst, result) for result in results]
    if all(new is old for new, old in zip(guarded, results, strict=True)):
        return plan
    return catalyst.aggregate(plan, guarded)


def _guarded(catalyst: Catalyst, expression: Expression) -> Expression:
    if expression.kind != "AggregateExpression":
        return catalyst.with_operands(expression, [_guarded(catalyst, child) for child in expression.children])
    function, *filters = expression.children
    if not filters:
        return expression
    return catalyst.with_operands(expression, [_guarded_call(catalyst, function, filters[0]), *filters])


def _guarded_call(catalyst: Catalyst, function: Expression, condition: Expression) -> Expression:
    """Guard the arguments of a function, of the one that replaces it, and of its sort orders.

    An argument of `listagg` that is its own sort order stays equal to it.
    """
    operands = [
        _guarded_call(catalyst, operand, condition)
        if operand.kind == "SortOrder" or catalyst.is_aggregate_function(operand)
        else operand
        if operand.kind in _READ_ONLY or operand.foldable
        else catalyst.conditional(condition, operand)
        for operand in function.children
    ]
    return catalyst.with_operands(function, operands)

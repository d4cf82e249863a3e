"""Arguments of aggregate functions with a filter, which Spark evaluates only for the rows that pass it."""

from __future__ import annotations

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node

_CANNOT_FAIL = frozenset(
    {
        *("AttributeReference", "Literal", "GetStructField", "CreateNamedStruct", "Alias", "KnownNotNull"),
        *("And", "Or", "Not", "IsNull", "IsNotNull", "IsNaN", "EqualTo", "EqualNullSafe", "LessThan"),
        *("LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "In", "InSet", "If", "CaseWhen", "Coalesce"),
        *("Greatest", "Least", "Upper", "Lower", "Length", "Concat", "StringTrim", "StartsWith", "Contains"),
        *("Year", "Month", "DayOfMonth", "Hour", "Minute", "Second", "Murmur3Hash", "XxHash64"),
    }
)
"""Kinds of expressions that have a value, or null, for every row."""


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
    return catalyst.with_operands(
        function, [_guarded_operand(catalyst, operand, condition) for operand in function.children]
    )


def _guarded_operand(catalyst: Catalyst, operand: Expression, condition: Expression) -> Expression:
    if operand.kind == "SortOrder" or catalyst.is_aggregate_function(operand):
        return _guarded_call(catalyst, operand, condition)
    if operand.foldable or all(part.kind in _CANNOT_FAIL for part in operand.walk()):
        return operand  # calls with different filters share its column
    return catalyst.conditional(condition, operand)

"""Filters and join conditions without what Spark replaces at run time; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.plan.catalyst import Catalyst, Expression, Node, items


def with_plain_conditions(catalyst: Catalyst, plan: Node) -> Node:
    """The plan with what Spark replaces at run time (`BETWEEN`) replaced in filters and join conditions."""
    children = [with_plain_conditions(catalyst, child) for child in plan.children]
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

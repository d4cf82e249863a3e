"""Stability of expressions: whether a row gets the same value in another batch.

Spark evaluates an expression once per row. An expression between two operators where rows change is evaluated again for
a row's old version, batches later. One in the condition of an outer join is evaluated before the row has a partner. So
they may depend on the row alone: not on the clock, the session or a table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.text import Cut, constant_rows, constant_string, readable, subquery, walk

_LEAVES = frozenset(
    {
        *("AttributeReference", "Literal", "NamedLambdaVariable", "CommonExpressionRef", "OuterReference"),
        *("VariableReference", "ResolvedCollation", "Pi", "EulerNumber"),
        # analysed separately, or declared stable by the user
        *("PythonUDF", "ScalaUDF", "ScalarSubquery", "ListQuery", "Exists"),
        *("CreateArray", "CreateMap", "CreateNamedStruct", "Concat"),  # without operands
    }
)
"""Expressions without operands that never change; any other may read the clock, the session or the machine."""

_CONSTANT_PLANS = frozenset({"Project", "Filter", "SubqueryAlias", "View", "Distinct", "Aggregate", "Union"})
"""Nodes whose rows are constant if the rows below are."""

_SPECIAL_DATE = re.compile(r"\s*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Strings that Spark's constant cast reads as a time of the current day."""

_TIME_OF_DAY = re.compile(r"\s*T?\d{1,2}:", re.IGNORECASE)
"""Strings that a cast to timestamp reads as a time of the current day, e.g. `9:00` and `T09:00`."""

_TIME_TYPE = re.compile(r"time\b")
"""Spark's type `TIME`, but not `TIMESTAMP`."""


def unstable_part(expressions: Sequence[Expression], cut: Cut = lambda _: None) -> str | None:
    """Return an expression whose value for the same row may differ later; None if there is none.

    A user function's own declaration (`asNondeterministic`) is trusted.

    Args:
        expressions: expressions with resolved columns.
        cut: returns a text for expressions not to look into.
    """
    return next(
        (reason for expression in walk(expressions, cut) if (reason := _unstable(expression)) is not None), None
    )


def _unstable(expression: Expression) -> str | None:
    if expression.kind == "AttributeReference":
        return None
    plan = subquery(expression)
    if plan is not None:
        return _unstable_plan(plan)
    if not expression.children and expression.kind not in _LEAVES:
        return readable(expression)
    # Operands pass their nondeterminism on; the innermost such expression is the one to name.
    if not expression.deterministic and all(child.deterministic for child in expression.children):
        return readable(expression)
    # It has an operand, its precision, so the check of expressions without operands does not find it.
    if expression.kind == "CurrentTime":
        return readable(expression)
    if expression.kind == "AesEncrypt" and _has_random_vector(expression.children[4]):
        return f"{readable(expression)}, which draws a random vector"
    return readable(expression) if is_special_time(expression) else None


def is_special_time(expression: Expression) -> bool:
    """Whether an expression makes a date or timestamp of the current day.

    It does so from a constant string (`'today'`, `'09:00'`), or by a cast of a `TIME`.
    """
    if not expression.type.startswith(("date", "timestamp")):
        return False
    is_cast = expression.kind == "Cast"
    if is_cast and _TIME_TYPE.match(expression.children[0].type):
        return True
    values = [value for child in expression.children if (value := constant_string(child)) is not None]
    return any(_SPECIAL_DATE.match(value) or (is_cast and _TIME_OF_DAY.match(value)) for value in values)


def _has_random_vector(vector: Expression) -> bool:
    """Whether an initialisation vector is random: it is empty, or not constant."""
    if not vector.foldable:
        return True
    value = vector.constant_or_none
    return value is None or len(value) == 0


def _unstable_plan(plan: Node) -> str | None:
    """Describe the part of a subquery whose rows may differ from batch to batch; None if there is none."""
    for node in plan.walk():
        if not node.children:
            if constant_rows(node) is None:
                columns = ", ".join(column.name for column in node.output)
                return f"a subquery over a table that may change (with columns {columns})"
        elif node.kind not in _CONSTANT_PLANS:
            return f"a subquery with {node.kind}"
        reason = unstable_part(node.expressions)
        if reason is not None:
            return f"{reason} in a subquery"
    return None

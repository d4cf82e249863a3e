"""Whether expressions give the same for a row when it is taken back, batches later, as when it was given out.

Natively each batch evaluates an expression once for a row. What stands between two operators where rows change is
evaluated again for a row's old image. So it may look at nothing but the row: not at the clock, the session, a table.
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
        *("PythonUDF", "ScalaUDF", "ScalarSubquery", "ListQuery", "Exists"),  # looked at apart, or the user's word
        *("CreateArray", "CreateMap", "CreateNamedStruct", "Concat"),  # of nothing
    }
)
"""Expressions over nothing that are the same at all times. Any other may ask the clock, the session or the machine."""

_CONSTANT_PLANS = frozenset({"Project", "Filter", "SubqueryAlias", "View", "Distinct", "Aggregate", "Union"})
"""Nodes over constant rows whose rows are constant."""

_MOMENT = re.compile(r"\s*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Strings that Spark reads as a time of the current day when it casts a constant."""


def unstable(expressions: Sequence[Expression], cut: Cut = lambda _: None) -> str | None:
    """What among expressions may give something else for the same row later; None if nothing does.

    What functions of the user say of themselves (`asNondeterministic`) is believed.

    Args:
        expressions: with columns resolved. cut: says what not to look into.
    """
    return next((said for one in walk(expressions, cut) if (said := _unstable(one)) is not None), None)


def _unstable(expression: Expression) -> str | None:
    if expression.kind == "AttributeReference":
        return None
    plan = subquery(expression)
    if plan is not None:
        return _unstable_plan(plan)
    if not expression.children and expression.kind not in _LEAVES:
        return readable(expression)
    if not expression.deterministic and all(child.deterministic for child in expression.children):
        return readable(expression)
    if expression.kind == "CurrentTime":
        return readable(expression)
    if expression.kind == "AesEncrypt" and _random_vector(expression.children[4]):
        return f"{readable(expression)}, which draws a random vector"
    if expression.type.startswith(("date", "timestamp")):
        for child in expression.children:
            value = constant_string(child)
            if value is not None and _MOMENT.match(value):
                return readable(expression)
    return None


def _random_vector(vector: Expression) -> bool:
    """Whether an initialisation vector is left to chance: it is empty, or only known per row."""
    if not vector.foldable:
        return True
    value = vector.known
    return value is None or len(value) == 0


def _unstable_plan(plan: Node) -> str | None:
    """What may differ from batch to batch in the rows of a subquery."""
    for node in plan.walk():
        if not node.children:
            if constant_rows(node) is None:
                columns = ", ".join(column.name for column in node.output)
                return f"a subquery over a table that may change (with columns {columns})"
        elif node.kind not in _CONSTANT_PLANS:
            return f"a subquery with {node.kind}"
        said = unstable(node.expressions)
        if said is not None:
            return f"{said} in a subquery"
    return None

"""Columns that only Spark's optimiser finds to be an event time."""

from __future__ import annotations

from collections.abc import Collection

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import WATERMARK_DELAY, Expression, Node
from millpond.plan.catalyst.optimiser.conditions import no_rows
from millpond.plan.catalyst.optimiser.rules import MAX_PASSES, OPTIMIZER, apply_rules

_RULES = tuple(
    f"{OPTIMIZER}.{rule}"
    for rule in ("ReplaceExpressions", "SimplifyCasts", "NullPropagation", "ConstantFolding", "SimplifyConditionals")
)


def hidden_times(catalyst: Catalyst, plan: Node) -> frozenset[int]:
    """Return the identities of columns that get their watermark from Spark's optimiser.

    In `to_timestamp(ts)` of a timestamp, it removes the cast, and what is left is the column with its watermark. Rows
    are then late by it, which the analysed plan does not show.
    """
    if not any(node.kind == "EventTimeWatermark" for node in plan.walk()):
        return frozenset()
    hidden: set[int] = set()
    for node in reversed(list(plan.walk())):
        for result in node.list("projectList") if node.kind == "Project" else []:
            if result.kind == "Alias" and _becomes_event_time(catalyst, result, node, hidden):
                hidden.add(result.expr_id)
    return frozenset(hidden)


def _becomes_event_time(catalyst: Catalyst, result: Expression, project: Node, hidden: set[int]) -> bool:
    source = result.children[0]
    if source.kind == "AttributeReference":
        return source.expr_id in hidden
    if not result.type.startswith("timestamp") or WATERMARK_DELAY in result.metadata:
        return False
    marked = any(WATERMARK_DELAY in part.metadata or _is_hidden(part, hidden) for part in source.walk())
    return marked and _simplifies_to_time(catalyst, result, project, hidden)


def _is_hidden(expression: Expression, hidden: Collection[int]) -> bool:
    return expression.kind == "AttributeReference" and expression.expr_id in hidden


def _simplifies_to_time(catalyst: Catalyst, result: Expression, project: Node, hidden: Collection[int]) -> bool:
    """Whether a projection's result is a column or field with a watermark, once Spark has simplified it."""
    alone = catalyst.project([result], no_rows(catalyst, project.children))
    try:
        simplified = Node(apply_rules(catalyst, _RULES, alone.java, MAX_PASSES)).list("projectList")[0]
    except (Py4JJavaError, PySparkException):  # a constant that fails, or a clock, which has no value here
        return False
    # An alias has the metadata of a column or field that it names, and of nothing else.
    return WATERMARK_DELAY in simplified.metadata or any(_is_hidden(child, hidden) for child in simplified.children)

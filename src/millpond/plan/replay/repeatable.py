"""Repeatability: whether a batch can be run again with the same rows, as recovery with async commits needs."""

from __future__ import annotations

from collections.abc import Container

from millpond.plan.catalyst.lookups import is_lookup_join, why_not_repeatable
from millpond.plan.catalyst.nodes import BATCH_TIMES, CLOCKS, Expression, Node
from millpond.plan.catalyst.stable import is_special_time
from millpond.plan.catalyst.text import readable, subquery
from millpond.plan.decision.decision import Decided, Decision
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.processor import ProcessorReading

_FILES = frozenset({"parquet", "orc", "json", "csv", "text", "avro", "xml", "binaryfile", "delta"})
_REPLAYABLE_SOURCES = _FILES | {"kafka", "rate", "rate-micro-batch"}
"""Sources that return the same rows for the same offsets as long as their data is kept."""

_CONSTANT_RELATIONS = frozenset({"LocalRelation", "Range", "OneRowRelation"})
"""Batch relations that cannot change."""


def needs_sync(decision: Decision) -> str | None:
    """Return as a clause why commits of this query may not lag; None if they may.

    A replayed batch may have other rows with a source that drops data after Spark's commit. The same holds for a
    nondeterministic plan, and for a mutable batch table below a Millpond operator.
    """
    if any(isinstance(operator.reading, ProcessorReading) for operator in decision.on_millpond):
        return (
            "a processor of the user may do something else when rows come in another order"
            " (if it does not mind, set spark.millpond.commit.mode=async)"
        )
    return _search(decision.root, below=False)


def _search(decided: Decided, *, below: bool) -> str | None:
    node = decided.node
    if below:
        reason = _why_not_replayable(node)
        if reason is not None:
            return reason
        if is_lookup_join(node):
            return why_not_repeatable(node)
    # Above the topmost operator, a repeated batch may compute other rows, but never other state.
    below = below or (decided.operator is not None and decided.operator.spec is not None)
    for expression in _computed(node, decided) if below else ():
        if not expression.deterministic:
            return f"'{node.kind}' below a stateful operator computes something that is not deterministic"
        reason = _why_not_repeated(expression, BATCH_TIMES)
        if reason is not None:
            return reason
    return next((reason for child in decided.children if (reason := _search(child, below=below))), None)


def _why_not_repeated(expression: Expression, logged: Container[str]) -> str | None:
    """Return as a clause why an expression may have another value in a repeated batch.

    Args:
        expression: a deterministic one.
        logged: expressions of the clock that have the time of the batch; in subqueries, none has.
    """
    for part in expression.walk():
        if (part.kind in CLOCKS and part.kind not in logged) or (part.kind == "Cast" and is_special_time(part)):
            return f"{readable(part)} below a stateful operator reads the clock, whose time no batch logs"
        plan = subquery(part)
        for node in plan.walk() if plan else ():
            reason = _why_not_replayable(node) or next(
                (reason for inner in node.expressions if (reason := _why_not_repeated(inner, ()))), None
            )
            if reason is not None:
                return reason
    return None


def _computed(node: Node, decided: Decided) -> list[Expression]:
    # Aggregate functions such as `first` declare themselves nondeterministic; only their inputs matter.
    if decided.operator is None or decided.operator.reading is None:
        return node.expressions
    reading = decided.operator.reading
    if isinstance(reading, JoinReading):
        return [e for side in (reading.left, reading.right) for e in (*side.keys, *side.values, *side.match_conditions)]
    return reading.raw


def _why_not_replayable(node: Node) -> str | None:
    if node.children:
        return "a sample differs from run to run" if node.kind == "Sample" else None
    if node.kind.startswith("StreamingRelation"):
        source = node.source.rpartition(".")[2].lower()
        if source not in _REPLAYABLE_SOURCES:
            return f"the source '{node.source}' may not give the rows of a finished batch again"
        if node.source_options.get("cleansource", "off").lower() != "off":
            return "the file source removes finished files (cleanSource)"
        return None
    if node.streaming:
        return f"the source '{node}' may not give the rows of a finished batch again"
    if node.kind in _CONSTANT_RELATIONS:
        return None
    columns = ", ".join(column.name for column in node.output)
    return f"the batch table with columns {columns} may change (if it does not, set spark.millpond.commit.mode=async)"

"""Column usage of `Window` nodes, from Spark's own optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node

Needed = Mapping[int, frozenset[int]]
"""Identity of a `Window` node's result → identities of columns below that the node, or a node above, uses."""

_UNALIASED = (
    "org.apache.spark.sql.catalyst.analysis.EliminateSubqueryAliases",
    "org.apache.spark.sql.catalyst.analysis.EliminateView",
)
_PRUNING = "org.apache.spark.sql.catalyst.optimizer.ColumnPruning"
_MAX_PASSES = 10
"""Enough passes for realistic plans; columns that a further pass would prune are kept, which is correct."""


def needed_columns(catalyst: Catalyst, plan: Node) -> dict[int, frozenset[int]]:
    """Return the columns below each `Window` node that are used, by Spark's column pruning.

    The pruned plan is only read: used further, it would hide how other operators' event-time windows are assigned. A
    window without any used result is missing from the answer.
    """
    java = plan.java
    for rule in _UNALIASED:
        java = catalyst._class(rule).apply(java)
    pruning = catalyst._class(_PRUNING)
    for _ in range(_MAX_PASSES):  # one pass stops where it removes a result
        java, before = pruning.apply(java), java
        if java.fastEquals(before):
            break
    below = {result.expr_id: {c.expr_id for c in node.children[0].output} for node, result in _results(plan)}
    needed: dict[int, frozenset[int]] = {}
    for node, result in _results(Node(java)):
        columns = _sources(node.children[0], below[result.expr_id])
        # a window that is inlined twice has one identity
        needed[result.expr_id] = needed.get(result.expr_id, frozenset()) | columns
    return needed


def _results(plan: Node) -> Iterator[tuple[Node, Expression]]:
    for node in plan.walk():
        if node.kind == "Window":
            yield from ((node, result) for result in node.list("windowExpressions"))


def _sources(pruned: Node, known: set[int]) -> frozenset[int]:
    """Return the known columns from which a pruned plan's output is computed; of a struct, single fields may remain.

    If the origin of a column cannot be determined, all known columns are returned.
    """
    computed: dict[int, list[int]] = {}
    for node in pruned.walk():
        for result in node.list("projectList") if node.kind == "Project" else []:
            if result.kind == "Alias":
                computed[result.expr_id] = [part.expr_id for part in result.walk() if part.kind == "AttributeReference"]
    sources: set[int] = set()
    pending = [column.expr_id for column in pruned.output]
    while pending:
        column = pending.pop()
        if column not in known and column not in computed:
            return frozenset(known)
        if column in known:
            sources.add(column)
        else:
            pending += computed[column]
    return frozenset(sources)

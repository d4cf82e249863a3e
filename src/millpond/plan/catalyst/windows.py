"""What reading `Window` nodes asks of Spark's own optimiser; beside `catalyst`, what touches JVM objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node

Needed = Mapping[int, frozenset[int]]
"""Identities of results of `Window` nodes → those of the columns below that are used, by the node or above it."""

_UNALIASED = (
    "org.apache.spark.sql.catalyst.analysis.EliminateSubqueryAliases",
    "org.apache.spark.sql.catalyst.analysis.EliminateView",
)
_PRUNING = "org.apache.spark.sql.catalyst.optimizer.ColumnPruning"
_PASSES = 10
"""Enough for plans that people write; what a further pass would find is carried."""


def needed_columns(catalyst: Catalyst, plan: Node) -> dict[int, frozenset[int]]:
    """Which columns below each `Window` node are used, as Spark's optimiser would find.

    The plan that it makes is only looked at: pruned as a whole, it would hide from other operators how their windows of
    event time are assigned. Windows none of whose results are used are not among the answers.
    """
    java = plan.java
    for rule in _UNALIASED:
        java = catalyst._class(rule).apply(java)
    pruning = catalyst._class(_PRUNING)
    for _ in range(_PASSES):  # one pass stops where it takes a result away
        java, before = pruning.apply(java), java
        if java.fastEquals(before):
            break
    below = {one.expr_id: {c.expr_id for c in node.children[0].output} for node, one in _results(plan)}
    needed: dict[int, frozenset[int]] = {}
    for node, result in _results(Node(java)):
        columns = _sources(node.children[0], below[result.expr_id])
        needed[result.expr_id] = needed.get(result.expr_id, frozenset()) | columns  # inlined twice, it has one identity
    return needed


def _results(plan: Node) -> Iterator[tuple[Node, Expression]]:
    for node in plan.walk():
        if node.kind == "Window":
            yield from ((node, result) for result in node.list("windowExpressions"))


def _sources(pruned: Node, known: set[int]) -> frozenset[int]:
    """The known columns that a pruned plan's output consists of: of a struct, it may have single fields.

    If that cannot be told of one of them, it may be any.
    """
    computed: dict[int, list[int]] = {}
    for node in pruned.walk():
        for one in node.list("projectList") if node.kind == "Project" else []:
            if one.kind == "Alias":
                computed[one.expr_id] = [part.expr_id for part in one.walk() if part.kind == "AttributeReference"]
    sources: set[int] = set()
    waiting = [column.expr_id for column in pruned.output]
    while waiting:
        column = waiting.pop()
        if column not in known and column not in computed:
            return frozenset(known)
        if column in known:
            sources.add(column)
        else:
            waiting += computed[column]
    return frozenset(sources)

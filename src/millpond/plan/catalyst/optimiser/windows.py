"""Column usage of `Window` nodes, from Spark's own optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.catalyst.optimiser.rules import ELIMINATE_ALIASES, MAX_PASSES, PRUNE_COLUMNS, apply_rules

Needed = Mapping[int, frozenset[int]]
"""Identity of a `Window` node's result → identities of columns below that the node, or a node above, uses."""


def needed_columns(catalyst: Catalyst, plan: Node) -> dict[int, frozenset[int]]:
    """Return the columns below each `Window` node that are used, by Spark's column pruning.

    The pruned plan is only read: used further, it would hide how other operators' event-time windows are assigned. A
    window without any used result is missing from the answer.
    """
    java = apply_rules(catalyst, ELIMINATE_ALIASES, plan.java)
    # One pass stops where it removes a result.
    java = apply_rules(catalyst, PRUNE_COLUMNS, java, MAX_PASSES)
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

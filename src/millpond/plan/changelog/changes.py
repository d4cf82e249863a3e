"""Where rows change after they were given out, and how their changes reach the operator above (docs/changes.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millpond.plan.catalyst.nodes import Expression
from millpond.plan.reading.decision import Decided, Operator
from millpond.plan.reading.ranking import conjuncts, lets_pass
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.union import OperatorSpec

THROUGH = frozenset({"Project", "Filter", "SubqueryAlias", "View"})
"""Nodes through which changes travel: each row on its own."""


def changing(decided: Decided) -> OperatorSpec | None:
    """The operator, by its spec, whose changes come out of a plan; None if none do.

    Raises:
        Unsupported: they would have to pass a node that cannot let them pass.
    """
    found = decided
    while found.operator is None and found.node.kind in THROUGH:
        (found,) = found.children
    if found.operator is not None and found.operator.spec is not None:
        _emits(found.operator)
        return found.operator.spec if found.operator.spec.updates else None
    if any(_updates(operator) for operator in found.operators()):
        raise Unsupported(Reason("MP-CHANGES", found.node.kind))
    return None


def consuming(spec: OperatorSpec) -> OperatorSpec:
    """The operator over an input that is a changelog.

    Raises:
        Unsupported: it cannot take rows back.
    """
    found = spec.consuming()
    if isinstance(found, str):
        raise Unsupported(Reason("MP-RETRACT", found))
    return found


def updating(decided: Decided) -> bool:
    """Whether what comes out of a plan may change later."""
    if decided.operator is not None:
        return _updates(decided.operator)
    return any(updating(child) for child in decided.children)


def leave_updating(decided: Decided) -> Decided:
    """Leave to Spark what emits a key's updates below an operator that Spark keeps: it would count them as new rows."""
    return decided.with_ours(lambda one: one.left(Reason("MP-ABOVE")) if _updates(one) else one)


def _updates(operator: Operator) -> bool:
    return operator.spec is not None and operator.spec.updates


def emitting(decided: Decided) -> Decided:
    """The same plan with the changes of its topmost operator coming out.

    Raises:
        Unsupported: they stay in.
    """
    return _topmost(decided, _emits)


def _emits(operator: Operator) -> Operator:
    if operator.spec is None:
        return operator
    found = operator.spec.emitting()
    if isinstance(found, str):
        raise Unsupported(Reason("MP-CHANGES", found))
    return replace(operator, spec=found)


def _topmost(decided: Decided, change: Callable[[Operator], Operator]) -> Decided:
    if decided.operator is not None:
        return replace(decided, operator=change(decided.operator))
    return replace(decided, children=tuple(_topmost(child, change) for child in decided.children))


def filtered(decided: Decided) -> bool:
    """Whether images of the topmost operator may be left out one by one: a filter stands above it.

    The filter that bounds the ranks of a top-N lets all that comes out of it pass.
    """
    found = decided
    while found.operator is None:
        if found.node.kind == "Filter" and not _bounds_only(found):
            return True
        (found,) = found.children
    return False


def _bounds_only(decided: Decided) -> bool:
    below = decided
    projections = []
    while below.operator is None and below.node.kind in THROUGH:
        projections += [below.node] if below.node.kind == "Project" else []
        (below,) = below.children
    spec = below.operator.spec if below.operator is not None else None
    if not isinstance(spec, RankSpec):
        return False
    ranks = {below.node.list("windowExpressions")[0].expr_id}
    for projection in reversed(projections):  # what the rank is called where it is filtered
        ranks |= {one.expr_id for one in projection.list("projectList") if _names(one, ranks)}
    parts = conjuncts(decided.node.expression("condition"))
    return all(any(lets_pass(part, rank, spec.limit) for rank in ranks) for part in parts)


def _names(result: Expression, columns: set[int]) -> bool:
    """Whether it is one of these columns under another name."""
    if result.kind != "Alias":
        return False
    (source,) = result.children
    return source.kind == "AttributeReference" and source.expr_id in columns

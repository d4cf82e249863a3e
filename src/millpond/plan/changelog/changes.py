"""Placement of changelogs: where emitted rows change, and how changes reach the operator above (docs/changes.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millpond.plan.catalyst.nodes import Expression
from millpond.plan.reading.decision import Decided, Operator
from millpond.plan.reading.ranking import conjuncts, lets_pass
from millpond.plan.reading.reasons import Reason, Unsupported
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.protocol import ChangelogError

CHANGE_COLUMN = "_op"
"""The column with the kind of each change, where a query shows its changes."""

_TRANSPARENT_NODES = frozenset({"Project", "Filter", "SubqueryAlias", "View"})
"""Nodes through which a changelog passes, each row by itself."""


def changelog_source(decided: Decided) -> OperatorSpec | None:
    """Return the spec of the operator whose changes a plan emits; None if its rows never change.

    Raises:
        Unsupported: the changes would have to pass a node that cannot pass them on.
    """
    below = decided
    while below.operator is None and below.node.kind in _TRANSPARENT_NODES:
        (below,) = below.children
    if below.operator is not None and below.operator.spec is not None:
        # Called for its check only: it raises if the operator cannot produce a changelog.
        _with_changelog(below.operator)
        return below.operator.spec if below.operator.spec.emits_updates else None
    if any(_emits_updates(operator) for operator in below.operators()):
        raise Unsupported(Reason("MP-CHANGES", below.node.kind))
    return None


def refuse_updates_of_spark(decided: Decided, output_mode: str) -> None:
    """Refuse a plan whose rows change, but come from an aggregate that stays on Spark.

    Spark emits new versions of rows without the old ones, or in complete mode all rows again.

    Raises:
        Unsupported: an operator above would count each of them.
    """
    operator = decided.operator
    if operator is None or (operator.spec is not None and not operator.spec.facts.stateful):
        for child in decided.children:
            refuse_updates_of_spark(child, output_mode)
    elif operator.spec is None and decided.node.kind in ("Aggregate", "Distinct") and output_mode != "append":
        raise Unsupported(Reason("MP-BELOW", operator.title))


def over_changelog(spec: OperatorSpec) -> OperatorSpec:
    """Return the operator's spec over a changelog as input.

    Raises:
        Unsupported: it cannot retract rows.
    """
    try:
        return spec.consume_changelog()
    except ChangelogError as error:
        raise Unsupported(Reason("MP-RETRACT", str(error))) from error


def emits_updates(decided: Decided) -> bool:
    """Whether rows emitted by a plan may change later."""
    if decided.operator is not None:
        return _emits_updates(decided.operator)
    return any(emits_updates(child) for child in decided.children)


def leave_updates_to_spark(decided: Decided) -> Decided:
    """Leave operators that emit updates to Spark, below an operator of Spark's that would count them as new rows."""
    return decided.with_ours(
        lambda operator: operator.left_to_spark(Reason("MP-ABOVE")) if _emits_updates(operator) else operator
    )


def _emits_updates(operator: Operator) -> bool:
    return operator.spec is not None and operator.spec.emits_updates


def with_changelog_output(decided: Decided) -> Decided:
    """Return the plan with a changelog as output of its topmost operator.

    Raises:
        Unsupported: the operator cannot emit its changes.
    """
    # Operators further down produce changelogs for their own consumers, which were decided before this one.
    return _topmost(decided, _with_changelog)


def _with_changelog(operator: Operator) -> Operator:
    if operator.spec is None:
        return operator
    try:
        return replace(operator, spec=operator.spec.produce_changelog())
    except ChangelogError as error:
        raise Unsupported(Reason("MP-CHANGES", str(error))) from error


def _topmost(decided: Decided, change: Callable[[Operator], Operator]) -> Decided:
    if decided.operator is not None:
        return replace(decided, operator=change(decided.operator))
    return replace(decided, children=tuple(_topmost(child, change) for child in decided.children))


def may_split_updates(decided: Decided) -> bool:
    """Whether a filter above the topmost operator may drop one row of an update and keep the other.

    The filter that bounds the ranks of a top-N keeps the operator's whole output.
    """
    below = decided
    while below.operator is None:
        if below.node.kind == "Filter" and not _bounds_rank_only(below):
            return True
        (below,) = below.children
    return False


def _bounds_rank_only(decided: Decided) -> bool:
    below = decided
    projections = []
    while below.operator is None and below.node.kind in _TRANSPARENT_NODES:
        projections += [below.node] if below.node.kind == "Project" else []
        (below,) = below.children
    spec = below.operator.spec if below.operator is not None else None
    if not isinstance(spec, RankSpec):
        return False
    ranks = {below.node.list("windowExpressions")[0].expr_id}
    for projection in reversed(projections):  # the rank may be renamed below the filter
        ranks |= {result.expr_id for result in projection.list("projectList") if _renames(result, ranks)}
    parts = conjuncts(decided.node.expression("condition"))
    return all(any(lets_pass(part, rank, spec.limit) for rank in ranks) for part in parts)


def _renames(result: Expression, columns: set[int]) -> bool:
    """Whether a result is one of these columns under another name."""
    if result.kind != "Alias":
        return False
    (source,) = result.children
    return source.kind == "AttributeReference" and source.expr_id in columns

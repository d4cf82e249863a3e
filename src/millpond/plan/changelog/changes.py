"""Placement of changelogs: where emitted rows change, and how changes reach the operator above.

See docs/architecture/11-changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from millpond.errors import UnsupportedError
from millpond.plan.catalyst.nodes import Expression, Node
from millpond.plan.changelog.between import unstable_between
from millpond.plan.decision.decision import Decided, Operator
from millpond.plan.reading.ranking import lets_pass
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


def with_changelog_inputs(
    operator: Operator, children: tuple[Decided, ...], output_mode: str, unstable: Callable[[], str | None]
) -> tuple[Operator, tuple[Decided, ...]]:
    """Return an operator over changelogs where rows below change, and the plans below that produce them.

    Args:
        operator: an operator, here or on Spark.
        children: the plans below.
        output_mode: `append`, `update` or `complete`.
        unstable: returns an expression between two operators that may give a retracted row another value, or None.

    Returns:
        The operator and the plans below. Where changes cannot be passed on, the operator is left to Spark. So are all
        operators below whose updates it would count as new rows.
    """
    if operator.spec is not None:
        passing = operator.spec.over_updates()
        if passing is not None:  # a lookup join passes changes through, row by row
            return (replace(operator, spec=passing) if any(map(emits_updates, children)) else operator), children
        try:
            return _by_changelogs(operator, operator.spec, children, output_mode, unstable)
        except Unsupported as unsupported:
            operator = operator.left_to_spark(unsupported.reason)
    return operator, tuple(map(leave_updates_to_spark, children))


def _by_changelogs(
    operator: Operator,
    spec: OperatorSpec,
    children: tuple[Decided, ...],
    output_mode: str,
    unstable: Callable[[], str | None],
) -> tuple[Operator, tuple[Decided, ...]]:
    # Raises where rows change below a node that cannot pass changes on, such as a union.
    changing = [below for child in children if (below := changelog_source(child)) is not None]
    # As in Spark, deduplication takes an aggregate's updates as further rows.
    if spec.facts.reads_updates_as_rows and not any(below.facts.beyond_spark for below in changing):
        return operator, children
    if not changing:
        for child in children:
            _refuse_updates_of_spark(child, output_mode)
        return operator, children
    if (part := unstable()) is not None:
        raise Unsupported(Reason("MP-BETWEEN", part))
    return replace(operator, spec=_over_changelog(spec)), tuple(map(with_changelog_output, children))


def _refuse_updates_of_spark(decided: Decided, output_mode: str) -> None:
    """Refuse a plan whose rows change, but come from an aggregate that stays on Spark.

    Spark emits new versions of rows without the old ones, or in complete mode all rows again.

    Raises:
        Unsupported: an operator above would count each of them.
    """
    operator = decided.operator
    if operator is None or (operator.spec is not None and not operator.spec.facts.stateful):
        for child in decided.children:
            _refuse_updates_of_spark(child, output_mode)
    elif operator.spec is None and decided.node.kind in ("Aggregate", "Distinct") and output_mode != "append":
        raise Unsupported(Reason("MP-BELOW", operator.title))


def _over_changelog(spec: OperatorSpec) -> OperatorSpec:
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


def shows_changes(root: Decided, analyzed: Node) -> bool:
    """Whether rows that the query has shown may change later.

    Args:
        root: the decided plan.
        analyzed: the plan as the user wrote it.

    Raises:
        UnsupportedError: they may change, but the query cannot show all changes.
    """
    try:
        if changelog_source(root) is None:
            return False
        unstable = unstable_between(analyzed, top=True)
        if unstable is not None:
            raise Unsupported(Reason("MP-BETWEEN", unstable))
        if any(column.name.lower() == CHANGE_COLUMN for column in analyzed.output):
            raise UnsupportedError(
                f"The query has a column {CHANGE_COLUMN}, the name of the column with the kind of each change.",
                action="Give the query's column another name.",
            )
        return True
    except Unsupported as error:
        raise UnsupportedError(
            f"The query cannot show all changes. {error.reason}.",
            action="Set spark.millpond.changes to 'upsert', or show the rows of the operator whose changes are wanted.",
        ) from None


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
    parts = decided.node.expression("condition").conjuncts
    return all(any(lets_pass(part, rank, spec.limit) for rank in ranks) for part in parts)


def _renames(result: Expression, columns: set[int]) -> bool:
    """Whether a result is one of these columns under another name."""
    if result.kind != "Alias":
        return False
    (source,) = result.children
    return source.kind == "AttributeReference" and source.expr_id in columns

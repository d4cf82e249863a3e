"""What the operators of a query make of each other, once each was decided by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from millpond.errors import UnsupportedError
from millpond.plan.changelog.changes import leave_updating
from millpond.plan.reading.decision import Decided, Operator
from millpond.plan.reading.join import JoinReading
from millpond.plan.reading.map_groups import MAPS
from millpond.plan.reading.reasons import Reason
from millpond.spec.operators import Pattern


def settled(root: Decided, output_mode: str, pattern: Pattern) -> Decided:
    """The plan with operators left to Spark that cannot stand beside the others, and the rest told of the others.

    Args:
        root: a plan, each operator of which was decided by itself.
        output_mode: `append`, `update` or `complete`.
        pattern: how groups are to be kept that are shown once, where there is a choice.

    Raises:
        UnsupportedError: an operator would be left to Spark that means something else there.
    """
    root = _shown(root, output_mode)
    operators = list(root.operators())
    if any(one.closes for one in operators) and any(one.spec is None for one in operators):
        # An operator of Spark's would not see the watermark as it passes ours.
        root = root.with_ours(lambda one: one.left(Reason("MP-BESIDE")))
    _check_maps(root)
    return _lagging(root.with_ours(lambda one: _patterned(one, pattern)))[0]


def numbered(root: Decided) -> Decided:
    """The plan with the Millpond operators numbered bottom up, left to right."""
    numbers = count()
    return root.with_ours(lambda one: replace(one, index=next(numbers)))


def _shown(decided: Decided, output_mode: str) -> Decided:
    """Leave to Spark rows that the query shows in complete mode: there, all of them would have to be shown again."""
    if output_mode != "complete":
        return decided
    children = tuple(_shown(child, output_mode) for child in decided.children)
    operator = decided.operator
    spec = operator.spec if operator is not None else None
    if operator is not None and spec is not None and spec.updates and not spec.changes and not spec.shows_all:
        operator = operator.left(Reason("MP-MODE", output_mode))
        children = tuple(leave_updating(child) for child in children)
    return Decided(decided.node, children, operator)


def _check_maps(root: Decided) -> None:
    """Refuse to leave to Spark what would be called with other rows there than was asked for."""
    for decided in root.walk():
        operator = decided.operator
        if decided.node.kind in MAPS and operator is not None and operator.spec is None:
            raise UnsupportedError(
                f"The operator '{operator.title}' cannot be called with whole closed windows. {operator.reason}.",
                action="Change the query, or set spark.millpond.mapGroups to 'batch', which is what Spark does.",
            )


def _patterned(operator: Operator, pattern: Pattern) -> Operator:
    return operator if operator.spec is None else replace(operator, spec=operator.spec.with_pattern(pattern))


def _lagging(decided: Decided) -> tuple[Decided, int]:
    """Tell operators how far their watermark lags behind the query's, and how far that of their output does.

    What comes out of a join may be as old as the rows that it still keeps.
    """
    below = [_lagging(child) for child in decided.children]
    lag = max((lag for _, lag in below), default=0)
    operator = decided.operator
    if operator is not None and operator.spec is not None:
        operator = replace(operator, spec=operator.spec.with_lag(lag))
        if isinstance(operator.reading, JoinReading):
            lag += operator.reading.output_lag_ms
    return Decided(decided.node, tuple(child for child, _ in below), operator), lag

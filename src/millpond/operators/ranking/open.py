"""Opens ranks, and aggregates over rows."""

from __future__ import annotations

from millpond.operators.kind import Opening
from millpond.operators.protocol import Operator
from millpond.operators.ranking.over_changelog import OverChangelogOperator
from millpond.operators.ranking.over_rows import OverRowsOperator
from millpond.operators.ranking.top_n import TopNOperator
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.rank import RankSpec


def open_rank(spec: RankSpec, opening: Opening) -> Operator:
    """Open the operator that keeps the first rows of each key, or all where rows go again."""
    return TopNOperator(spec, opening.make_table)


def open_over(spec: OverSpec, opening: Opening) -> Operator:
    """Open the operator that keeps the last rows of each key, or all where rows go again."""
    return (OverChangelogOperator if spec.retracts else OverRowsOperator)(spec, opening.make_table)

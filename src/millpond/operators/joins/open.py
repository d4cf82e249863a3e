"""Opens a join."""

from __future__ import annotations

from millpond.operators.joins.operator import JoinOperator
from millpond.operators.kind import Opening
from millpond.operators.protocol import Operator
from millpond.spec.kinds.join import JoinSpec


def open_join(spec: JoinSpec, opening: Opening) -> Operator:
    """Open the operator that a spec describes."""
    return JoinOperator(spec, opening.make_table)

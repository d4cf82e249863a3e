"""Opens an aggregate: there are several operators, by how groups are best kept."""

from __future__ import annotations

from millpond.operators.aggregate.adaptive import AdaptiveAggregate
from millpond.operators.aggregate.buffered import BufferedAggregate
from millpond.operators.aggregate.running import AggregateOperator
from millpond.operators.aggregate.windowed import WindowedAggregate
from millpond.operators.kind import Opening
from millpond.operators.protocol import Operator
from millpond.spec.kinds.aggregate import AggregateSpec


def open_aggregate(spec: AggregateSpec, opening: Opening) -> Operator:
    """Open the operator that a spec describes."""
    make_table, existing = opening.make_table, opening.existing
    if spec.keeps_rows:
        return BufferedAggregate(spec, make_table, existing)
    if spec.observed:
        return AdaptiveAggregate(spec, make_table, existing, memory=opening.memory)
    if spec.time is not None:
        return WindowedAggregate(spec, make_table, existing)
    return AggregateOperator(spec, make_table, owns_global=opening.owns_global)

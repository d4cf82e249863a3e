"""Opens deduplications."""

from __future__ import annotations

from millpond.operators.dedup.deduplicate import DeduplicateOperator
from millpond.operators.dedup.within_watermark import WithinWatermarkOperator
from millpond.operators.kind import Opening
from millpond.operators.protocol import Operator
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec


def open_deduplication(spec: DeduplicateSpec, opening: Opening) -> Operator:
    """Open the operator that keeps keys for ever, or until their own time has passed."""
    return DeduplicateOperator(spec, opening.make_table, opening.existing)


def open_within(spec: WithinSpec, opening: Opening) -> Operator:
    """Open the operator that keeps keys for some time after their first row."""
    return WithinWatermarkOperator(spec, opening.make_table)

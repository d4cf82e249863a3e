"""The union of all kinds of operators."""

from __future__ import annotations

from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.kinds.group_state import GroupStateSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.session import SessionSpec

OperatorSpec = (
    AggregateSpec
    | DeduplicateSpec
    | SessionSpec
    | WithinSpec
    | JoinSpec
    | RankSpec
    | OverSpec
    | ProcessorSpec
    | GroupStateSpec
    | EnrichSpec
)
"""Any operator spec; `query.json` names its kind by the tag."""

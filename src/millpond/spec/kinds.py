"""The kinds of operators that there are."""

from __future__ import annotations

from millpond.spec.aggregate import AggregateSpec
from millpond.spec.deduplicate import DeduplicateSpec
from millpond.spec.join import JoinSpec
from millpond.spec.over import OverSpec
from millpond.spec.rank import RankSpec
from millpond.spec.session import SessionSpec
from millpond.spec.within import WithinSpec

OperatorSpec = AggregateSpec | DeduplicateSpec | SessionSpec | WithinSpec | JoinSpec | RankSpec | OverSpec
"""What an operator computes, read from `query.json` by its tag."""

"""Opens the operator that a spec describes."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.operators.aggregate.adaptive import ObservedAggregate
from millpond.operators.aggregate.buffered import HolisticAggregate
from millpond.operators.aggregate.running import AggregateOperator
from millpond.operators.aggregate.windowed import WindowedAggregate
from millpond.operators.dedup.deduplicate import DeduplicateOperator
from millpond.operators.dedup.within_watermark import WithinOperator
from millpond.operators.joins.operator import JoinOperator
from millpond.operators.protocol import MakeOrdered, MakeTable, Operator
from millpond.operators.ranking.over_changelog import OverChangesOperator
from millpond.operators.ranking.over_rows import OverRowsOperator
from millpond.operators.ranking.top_n import TopNOperator
from millpond.operators.sessions.buffered import HolisticSessions
from millpond.operators.sessions.operator import SessionOperator
from millpond.spec.deduplicate import DeduplicateSpec
from millpond.spec.join import JoinSpec
from millpond.spec.kinds import OperatorSpec
from millpond.spec.over import OverSpec
from millpond.spec.rank import RankSpec
from millpond.spec.session import SessionSpec
from millpond.spec.within import WithinSpec


def open_operator(
    spec: OperatorSpec,
    make_table: MakeTable,
    existing: Iterable[str] = (),
    *,
    make_ordered: MakeOrdered | None = None,
    owns_global: bool = True,
    memory: int = 64 << 20,
) -> Operator:
    """Open an operator on one partition.

    Args:
        spec: what it computes.
        make_table: opens a table of the partition by name, schema and the words of a fresh row. The table `MAIN` (each
            slice of it) holds the partition's range of hashes; the others, whose hashes are mixed, the whole range.
        existing: the names of the tables that the state has.
        make_ordered: opens an ordered table, for operators that ask for one.
        owns_global: for an aggregate without keys, whether the partition's range holds `spec.GLOBAL_HASH`.
        memory: bytes of the slot's memory that fall to the partition, if all have as much.
    """
    if isinstance(spec, JoinSpec):
        assert make_ordered is not None
        return JoinOperator(spec, make_ordered)
    if isinstance(spec, DeduplicateSpec):
        return DeduplicateOperator(spec, make_table, existing)
    if isinstance(spec, OverSpec):
        return OverChangesOperator(spec, make_table) if spec.retracts else OverRowsOperator(spec, make_table)
    if isinstance(spec, RankSpec):
        return TopNOperator(spec, make_table)
    if isinstance(spec, SessionSpec):
        return HolisticSessions(spec, make_table) if spec.keeps_rows else SessionOperator(spec, make_table)
    if isinstance(spec, WithinSpec):
        return WithinOperator(spec, make_table)
    if spec.keeps_rows:
        return HolisticAggregate(spec, make_table, existing)
    if spec.observed:
        return ObservedAggregate(spec, make_table, existing, memory=memory)
    if spec.time is not None:
        return WindowedAggregate(spec, make_table, existing)
    return AggregateOperator(spec, make_table, owns_global=owns_global)

"""The kinds of operators: the one table that says of each how it is opened, and what its state is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.aggregate.kind import AGGREGATE
from millpond.operators.dedup.kind import DEDUPLICATE, WITHIN
from millpond.operators.joins.kind import JOIN
from millpond.operators.kind import Kind, Opening, S
from millpond.operators.lookups.kind import ENRICH
from millpond.operators.processors.group_kind import GROUP_STATE
from millpond.operators.processors.kind import PROCESSOR
from millpond.operators.protocol import MakeTable, Operator, StateTable
from millpond.operators.ranking.kind import OVER, RANK
from millpond.operators.sessions.kind import SESSION
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.deduplicate import DeduplicateSpec, WithinSpec
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.kinds.group_state import GroupStateSpec
from millpond.spec.kinds.join import JoinSpec
from millpond.spec.kinds.over import OverSpec
from millpond.spec.kinds.processor import ProcessorSpec
from millpond.spec.kinds.rank import RankSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.kinds.union import OperatorSpec
from millpond.spec.protocol import Spec


def _kind(spec: type[S], kind: Kind[S]) -> tuple[type[Spec], Kind[Any]]:
    return spec, kind


KINDS: Mapping[type[Spec], Kind[Any]] = dict(
    (
        _kind(AggregateSpec, AGGREGATE),
        _kind(DeduplicateSpec, DEDUPLICATE),
        _kind(GroupStateSpec, GROUP_STATE),
        _kind(EnrichSpec, ENRICH),
        _kind(JoinSpec, JOIN),
        _kind(OverSpec, OVER),
        _kind(ProcessorSpec, PROCESSOR),
        _kind(RankSpec, RANK),
        _kind(SessionSpec, SESSION),
        _kind(WithinSpec, WITHIN),
    )
)
"""The kind of each spec."""


def load_operators() -> None:
    """Import the code of all kinds, so that a process that is forked from this one finds it."""
    for kind in KINDS.values():
        kind.load()


def open_operator(
    spec: OperatorSpec,
    make_table: MakeTable,
    existing: Collection[str] = (),
    *,
    owns_global: bool = True,
    memory: int = 64 << 20,
) -> Operator:
    """Open an operator on one partition; arguments as of `Opening`."""
    return KINDS[type(spec)].load()(spec, Opening(make_table, existing, owns_global, memory))


def state_tables(spec: OperatorSpec) -> Mapping[str, StateTable]:
    """The tables of an operator's state by name, without slices of event time."""
    return KINDS[type(spec)].tables(spec)


def read_rows(spec: OperatorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Rows of a table as a user reads them (see `Kind.read`)."""
    return KINDS[type(spec)].read(spec, table, rows)


def read_whole(
    spec: OperatorSpec, table: str, pieces: Iterator[Rows], parts: Iterator[Rows]
) -> Iterator[pa.RecordBatch]:
    """All rows of a table that has parts beside, with these (see `Kind.read_whole`)."""
    how = KINDS[type(spec)].read_whole
    assert how is not None
    return how(spec, table, pieces, parts)

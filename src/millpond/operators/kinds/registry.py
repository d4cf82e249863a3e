"""The registry of operator kinds: how each is opened, and which tables its state has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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
    """Import the code of all kinds, so that processes forked from this one have it."""
    for kind in KINDS.values():
        kind.load()


def open_operator(
    spec: OperatorSpec,
    make_table: MakeTable,
    existing: Collection[str] = (),
    *,
    owns_global: bool = True,
    memory: int = 64 << 20,
    is_closed: Callable[[], bool] = lambda: False,
) -> Operator:
    """Open an operator on one partition; arguments as of `Opening`."""
    return KINDS[type(spec)].load()(spec, Opening(make_table, existing, owns_global, memory, is_closed))


def state_tables(spec: OperatorSpec) -> Mapping[str, StateTable]:
    """Return the tables of an operator's state by name, without slices of event time."""
    return KINDS[type(spec)].tables(spec)


def read_rows(spec: OperatorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Decode rows of a table for a user (see `Kind.read`)."""
    return KINDS[type(spec)].read(spec, table, rows)


def read_whole(
    spec: OperatorSpec, table: str, pieces: Iterator[Rows], parts: Iterator[Rows]
) -> Iterator[pa.RecordBatch]:
    """Decode all rows of a table together with those of its parts table (see `Kind.read_whole`)."""
    read = KINDS[type(spec)].read_whole
    assert read is not None
    return read(spec, table, pieces, parts)

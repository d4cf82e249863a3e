"""How joins are opened, and what their state is."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.joins.operator import JoinOperator
from millpond.operators.joins.rows import LEFT, RIGHT, read_side, side_table
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import Operator, StateTable
from millpond.spec.join import JoinSpec


def _open(spec: JoinSpec, opening: Opening) -> Operator:
    return JoinOperator(spec, opening.make_table)


def _tables(spec: JoinSpec) -> dict[str, StateTable]:
    return {name: side_table(spec, name) for name in (LEFT, RIGHT)}


def _read(spec: JoinSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    yield read_side(spec, table, rows)


JOIN = Kind(_open, _tables, _read)

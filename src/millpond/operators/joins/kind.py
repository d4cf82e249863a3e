"""The kind of joins: the tables of their state, and the operator that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.columns.decode import OversizeError
from millpond.operators.joins.rows import LEFT, RIGHT, read_side, side_table
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import Operator, StateTable
from millpond.spec.kinds.join import JoinSpec


def _load() -> Callable[[JoinSpec, Opening], Operator]:
    from millpond.operators.joins.operator import JoinOperator

    return lambda spec, opening: JoinOperator(spec, opening.make_table)


def _tables(spec: JoinSpec) -> dict[str, StateTable]:
    return {name: side_table(spec, name) for name in (LEFT, RIGHT)}


def _read(spec: JoinSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    try:
        batch = read_side(spec, table, rows)
    except OversizeError:
        if rows.count < 2:
            raise
        for half in rows.halves():
            yield from _read(spec, table, half)
        return
    yield batch


JOIN = Kind(_load, _tables, _read)

"""The kind of sessions: the tables of their state, and the operators that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import MAIN, ROWS, Operator, StateTable
from millpond.operators.sessions.tables import kept_rows, main_table
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.session import SessionSpec


def _load() -> Callable[[SessionSpec, Opening], Operator]:
    from millpond.operators.sessions.buffered import BufferedSessions
    from millpond.operators.sessions.operator import SessionOperator
    from millpond.operators.sessions.row_order import RowOrderSessions

    def open_sessions(spec: SessionSpec, opening: Opening) -> Operator:
        if spec.keeps_rows:
            return BufferedSessions(spec, opening.make_table)
        if spec.depends_on_row_order:
            return RowOrderSessions(spec, opening.make_table)
        return SessionOperator(spec, opening.make_table)

    return open_sessions


def _tables(spec: SessionSpec) -> dict[str, StateTable]:
    tables = {MAIN: main_table(spec)[0].state}
    if spec.keeps_rows:
        stored = kept_rows(spec)
        tables[ROWS] = StateTable(stored.layout.schema, stored.initial, kind="unaligned", shown=False)
    return tables


def _read(spec: SessionSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    if table == ROWS:
        yield kept_rows(spec).decode(rows).drop_columns(["__hash"])
        return
    main, calls = main_table(spec)
    for call in calls:
        call.ansi = False  # a result that would fail the query is null here
    yield from decode_rows(main, calls, spec.state_fields, rows)


SESSION = Kind(_load, _tables, _read)

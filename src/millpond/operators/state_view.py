"""The rows of an operator's state as a user reads them: what columns they have, and what is in a table's rows."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.columns.input_rows import StoredRows
from millpond.operators.joins.rows import read_side, state_columns
from millpond.operators.protocol import MAIN, ROWS
from millpond.operators.sessions.row_lists import KEPT
from millpond.operators.table_schemas import decode_rows, distincts, images, main_table
from millpond.spec.aggregate import AggregateSpec
from millpond.spec.join import JoinSpec
from millpond.spec.kinds import OperatorSpec
from millpond.spec.operators import Field
from millpond.spec.session import SessionSpec
from millpond.spec.types import parse_type


def state_fields(spec: OperatorSpec) -> tuple[Field, ...]:
    """The columns of `read_rows` for the main table: the key, and what the state says of it.

    Windows are shown by when they begin, or the panes that several of them share. Where rows are kept until their
    window closes, the inputs of each are shown; of sessions, whose rows are in a table beside it, the number of these.
    Where groups may have rows beside them, both are shown: groups without inputs, rows without results.
    """
    if isinstance(spec, SessionSpec) and spec.keeps_rows:
        return (*spec.keys, spec.window, KEPT)
    if isinstance(spec, AggregateSpec):
        results = spec.output_fields[len(spec.keys) : len(spec.keys) + len(spec.calls)]
        fields = StoredRows(spec).fields if spec.keeps_rows else (*spec.keys, *results)
        fields += spec.inputs if spec.observed else ()
        begin = _begin(spec)
        return fields if begin is None else (*fields[: begin[0]], begin[1], *fields[begin[0] + 1 :])
    if isinstance(spec, JoinSpec):
        return state_columns(spec)
    return spec.output_fields if isinstance(spec, SessionSpec) else spec.key_fields


def _begin(spec: AggregateSpec) -> tuple[int, Field] | None:
    """Which column tells where a window or pane begins, and how it is shown, if groups are windows."""
    if spec.time is None or spec.time.windows is None:
        return None
    window = spec.keys[spec.time.column]
    return spec.time.column, Field(window.name, parse_type(window.type).fields[0][1].name)


def read_rows(spec: OperatorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    """Rows of a table as a user reads them: for the main table the columns of `state_fields`, for others their keys.

    Yields one batch, or more where a column would exceed Arrow's 32-bit offsets.
    """
    begin = _begin(spec) if isinstance(spec, AggregateSpec) else None
    for batch in _read_rows(spec, table, rows):
        if begin is None:
            yield batch
            continue
        at, field = begin
        yield batch.set_column(at, field.name, batch.column(at).cast(parse_type(field.type).arrow))


def _read_rows(spec: OperatorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    kept = table == ROWS or (isinstance(spec, AggregateSpec) and spec.keeps_rows)
    if isinstance(spec, AggregateSpec | SessionSpec) and kept:
        stored = StoredRows(spec).decode(rows).drop_columns(["__hash"])
        yield _beside(spec, stored, rows=True) if isinstance(spec, AggregateSpec) and spec.observed else stored
    elif isinstance(spec, JoinSpec):
        yield read_side(spec, table, rows)
    elif table == MAIN:
        main, made = main_table(spec)
        for each in made:
            each.ansi = False  # what would be an error in the query is null here
        found = images(spec, main) if isinstance(spec, AggregateSpec) else None
        rows = rows if found is None else found.there(rows)
        if isinstance(spec, AggregateSpec) and spec.observed:
            fields = state_fields(spec)[: len(spec.keys) + len(spec.calls)]
            for batch in decode_rows(main, made, fields, rows):
                yield _beside(spec, batch, rows=False)
        else:
            yield from decode_rows(main, made, state_fields(spec), rows)
    elif isinstance(spec, AggregateSpec):
        for distinct, side, _ in distincts(spec):
            if distinct.table == table:
                yield from decode_rows(side, [], side.fields, rows)


def _beside(spec: AggregateSpec, batch: pa.RecordBatch, *, rows: bool) -> pa.RecordBatch:
    """Groups, or rows, with all columns of the state: those that they do not have are null."""
    fields = state_fields(spec)
    keys, inputs = len(spec.keys), len(spec.inputs)
    missing = fields[keys:-inputs] if rows else fields[-inputs:]
    nulls = [pa.nulls(batch.num_rows, parse_type(field.type).arrow) for field in missing]
    own = batch.columns[keys:]
    columns = [*batch.columns[:keys], *nulls, *own] if rows else [*batch.columns, *nulls]
    return pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])

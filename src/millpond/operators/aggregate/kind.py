"""The kind of aggregates: what their state is, and what opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.aggregate.tables import (
    BACKFILLED,
    SAMPLE,
    backfill_table,
    distincts,
    images,
    main_table,
    sample_table,
)
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import MAIN, ROWS, Operator, StateTable
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import decode_rows
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.types import parse_type


def _load() -> Callable[[AggregateSpec, Opening], Operator]:
    from millpond.operators.aggregate.open import open_aggregate

    return open_aggregate


def _tables(spec: AggregateSpec) -> dict[str, StateTable]:
    stored = StoredRows(spec.key_fields, spec.inputs)
    rows = StateTable(stored.layout.schema, stored.initial, kind="aligned")
    if spec.keeps_rows:
        return {MAIN: rows}
    tables = {MAIN: main_table(spec)[0].state}
    for distinct, table, _ in distincts(spec):
        tables[distinct.table] = table.state._replace(axis="group", shown=False)
    if spec.observed:
        about = {SAMPLE: sample_table(), BACKFILLED: backfill_table()}
        for name, table in about.items():
            tables[name] = table.state._replace(axis="none", shown=False, counted=False)
        tables[ROWS] = rows
    return tables


def _read(spec: AggregateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    begin = spec.begin
    for batch in _read_stored(spec, table, rows):
        if begin is None:
            yield batch
            continue
        at, field = begin
        yield batch.set_column(at, field.name, batch.column(at).cast(parse_type(field.type).arrow))


def _read_stored(spec: AggregateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    if table == ROWS or (table == MAIN and spec.keeps_rows):
        stored = StoredRows(spec.key_fields, spec.inputs).decode(rows).drop_columns(["__hash"])
        yield _beside(spec, stored, rows=True) if spec.observed else stored
    elif table == MAIN:
        main, made = main_table(spec)
        for each in made:
            each.ansi = False  # what would be an error in the query is null here
        found = images(spec, main)
        fields = spec.state_fields[: len(spec.keys) + len(spec.calls)]
        for batch in decode_rows(main, made, fields, rows if found is None else found.there(rows)):
            yield _beside(spec, batch, rows=False) if spec.observed else batch
    else:
        for distinct, side, _ in distincts(spec):
            if distinct.table == table:
                yield from decode_rows(side, [], side.fields, rows)


def _beside(spec: AggregateSpec, batch: pa.RecordBatch, *, rows: bool) -> pa.RecordBatch:
    """Groups, or rows, with all columns of the state: those that they do not have are null."""
    fields = spec.state_fields
    keys, inputs = len(spec.keys), len(spec.inputs)
    missing = fields[keys:-inputs] if rows else fields[-inputs:]
    nulls = [pa.nulls(batch.num_rows, parse_type(field.type).arrow) for field in missing]
    own = batch.columns[keys:]
    columns = [*batch.columns[:keys], *nulls, *own] if rows else [*batch.columns, *nulls]
    return pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])


AGGREGATE = Kind(_load, _tables, _read)

"""The kind of aggregates: what their state is, and what opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

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
from millpond.spec.calls import result_fields
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
    windows = None if spec.time is None else spec.time.windows
    for batch in _read_stored(spec, table, rows):
        if spec.time is None or windows is None:
            yield batch
            continue
        key = spec.keys[spec.time.column]
        length = windows.slide if windows.shared else windows.size
        window = _window(batch.column(spec.time.column), length, parse_type(key.type).arrow)
        yield batch.set_column(spec.time.column, key.name, window)


def _window(start: pa.Array, length: int, type_: pa.StructType) -> pa.Array:
    """Windows, or panes, of one length (in microseconds) as structs of their bounds."""
    bounds = start, pc.add(start, pa.scalar(length, pa.int64()))
    columns = [bound.cast(type_.field(at).type) for at, bound in enumerate(bounds)]
    return pa.StructArray.from_arrays(columns, fields=list(type_))


def _read_stored(spec: AggregateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    if table == ROWS or (table == MAIN and spec.keeps_rows):
        stored = StoredRows(spec.key_fields, spec.inputs).decode(rows).drop_columns(["__hash"])
        yield _beside(spec, stored, rows=True) if spec.observed else stored
    elif table == MAIN:
        main, made = main_table(spec)
        for each in made:
            each.ansi = False  # what would be an error in the query is null here
        found = images(spec, main)
        fields = spec.key_fields + result_fields(spec.calls)
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

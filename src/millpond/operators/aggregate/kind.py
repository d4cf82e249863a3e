"""The kind of aggregates: the tables of their state, and the operators that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from millpond.layout import Rows
from millpond.operators.aggregate.tables import (
    BACKFILLED,
    SAMPLE,
    backfill_table,
    changelog_of,
    distincts,
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
    from millpond.operators.aggregate.adaptive import AdaptiveAggregate
    from millpond.operators.aggregate.buffered import BufferedAggregate
    from millpond.operators.aggregate.running import AggregateOperator
    from millpond.operators.aggregate.windowed import WindowedAggregate

    def open_aggregate(spec: AggregateSpec, opening: Opening) -> Operator:
        make_table, existing = opening.make_table, opening.existing
        if spec.keeps_rows:
            return BufferedAggregate(spec, make_table, existing)
        if spec.adaptive:
            return AdaptiveAggregate(spec, make_table, existing, memory=opening.memory)
        if spec.time is not None:
            return WindowedAggregate(spec, make_table, existing)
        return AggregateOperator(spec, make_table, owns_global=opening.owns_global)

    return open_aggregate


def _tables(spec: AggregateSpec) -> dict[str, StateTable]:
    stored = StoredRows(spec.key_fields, spec.inputs)
    rows = StateTable(stored.layout.schema, stored.initial, kind="aligned")
    if spec.keeps_rows:
        return {MAIN: rows}
    tables = {MAIN: main_table(spec)[0].state}
    for distinct, table, _ in distincts(spec):
        # Entries go to the partition of their group, not to that of their own hash.
        tables[distinct.table] = table.state._replace(axis="group", shown=False)
    if spec.adaptive:
        markers = {SAMPLE: sample_table(), BACKFILLED: backfill_table()}
        for name, table in markers.items():
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
    """Build windows or panes as structs of their bounds; `length` is in microseconds."""
    bounds = start, pc.add(start, pa.scalar(length, pa.int64()))
    columns = [bound.cast(type_.field(position).type) for position, bound in enumerate(bounds)]
    return pa.StructArray.from_arrays(columns, fields=list(type_))


def _read_stored(spec: AggregateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    if table == ROWS or (table == MAIN and spec.keeps_rows):
        stored = StoredRows(spec.key_fields, spec.inputs).decode(rows).drop_columns(["__hash"])
        yield _with_all_columns(spec, stored, rows=True) if spec.adaptive else stored
    elif table == MAIN:
        main, calls = main_table(spec)
        for call in calls:
            call.ansi = False  # a result that would fail the query is null here
        changelog = changelog_of(spec, main)
        fields = spec.key_fields + result_fields(spec.calls)
        for batch in decode_rows(main, calls, fields, rows if changelog is None else changelog.existing(rows)):
            yield _with_all_columns(spec, batch, rows=False) if spec.adaptive else batch
    else:
        for distinct, side, _ in distincts(spec):
            if distinct.table == table:
                yield from decode_rows(side, [], side.fields, rows)


def _with_all_columns(spec: AggregateSpec, batch: pa.RecordBatch, *, rows: bool) -> pa.RecordBatch:
    """Return groups or rows with all columns of the state, null where they have none."""
    fields = spec.state_fields
    keys, inputs = len(spec.keys), len(spec.inputs)
    missing = fields[keys:-inputs] if rows else fields[-inputs:]
    nulls = [pa.nulls(batch.num_rows, parse_type(field.type).arrow) for field in missing]
    present = batch.columns[keys:]
    columns = [*batch.columns[:keys], *nulls, *present] if rows else [*batch.columns, *nulls]
    return pa.RecordBatch.from_arrays(columns, names=[field.name for field in fields])


AGGREGATE = Kind(_load, _tables, _read)

"""The kind of processors of the user: what their state is, and what opens them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.columns.decode import OversizeError, key_columns, nested_column
from millpond.operators.columns.encode import ALL
from millpond.operators.kind import Kind, Opening
from millpond.operators.processors.tables import parts, variables
from millpond.operators.protocol import Operator, StateTable
from millpond.spec.kinds.processor import ProcessorSpec


def _load() -> Callable[[ProcessorSpec, Opening], Operator]:
    from millpond.operators.processors.operator import open_processor

    return open_processor


def _tables(spec: ProcessorSpec) -> dict[str, StateTable]:
    beside = {name: one.keyed.state._replace(shown=False, counted=False) for name, one in parts(spec).items()}
    return {name: one.keyed.state for name, one in variables(spec).items()} | beside


def _read(spec: ProcessorSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    one = variables(spec)[table]
    try:
        columns = key_columns(rows, one.keyed.keys, one.keyed.types)
        columns.append(nested_column(rows, one.keyed.values[0].offset, ALL, one.type))
    except OversizeError:
        middle = rows.count // 2
        yield from _read(spec, table, Rows(rows.words[:middle], rows.heap))
        yield from _read(spec, table, Rows(rows.words[middle:], rows.heap))
        return
    yield pa.RecordBatch.from_arrays(columns, names=[field.name for field in spec.shown(table)])


PROCESSOR = Kind(_load, _tables, _read)

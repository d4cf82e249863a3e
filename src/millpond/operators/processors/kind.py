"""The kind of user processors: the tables of their state, and the operator that they open."""

from __future__ import annotations

from collections.abc import Callable

from millpond.operators.kind import Kind, Opening
from millpond.operators.processors.tables import parts, variables
from millpond.operators.processors.user_rows import read, read_whole
from millpond.operators.protocol import Operator, StateTable
from millpond.spec.kinds.processor import ProcessorSpec


def _load() -> Callable[[ProcessorSpec, Opening], Operator]:
    from millpond.operators.processors.operator import open_processor

    return open_processor


def _tables(spec: ProcessorSpec) -> dict[str, StateTable]:
    part_tables = {
        name: variable.keyed.state._replace(shown=False, counted=False) for name, variable in parts(spec).items()
    }
    names = {variable.table: variable.parts for variable in spec.variables}
    rows = {
        name: variable.keyed.state._replace(parts=names.get(name, "")) for name, variable in variables(spec).items()
    }
    return rows | part_tables


PROCESSOR = Kind(_load, _tables, read, read_whole)

"""The kind of processors of the user: what their state is, and what opens them."""

from __future__ import annotations

from collections.abc import Callable

from millpond.operators.kind import Kind, Opening
from millpond.operators.processors.shown import read, read_whole
from millpond.operators.processors.tables import parts, variables
from millpond.operators.protocol import Operator, StateTable
from millpond.spec.kinds.processor import ProcessorSpec


def _load() -> Callable[[ProcessorSpec, Opening], Operator]:
    from millpond.operators.processors.operator import open_processor

    return open_processor


def _tables(spec: ProcessorSpec) -> dict[str, StateTable]:
    beside = {name: one.keyed.state._replace(shown=False, counted=False) for name, one in parts(spec).items()}
    names = {one.table: one.parts for one in spec.variables}
    rows = {name: one.keyed.state._replace(parts=names.get(name, "")) for name, one in variables(spec).items()}
    return rows | beside


PROCESSOR = Kind(_load, _tables, read, read_whole)

"""The kind of lookup joins: no state, and the operator that it opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from millpond.layout import Rows
from millpond.operators.kind import Kind, Opening
from millpond.operators.protocol import Operator, StateTable
from millpond.spec.kinds.enrich import EnrichSpec


def _load() -> Callable[[EnrichSpec, Opening], Operator]:
    from millpond.operators.lookups.operator import open_lookup

    return open_lookup


def _tables(spec: EnrichSpec) -> dict[str, StateTable]:
    return {}


def _read(spec: EnrichSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    return iter(())


ENRICH = Kind(_load, _tables, _read)

"""The kind of user functions over groups with state: the tables of their state, and the operator that they open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from millpond.layout import Rows
from millpond.operators.kind import Kind, Opening
from millpond.operators.processors.kind import PROCESSOR
from millpond.operators.processors.tables import variables
from millpond.operators.processors.user_rows import read_columns
from millpond.operators.protocol import Operator
from millpond.spec.kinds.group_state import STATE, TIMEOUT, GroupStateSpec


def _load() -> Callable[[GroupStateSpec, Opening], Operator]:
    from millpond.operators.processors.group_state import open_group_state

    return open_group_state


def _read(spec: GroupStateSpec, table: str, rows: Rows) -> Iterator[pa.RecordBatch]:
    names = [field.name for field in spec.table_columns(table)]
    for *columns, state in read_columns(variables(spec)[table], rows):
        shown = [pc.struct_field(state, name) for name in (STATE, TIMEOUT)] if spec.expires else [state]
        yield pa.RecordBatch.from_arrays([*columns, *shown], names=names)


GROUP_STATE = Kind(_load, PROCESSOR.tables, _read)

"""Figures among a pipe's output rows: the column that ordinary rows leave null, and the rows that carry nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from millpond.metrics import FIGURE_COLUMN, pack
from millpond.operators.spec import AggregateSpec, OperatorSpec
from millpond.operators.types import parse_type


def with_figures(batch: pa.RecordBatch) -> pa.RecordBatch:
    """An output batch with the figure column, null throughout."""
    return batch.append_column(FIGURE_COLUMN, pa.nulls(batch.num_rows, pa.int64()))


def figure_rows(spec: OperatorSpec, metrics: Mapping[str, float]) -> pa.RecordBatch:
    """Rows of the operator's output that are null but for their figures."""
    values = pack(metrics)
    if isinstance(spec, AggregateSpec):
        columns = [(key.name, key.type) for key in spec.keys]
        columns += [(f"call{index}", call.type) for index, call in enumerate(spec.calls)]
    else:
        columns = [(column.name, column.type) for column in spec.columns]
    arrays = [pa.nulls(len(values), parse_type(type_).arrow) for _, type_ in columns]
    names = [name for name, _ in columns]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(values, pa.int64())], [*names, FIGURE_COLUMN])

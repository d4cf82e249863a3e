"""Figures among a pipe's output rows: the column that ordinary rows leave null, and rows that carry nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from millpond.metrics import FIGURE_COLUMN, pack
from millpond.operators.spec import OperatorSpec, output_fields
from millpond.operators.types import parse_type


def with_figures(batch: pa.RecordBatch) -> pa.RecordBatch:
    """An output batch with the figure column, null throughout."""
    return batch.append_column(FIGURE_COLUMN, pa.nulls(batch.num_rows, pa.int64()))


def figure_rows(spec: OperatorSpec, metrics: Mapping[str, float], schema: pa.Schema | None = None) -> pa.RecordBatch:
    """Rows of the operator's output that are null but for their figures.

    Args:
        spec: the operator.
        metrics: its figures.
        schema: that of the output's other batches, which all of one Arrow stream have to share; None without others.
    """
    values = pack(metrics)
    if schema is None:
        fields = [pa.field(field.name, parse_type(field.type).arrow) for field in output_fields(spec)]
        schema = pa.schema([*fields, pa.field(FIGURE_COLUMN, pa.int64())])
    arrays = [pa.nulls(len(values), field.type) for field in schema][:-1]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(values, pa.int64())], schema=schema)

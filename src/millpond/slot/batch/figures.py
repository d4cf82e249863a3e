"""Figures among a pipe's output rows: the column that ordinary rows leave null, and rows that carry nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from millpond.metrics import FIGURE_COLUMN, pack


def with_figures(batch: pa.RecordBatch) -> pa.RecordBatch:
    """An output batch with the figure column, null throughout."""
    return batch.append_column(FIGURE_COLUMN, pa.nulls(batch.num_rows, pa.int64()))


def figure_rows(schema: pa.Schema, metrics: Mapping[str, float]) -> pa.RecordBatch:
    """Rows of an output, whose schema without the figure column is given, that are null but for their figures."""
    values = pack(metrics)
    arrays = [pa.nulls(len(values), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array(values, pa.int64())], schema=schema.append(pa.field(FIGURE_COLUMN, pa.int64()))
    )

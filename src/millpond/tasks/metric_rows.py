"""Figures in the output of a slot stage: a column that is null in ordinary rows, and rows with nothing but figures."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from millpond.metrics import METRIC_COLUMN, pack


def with_metric_column(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Append the figure column, all null, to an output batch."""
    return batch.append_column(METRIC_COLUMN, pa.nulls(batch.num_rows, pa.int64()))


def metric_rows(schema: pa.Schema, metrics: Mapping[str, float]) -> pa.RecordBatch:
    """Return rows that are null except for their figures.

    Args:
        schema: the output's schema without the figure column.
        metrics: the figures by name.
    """
    values = pack(metrics)
    arrays = [pa.nulls(len(values), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(
        [*arrays, pa.array(values, pa.int64())], schema=schema.append(pa.field(METRIC_COLUMN, pa.int64()))
    )

"""Limits of the batches that Spark passes to user functions."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
MAX_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"

_NO_LIMIT = (1 << 31) - 1  # Spark's value for "no limit"


def rows_per_batch(rows: pa.RecordBatch, conf: Any) -> int:
    """Return the maximum number of rows in a batch.

    Spark ends a batch at the first row that reaches a limit. It measures its own buffers for the byte limit. Here the
    average row size is used, as in Spark's worker for `transformWithStateInPandas`.

    Args:
        rows: rows of one or more groups, from which the average row size is computed.
        conf: Spark's settings, or `RunnerConf`.
    """
    records, size = int(conf.get(MAX_RECORDS, 10_000)), int(conf.get(MAX_BYTES, _NO_LIMIT))
    most = records if records > 0 else _NO_LIMIT
    if size >= _NO_LIMIT or not rows.nbytes:
        return most
    fitting: int = -(-size * rows.num_rows // rows.nbytes)
    return max(1, min(most, fitting))

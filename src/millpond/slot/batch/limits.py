"""How many rows of a group Spark puts into one batch for a function of the user."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"

_ANY = (1 << 31) - 1  # as Spark says that there is no limit


def rows_together(rows: pa.RecordBatch, conf: Any) -> int:
    """The most rows of a batch.

    Spark ends a batch at the first row that reaches a limit. It measures its own buffers for the limit of bytes; here
    it is the average size of a row, as in Spark's worker for `transformWithStateInPandas`.

    Args:
        rows: of one or many groups, by which the size of a row is measured. conf: Spark's settings, or `RunnerConf`.
    """
    records, size = int(conf.get(RECORDS, 10_000)), int(conf.get(BYTES, _ANY))
    most = records if records > 0 else _ANY
    if size >= _ANY or not rows.nbytes:
        return most
    fitting: int = -(-size * rows.num_rows // rows.nbytes)
    return max(1, min(most, fitting))

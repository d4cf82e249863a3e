"""Session settings that a transplanted query needs while it starts: a query runs in a copy of its session."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyspark.sql import SparkSession

from millpond.conf import Settings
from millpond.operators.spec import OperatorSpec, closes, input_fields, output_fields
from millpond.operators.types import leaves, parse_type

_MOST_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_UNLIMITED = str((1 << 31) - 1)
"""Any smaller limit makes Spark add up the sizes of all columns after each row: 0.3 µs a row, most of its edge."""

_ROWS_OF_ANY_LENGTH = 4096
"""Rows of one Arrow batch if they have strings: without a limit of bytes, 2 GB of a column have to hold them."""

_WATCHING = {
    "spark.sql.streaming.statefulOperator.allowMultiple": "false",
    "spark.sql.streaming.internal.stateStore.partitions": "1",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",
}
"""What the operator of Spark's own needs that watches the watermark (see `Catalyst.watching_watermark`)."""

_STARTING = threading.RLock()
"""Two starts must not see, or restore, each other's settings."""


def running_settings(settings: Settings, specs: Sequence[OperatorSpec], given: Mapping[str, str]) -> dict[str, str]:
    """The session settings under which a transplanted query runs.

    Args:
        settings: Millpond's.
        specs: the operators.
        given: the session's settings.
    """
    closing = any(closes(spec) for spec in specs)
    fields = [field for spec in specs for field in (*input_fields(spec), *output_fields(spec))]
    of_any_length = any(leaf.machine in (None, "bytes") for f in fields for leaf in leaves(parse_type(f.type)))
    rows = min(settings.batch_rows, _ROWS_OF_ANY_LENGTH) if of_any_length else settings.batch_rows
    return {
        # Spark checked the query that the user wrote; the transplanted one looks stateless and would be judged as such.
        "spark.sql.streaming.unsupportedOperationCheck": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(rows),
        _MOST_BYTES: given.get(_MOST_BYTES, _UNLIMITED),
        # As for Spark's own stateful queries: re-planning between stages takes longer than a small batch's stages.
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.sql.execution.arrow.useLargeVarTypes": "false",
    } | (_WATCHING if closing else {})


@contextmanager
def changed(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """Change a session's settings within this context, and put back what was there."""
    with _STARTING:
        before = spark.conf.getAll
        try:
            for name, value in wanted.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name in wanted:
                if name in before:
                    spark.conf.set(name, before[name])
                else:
                    spark.conf.unset(name)

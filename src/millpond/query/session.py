"""Session settings that a transplanted query needs while it starts: a query runs in a copy of its session."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

from millpond.conf import Settings

_STARTING = threading.RLock()
"""Two starts must not see, or restore, each other's settings."""


def running_settings(settings: Settings) -> dict[str, str]:
    """The session settings under which a transplanted query runs."""
    return {
        # Spark checked the query that the user wrote; the transplanted one looks stateless and would be judged as such.
        "spark.sql.streaming.unsupportedOperationCheck": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(settings.batch_rows),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.execution.arrow.useLargeVarTypes": "false",
    }


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

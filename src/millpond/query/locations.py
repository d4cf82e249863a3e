"""Where a query's checkpoint lies when the user did not say: where Spark would put it."""

from __future__ import annotations

import logging
import tempfile
import uuid

from pyspark.sql import SparkSession

log = logging.getLogger("millpond")

_WITHOUT_CHECKPOINT = frozenset({"memory", "foreach", "foreachBatch", "console", "noop"})
"""Sinks that Spark lets run in a temporary checkpoint."""


def choose_checkpoint(spark: SparkSession, sink: str, name: str | None, given: str | None) -> str | None:
    """The checkpoint location of a query.

    Args:
        spark: the query's session.
        sink: the sink's format, or `foreach`/`foreachBatch`.
        name: the query's name.
        given: the option `checkpointLocation`.

    Returns:
        The location, or None where Spark refuses to start without one.
    """
    if given is not None:
        return given
    base = spark.conf.get("spark.sql.streaming.checkpointLocation", None)
    if base is not None:
        return f"{base.rstrip('/')}/{name or uuid.uuid4()}"
    if sink not in _WITHOUT_CHECKPOINT:
        return None
    temporary = tempfile.mkdtemp(prefix="temporary-millpond-")
    log.warning(
        "no checkpointLocation: the query's progress and state are kept in %s and will not survive the application",
        temporary,
    )
    return temporary

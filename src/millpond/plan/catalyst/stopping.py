"""Final stop of a query when the program and its JVM end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext
from pyspark.sql.streaming.query import StreamingQuery

_LOG4J = "org.apache.logging.log4j"


def stop_at_exit(query: StreamingQuery, seconds: int) -> None:
    """Stop a query without Spark's log lines about the interruption.

    Args:
        query: a running query.
        seconds: the maximum time to wait for its thread.
    """
    query._jsq.sparkSession().conf().set("spark.sql.streaming.stopTimeout", f"{seconds}s")
    with _silent():
        query.stop()


@contextmanager
def _silent() -> Iterator[None]:
    """Turn Spark's log off; loggers whose level the user has set are unchanged."""
    jvm: Any = SparkContext._jvm
    configurator = getattr(jvm, f"{_LOG4J}.core.config.Configurator")
    level = getattr(jvm, f"{_LOG4J}.LogManager").getRootLogger().getLevel()
    configurator.setRootLevel(getattr(jvm, f"{_LOG4J}.Level").OFF)
    try:
        yield
    finally:
        configurator.setRootLevel(level)

"""Stopping a query for good, because the program and its JVM end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext
from pyspark.sql.streaming.query import StreamingQuery

_LOG4J = "org.apache.logging.log4j"


def stop_at_exit(query: StreamingQuery, seconds: int) -> None:
    """Stop a query, without log lines of Spark on what that interrupts.

    Args:
        query: one that runs. seconds: how long to wait for its thread at most.
    """
    query._jsq.sparkSession().conf().set("spark.sql.streaming.stopTimeout", f"{seconds}s")
    with _silent():
        query.stop()


@contextmanager
def _silent() -> Iterator[None]:
    """Turn Spark's log off; loggers to which the user has given levels of their own are left alone."""
    jvm: Any = SparkContext._jvm
    configurator = getattr(jvm, f"{_LOG4J}.core.config.Configurator")
    level = getattr(jvm, f"{_LOG4J}.LogManager").getRootLogger().getLevel()
    configurator.setRootLevel(getattr(jvm, f"{_LOG4J}.Level").OFF)
    try:
        yield
    finally:
        configurator.setRootLevel(level)

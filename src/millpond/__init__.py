"""Millpond: a state engine for PySpark Structured Streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millpond.query.writer import StreamWriter

__all__ = ["writeStream"]


def writeStream(df: DataFrame) -> StreamWriter:
    """Write a streaming DataFrame, with its state on Millpond: use it where `df.writeStream` stood.

    Args:
        df: any streaming DataFrame of a classic (not Spark Connect) session.

    Returns:
        Spark's `DataStreamWriter`, whose `start()` gives Spark's own `StreamingQuery`.
    """
    from millpond.query.writer import StreamWriter

    return StreamWriter(df)

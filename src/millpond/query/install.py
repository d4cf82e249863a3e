"""Replacement of `df.writeStream` itself, for frameworks that call it themselves."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millpond.plan.catalyst.session import session_id
from millpond.query.starting.checks import check_spark
from millpond.query.writer import StreamWriter

_MARK = "_millpond_sessions"


def install_session(spark: SparkSession) -> None:
    """Install Millpond for one session; a repeated call has no effect.

    Raises:
        UsageError: the session cannot run Millpond.
    """
    check_spark(spark)
    kind: Any = type(spark.range(0))
    sessions: set[str] | None = getattr(kind, _MARK, None)
    if sessions is None:
        sessions = set()
        setattr(kind, _MARK, sessions)
        kind.writeStream = property(_write_stream, doc=kind.writeStream.__doc__)
    sessions.add(_identity(spark))


def _write_stream(df: DataFrame) -> DataStreamWriter:
    sessions: set[str] = getattr(type(df), _MARK)
    return StreamWriter(df) if _identity(df.sparkSession) in sessions else DataStreamWriter(df)


def _identity(spark: SparkSession) -> str:
    return session_id(spark)

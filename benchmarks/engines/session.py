"""Spark sessions with settings that the benchmarks share, and the progress of their queries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
}


def start_session(master: str, name: str, settings: Mapping[str, str]) -> SparkSession:
    """Start a session; `settings` come on top of those that all engines share."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master(master).appName(name).config(map={**_SETTINGS, **settings}).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def progress_reports(query: StreamingQuery) -> list[dict[str, Any]]:
    """Return Spark's progress reports of all batches that had rows.

    Raises:
        StreamingQueryException: the query has failed.
    """
    if (failure := query.exception()) is not None:
        raise failure
    reports = (json.loads(progress.json) for progress in query.recentProgress)
    return [report for report in reports if report["numInputRows"]]

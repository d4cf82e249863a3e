"""A click stream of many users, and a query for the busy ones, dominated by the cost of state.

Draws are those of `draws`: Spark computes a click from its number, so that every engine reads the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.workloads.draws import bits_sql, draw_sql
from millpond.workloads.nexmark import NexmarkConfig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WATERMARK = "2 seconds"
BUSY = 4
"""Minimum number of clicks in a window that makes a user busy."""
_SEED, _USER, _DWELL = 1, 1, 2


def clicks(numbered: DataFrame, rate: int, users: int) -> DataFrame:
    """Compute clicks, ordered by time: `user`, `dwell` (milliseconds on the page) and `time`.

    Args:
        numbered: the event numbers, in column `n`.
        rate: clicks per second of event time.
        users: number of users, all equally active.
    """
    user = f"{draw_sql('n', _SEED, _USER)} % {users}L as user"
    dwell = f"{bits_sql(draw_sql('n', _SEED, _DWELL), 0, 14)} as dwell"
    time = f"timestamp_millis({NexmarkConfig().base_time_ms}L + n * 1000 div {rate}) as time"
    return numbered.selectExpr(user, dwell, time).withWatermark("time", WATERMARK)


def busy(clicks: DataFrame) -> DataFrame:
    """Find busy users in windows of ten seconds, every two seconds: clicks and total dwell time."""
    from pyspark.sql import functions as f

    by_user = clicks.groupBy(f.window("time", "10 seconds", "2 seconds"), "user")
    counts = by_user.agg(f.count("*").alias("clicks"), f.sum("dwell").alias("dwell"))
    return counts.where(f.col("clicks") >= BUSY).select("user", "clicks", "dwell", f.col("window.end").alias("until"))

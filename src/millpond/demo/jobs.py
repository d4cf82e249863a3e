"""The demo's query, and where it finds others."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CLICKS = "clicks"
LEFT_OUT = 3
"""Number of first batches that are not counted: they start plans and Python workers, and the JVM is cold."""
LEAST_BATCHES = LEFT_OUT + 5
"""Smallest number of batches before the kill: a slow machine runs fewer batches instead of a longer demo."""
BUSY = 4
"""Minimum number of clicks in a window that makes a user busy."""


class Size(msgspec.Struct, frozen=True):
    """The size of a job: events in a batch, and batches.

    The first engine is killed after `seconds_before_kill` even if batches are missing; the other engine then runs the
    same batches.
    """

    rows_per_batch: int
    before_kill: int
    after_kill: int
    seconds_before_kill: float


class Job(msgspec.Struct, frozen=True):
    """One streaming query: the texts about it, its output mode, its size.

    `unit` is the noun for its input rows; `rows` makes results of events, which have their numbers in column `n`.
    """

    name: str
    title: str
    about: str
    unit: str
    mode: str
    size: Size
    rows: Callable[[DataFrame], DataFrame]
    source: str


# Spark processes about 30,000 clicks a second on two cores: 8 s a batch. Smaller batches would measure the fixed cost
# of a batch; more batches would take longer than two and a half minutes.
CLICKS_SIZE = Size(rows_per_batch=250_000, before_kill=8, after_kill=2, seconds_before_kill=80.0)
# A batch is two seconds of event time, so that each batch closes one window. A user clicks once in eight seconds on
# average: with the size above, there are a million users, at 125,000 clicks a second. A smaller size has fewer users.
_BATCH_SECONDS, _USER_SECONDS = 2, 8


def find(name: str, rows_per_batch: int = 0) -> Job:
    """Return a job by name.

    Args:
        name: `clicks`, or the name of a NEXMark query.
        rows_per_batch: the number of events in a batch; 0: that of the job's own size.

    Raises:
        UsageError: the job does not exist, or Spark does not run it as a stream with deterministic rows.
    """
    if name != CLICKS:
        job: Job = import_benchmarks("nexmark.jobs").find(name)
        return job
    rate = (rows_per_batch or CLICKS_SIZE.rows_per_batch) // _BATCH_SECONDS
    users = rate * _USER_SECONDS
    return Job(
        name=CLICKS,
        title=f"Busy users among {'a million' if users == 1_000_000 else f'{users:,}'}, in sliding windows",
        about=f"Users with {BUSY} clicks or more within the last 10 seconds, every 2 seconds, and how long they stayed"
        f" on their pages. {users:,} users; each click counts in five windows.",
        unit="clicks",
        mode="append",
        size=CLICKS_SIZE,
        rows=lambda numbered: busy(clicks(numbered, rate, users)),
        source=inspect.getsource(busy),
    )


def clicks(numbered: DataFrame, rate: int, users: int) -> DataFrame:
    """Compute clicks from their numbers, so that each engine and each run reads the same rows.

    Args:
        numbered: the event numbers, in column `n`.
        rate: clicks per second of event time.
        users: number of users, all equally active; `dwell` is their milliseconds on a page.
    """
    user = f"shiftrightunsigned(xxhash64(1001L, n), 1) % {users}L as user"
    dwell = "shiftrightunsigned(xxhash64(1002L, n), 1) & 16383L as dwell"
    time = f"timestamp_millis(1436918400000L + n * 1000 div {rate}) as time"
    return numbered.selectExpr(user, dwell, time).withWatermark("time", "2 seconds")


def busy(clicks: DataFrame) -> DataFrame:
    """Find busy users in windows of ten seconds, every two seconds: clicks and total dwell time."""
    from pyspark.sql import functions as f

    by_user = clicks.groupBy(f.window("time", "10 seconds", "2 seconds"), "user")
    counts = by_user.agg(f.count("*").alias("clicks"), f.sum("dwell").alias("dwell"))
    return counts.where(f.col("clicks") >= BUSY).select("user", "clicks", "dwell", f.col("window.end").alias("until"))


def import_benchmarks(module: str) -> Any:
    """Import a module of the benchmarks, which are part of the source tree, not of the wheel.

    Raises:
        UsageError: this is not an installation of a source tree.
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise UsageError(
            "NEXMark and the benchmarks are in Millpond's source tree, which this installation does not come from.",
            action="Clone the repository, run `make setup` there, and use its `millpond`.",
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(f"benchmarks.{module}")

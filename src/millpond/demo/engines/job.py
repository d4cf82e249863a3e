"""The queries of the demo, and all of their sizes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from millpond.errors import UsageError
from millpond.workloads import clicks
from millpond.workloads.nexmark import NexmarkConfig
from millpond.workloads.queries import QUERIES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEFT_OUT = 3
"""Number of first batches that are not counted: they start plans and Python workers, and the JVM is cold."""
LEAST_BATCHES = LEFT_OUT + 5
"""Smallest number of batches before the kill: a slow machine runs fewer batches instead of a longer demo."""
CLICKS = "clicks"


class Size(msgspec.Struct, frozen=True):
    """The size of a job.

    Attributes:
        rows_per_batch: the number of events in a batch.
        before_kill: the number of batches before the kill.
        after_kill: the number of batches after the kill.
        seconds_before_kill: the time after which the first engine is killed, even if batches are missing; the other
            engine then runs the same batches.
    """

    rows_per_batch: int
    before_kill: int
    after_kill: int
    seconds_before_kill: float


# Spark processes about 30,000 clicks a second on two cores: 8 s a batch. Smaller batches would measure the fixed cost
# of a batch; more batches would take longer than two and a half minutes.
CLICKS_SIZE = Size(rows_per_batch=250_000, before_kill=8, after_kill=2, seconds_before_kill=80.0)
# A batch is two seconds of event time, so that each batch closes one window. A user clicks once in eight seconds on
# average: with the size above, there are a million users, at 125,000 clicks a second. A smaller size has fewer users.
CLICKS_BATCH_SECONDS, CLICKS_USER_SECONDS = 2, 8
NEXMARK_SIZE = Size(rows_per_batch=400_000, before_kill=20, after_kill=3, seconds_before_kill=12.0)
NEXMARK_RATE = 1_000


class Job(msgspec.Struct, frozen=True):
    """One streaming query.

    Attributes:
        name: its name in `--query`.
        title: its headline.
        about: its description in one sentence.
        unit: the noun for its input rows.
        mode: its output mode.
        size: its size in the demo.
        rows: the function from events, with their numbers in column `n`, to results.
        source: the source code of the query.
    """

    name: str
    title: str
    about: str
    unit: str
    mode: str
    size: Size
    rows: Callable[[DataFrame], DataFrame]
    source: str


def find(name: str, rows_per_batch: int = 0) -> Job:
    """Return a job by name.

    Args:
        name: `clicks`, or the name of a NEXMark query.
        rows_per_batch: the number of events in a batch; 0: that of the job's own size.

    Raises:
        UsageError: the job does not exist, or Spark does not run it as a stream with deterministic rows.
    """
    if name == CLICKS:
        return _clicks(rows_per_batch or CLICKS_SIZE.rows_per_batch)
    if name not in QUERIES or _refusal(name):
        known = ", ".join([CLICKS, *(query_name for query_name in QUERIES if not _refusal(query_name))])
        reason = _refusal(name) if name in QUERIES else "there is no such query"
        raise UsageError(f"The demo cannot run {name!r}: {reason}.", action=f"Choose one of {known}.")
    query = QUERIES[name]
    return Job(
        name=name,
        title=f"NEXMark {name}",
        about=query.about,
        unit="events",
        mode=query.mode,
        size=NEXMARK_SIZE,
        rows=lambda numbered: query.over(numbered, NexmarkConfig(rate=NEXMARK_RATE)),
        source=inspect.getsource(query.function),
    )


def _clicks(rows_per_batch: int) -> Job:
    rate = rows_per_batch // CLICKS_BATCH_SECONDS
    users = rate * CLICKS_USER_SECONDS
    return Job(
        name=CLICKS,
        title=f"Busy users among {'a million' if users == 1_000_000 else f'{users:,}'}, in sliding windows",
        about=f"Users with {clicks.BUSY} clicks or more within the last 10 seconds, every 2 seconds, and how long"
        f" they stayed on their pages. {users:,} users; each click counts in five windows.",
        unit="clicks",
        mode="append",
        size=CLICKS_SIZE,
        rows=lambda numbered: clicks.busy(clicks.clicks(numbered, rate, users)),
        source=inspect.getsource(clicks.busy),
    )


def _refusal(name: str) -> str:
    """Return why the rows of a NEXMark query cannot be compared batch by batch; empty if they can."""
    query = QUERIES[name]
    if query.mode not in query.native:
        return "Spark's own state store does not run it"
    return "its rows are not the same each time" if query.determined else ""

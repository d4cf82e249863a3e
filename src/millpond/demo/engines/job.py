"""What the demo runs, and how much of it: every size is here."""

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
"""The first batches of an engine do not count: they start Spark's plans, Python's workers, and the JVM is cold."""
LEAST_BATCHES = LEFT_OUT + 5
"""A slow machine does fewer batches before the kill instead of taking longer, but not fewer than these."""
CLICKS = "clicks"


class Size(msgspec.Struct, frozen=True):
    """How much of a job is run.

    Attributes:
        rows_per_batch: events of a batch.
        before_kill, after_kill: batches before the kill and after it.
        seconds_before_kill: the first engine is killed once it has worked for so long, even if batches are missing;
            the other then does the same batches.
    """

    rows_per_batch: int
    before_kill: int
    after_kill: int
    seconds_before_kill: float


# Spark does some 30,000 clicks a second on two cores: 8 s a batch. Smaller batches would measure what a batch costs,
# whatever is in it; more of them would take more than two minutes and a half.
CLICKS_SIZE = Size(rows_per_batch=250_000, before_kill=8, after_kill=2, seconds_before_kill=80.0)
# A batch is two seconds of event time, so that each closes one window, and a user clicks once in eight seconds, in the
# mean: with the size above, a million users, at 125,000 clicks a second. A smaller size has fewer users.
CLICKS_BATCH_SECONDS, CLICKS_USER_SECONDS = 2, 8
NEXMARK_SIZE = Size(rows_per_batch=400_000, before_kill=20, after_kill=3, seconds_before_kill=12.0)
NEXMARK_RATE = 1_000


class Job(msgspec.Struct, frozen=True):
    """One streaming query.

    Attributes:
        name: what `--query` calls it.
        title: what it does, for a headline; `about` in a sentence.
        unit: what its rows are.
        mode: output mode.
        size: how much of it the demo runs.
        rows: the result over the events with the numbers in column `n`.
        source: the query's program text.
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
    """The job of this name: `clicks`, or a NEXMark query.

    Args:
        rows_per_batch: events of a batch, if not those of the job's own size.

    Raises:
        UsageError: there is none, or Spark does not run it as a stream with rows that are the same each time.
    """
    if name == CLICKS:
        return _clicks(rows_per_batch or CLICKS_SIZE.rows_per_batch)
    if name not in QUERIES or _refusal(name):
        known = ", ".join([CLICKS, *(each for each in QUERIES if not _refusal(each))])
        why = _refusal(name) if name in QUERIES else "there is no such query"
        raise UsageError(f"The demo cannot run {name!r}: {why}.", action=f"Choose one of {known}.")
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
    """Why two engines' rows of a NEXMark query cannot be compared batch by batch, if so."""
    query = QUERIES[name]
    if query.mode not in query.native:
        return "Spark's own state store does not run it"
    return "its rows are not the same each time" if query.determined else ""

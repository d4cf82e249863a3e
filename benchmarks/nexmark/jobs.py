"""NEXMark queries as jobs of `millpond demo`."""

from __future__ import annotations

import inspect

from benchmarks.nexmark.generator import NexmarkConfig
from benchmarks.nexmark.queries import QUERIES
from millpond.demo.jobs import CLICKS, Job, Size
from millpond.errors import UsageError

SIZE = Size(rows_per_batch=400_000, before_kill=20, after_kill=3, seconds_before_kill=12.0)
RATE = 1_000
"""Events per second of event time."""


def find(name: str) -> Job:
    """Return a query as a job.

    Raises:
        UsageError: the query does not exist, or Spark does not run it as a stream with deterministic rows.
    """
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
        size=SIZE,
        rows=lambda numbered: query.over(numbered, NexmarkConfig(rate=RATE)),
        source=inspect.getsource(query.function),
    )


def _refusal(name: str) -> str:
    """Return why the rows of a query cannot be compared batch by batch; empty if they can."""
    query = QUERIES[name]
    if query.mode not in query.native:
        return "Spark's own state store does not run it"
    return "its rows are not the same each time" if query.determined else ""

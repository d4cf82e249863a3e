"""Counts of a query since its start, from Spark's progress events, of which there is one for each batch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from millpond.metrics import (
    ADDED_METRICS,
    COMPACTION_METRICS,
    MOVED,
    REQUEST_METRICS,
    TIER_METRICS,
    WAITING,
    observation_name,
)

_SUMMED = {*REQUEST_METRICS, *TIER_METRICS, *COMPACTION_METRICS, MOVED}


@dataclass
class Counts:
    """Batches and metrics of one run of a query. Readers hold `lock`.

    Attributes:
        operators: the number of operators of the query.
        restarts: the starts after lost hosts that led to this run, by reason (`checkpoint.generation.Restart`).
        batches: the number of finished batches.
        seconds: the total time of these batches.
        last_seconds: the time of the last batch.
        totals: for each operator, the sums of its metrics over batches.
        last: for each operator, the metrics of the last batch.
        requests: the sums of the metrics of requests, tiers, compactions and moves over batches and operators; empty
            for state on a disk without `compaction=remote` on one host.
        waiting: compactions that wait for a compactor after the last batch.
    """

    operators: int
    restarts: Mapping[str, int] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    batches: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0
    totals: list[dict[str, float]] = field(init=False)
    last: list[dict[str, float]] = field(init=False)
    requests: dict[str, float] = field(default_factory=dict)
    waiting: float = 0.0

    def __post_init__(self) -> None:
        self.totals = [dict.fromkeys(ADDED_METRICS, 0.0) for _ in range(self.operators)]
        self.last = [{} for _ in range(self.operators)]
        self._last_counted = -1

    def add(self, progress: Any) -> None:
        """Count a batch (a `StreamingQueryProgress`), unless it was counted or no operator ran in it."""
        with self.lock:
            # The listener may report a batch that was read from `recentProgress` already.
            if progress.batchId <= self._last_counted or observation_name(0) not in progress.observedMetrics:
                return
            self._last_counted = progress.batchId
            self.batches += 1
            self.last_seconds = progress.durationMs["triggerExecution"] / 1000
            self.seconds += self.last_seconds
            self.waiting = 0.0
            for index, totals in enumerate(self.totals):
                row = progress.observedMetrics.get(observation_name(index))
                metrics = {} if row is None else {name: float(value or 0) for name, value in row.asDict().items()}
                self.last[index] = metrics
                for name in ADDED_METRICS:
                    totals[name] += metrics.get(name, 0.0)
                for name in metrics.keys() & _SUMMED:
                    self.requests[name] = self.requests.get(name, 0.0) + metrics[name]
                self.waiting += metrics.get(WAITING, 0.0)


class CountingListener(StreamingQueryListener):  # type: ignore[misc]
    """Listener that counts the batches of one query.

    Args:
        query: the query's id.
        counts: the counts to update.
    """

    def __init__(self, query: str, counts: Counts) -> None:
        self._query = query
        self._counts = counts

    def onQueryStarted(self, event: Any) -> None:
        """Nothing is counted."""

    def onQueryProgress(self, event: Any) -> None:
        """Count a batch, if it is one of this query."""
        if str(event.progress.id) == self._query:
            self._counts.add(event.progress)

    def onQueryIdle(self, event: Any) -> None:
        """Nothing is counted."""

    def onQueryTerminated(self, event: Any) -> None:
        """Nothing is counted: the endpoint's own thread removes a query that has ended."""

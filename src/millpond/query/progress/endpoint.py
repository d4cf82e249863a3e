"""HTTP endpoints in the driver that Prometheus scrapes: one for each port in the settings of queries.

An endpoint listens while a query uses it. At a scrape, it reads checkpoints and asks slots. Between scrapes, it costs a
query one progress event for each batch.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from millpond.checkpoint.generation import Restart
from millpond.conf import Settings
from millpond.errors import MillpondError, SettingError
from millpond.query.progress.counts import CountingListener, Counts
from millpond.query.progress.reader import Progress, ProgressReader
from millpond.query.running.companion import after
from millpond.slot.process.client import query_status
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import QueryStatus
from millpond.tasks.operator_task import OperatorTask

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger("millpond")

_SILENCE_SECONDS = 3.0

_endpoints: dict[tuple[str, int], Endpoint] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class _Query:
    """A query that an endpoint shows."""

    labels: tuple[str, str]
    titles: Sequence[str]
    counts: Counts
    task: OperatorTask
    checkpoint: str

    @cached_property
    def _reader(self) -> ProgressReader:
        # Opened at the first scrape: a store that fails at the start must not fail a query that runs.
        return ProgressReader(self.checkpoint)

    def progress(self) -> Progress | None:
        with suppress(MillpondError, OSError):
            return self._reader.read()
        return None

    def status(self) -> QueryStatus | None:
        with suppress(MillpondError):
            return query_status(SlotDirectory.of(self.task), self.task.key, _SILENCE_SECONDS)
        return None


class Endpoint:
    """An HTTP server and the queries that it shows. `endpoint_of` creates it."""

    def __init__(self, host: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self.users = 0
        self._queries: list[_Query] = []
        self._scraping = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)

    def describe(self) -> list[Metric]:
        """Return no metrics: they are known only at a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return all current metrics; prometheus-client calls this at a scrape."""
        from millpond.query.progress.families import ScrapedQuery, families

        with self._scraping:
            queries = [
                ScrapedQuery(q.labels, q.titles, q.counts, q.progress(), q.status()) for q in tuple(self._queries)
            ]
        return families(queries)

    def show(
        self,
        query: StreamingQuery,
        spark: SparkSession,
        checkpoint: str,
        tasks: Sequence[OperatorTask],
        titles: Sequence[str],
        restarts: Sequence[Restart],
    ) -> None:
        """Show a query until it ends.

        Args:
            query: the running query.
            spark: its session.
            checkpoint: URL of its checkpoint.
            tasks: its operators.
            titles: their titles, in the same order.
            restarts: its starts after lost hosts until now.
        """
        counts = Counts(len(tasks), Counter(restart.reason for restart in restarts))
        listener = CountingListener(str(query.id), counts)
        with counts.lock:  # count earlier batches before those that the listener gets
            spark.streams.addListener(listener)
            for progress in query.recentProgress:
                counts.add(progress)
        shown = _Query((str(query.id), query.name or ""), titles, counts, tasks[0], checkpoint)
        self._queries.append(shown)
        with _lock:
            self.users += 1

        def remove(error: Exception | None) -> None:
            try:
                spark.streams.removeListener(listener)
            except Exception as failure:  # the JVM is gone
                log.debug("the listener of a query that has ended was not removed: %s", failure)
            self._queries.remove(shown)
            _release(self)

        after(query, "millpond-prometheus", remove).start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def endpoint_of(settings: Settings) -> Iterator[Endpoint | None]:
    """Yield the endpoint of the settings, or None without one. After this context, it stays for the queries it shows.

    Raises:
        SettingError: prometheus-client is not installed, or the port cannot be bound.
    """
    if settings.metrics_port is None:
        yield None
        return
    endpoint = _acquire(settings.metrics_host, settings.metrics_port)
    try:
        yield endpoint
    finally:
        _release(endpoint)


def _acquire(host: str, port: int) -> Endpoint:
    with _lock:
        endpoint = _endpoints.get((host, port))
        if endpoint is None:
            try:
                endpoint = _endpoints[host, port] = Endpoint(host, port)
            except ImportError as error:
                raise SettingError(
                    "spark.millpond.metrics.port needs the package prometheus-client.",
                    action="Install it: pip install prometheus-client (or Millpond with its extra `prometheus`).",
                ) from error
            except OSError as error:
                raise SettingError(
                    f"Metrics cannot be shown on {host}:{port}: {error.strerror or error}.",
                    action="Set spark.millpond.metrics.port to a free port, or leave it out.",
                ) from error
        endpoint.users += 1
        return endpoint


def _release(endpoint: Endpoint) -> None:
    with _lock:
        endpoint.users -= 1
        if endpoint.users:
            return
        for address in [address for address, other in _endpoints.items() if other is endpoint]:
            del _endpoints[address]
        # Under the lock: a query that starts now must not get an endpoint whose port is being closed.
        endpoint.close()

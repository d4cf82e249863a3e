"""Metric families of an endpoint. This module requires prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from millpond.checkpoint.generation import RestartReason
from millpond.metrics import ADDED_METRICS, MOVED, REQUEST_PRICES, WAITING, description
from millpond.query.progress.counts import Counts
from millpond.query.progress.reader import Progress
from millpond.slot.process.messages import QueryStatus

_QUERY = ("query_id", "query_name")
_OPERATOR = (*_QUERY, "operator")


@dataclass(frozen=True)
class ScrapedQuery:
    """A query at a scrape.

    Attributes:
        labels: its id and name.
        titles: the titles of its operators.
        counts: its counts since its start.
        progress: its progress from its checkpoint; None if that could not be read.
        status: its status in its slots on this host; None if they did not answer.
    """

    labels: tuple[str, str]
    titles: Sequence[str]
    counts: Counts
    progress: Progress | None
    status: QueryStatus | None


def families(queries: Sequence[ScrapedQuery]) -> Iterator[Metric]:
    """Return all metrics of queries; a value that is not known now has no sample."""
    batches = SummaryMetricFamily("millpond_batch_seconds", "Batches, and the seconds they took.", labels=_QUERY)
    last = GaugeMetricFamily("millpond_last_batch_seconds", "Seconds that the last batch took.", labels=_QUERY)
    lag = GaugeMetricFamily(
        "millpond_commit_lag_versions", "Versions by which durable state is behind Spark's commit log.", labels=_QUERY
    )
    failed = CounterMetricFamily(
        "millpond_failed_commits", "Tries to commit that failed, of slots on the driver's host.", labels=_QUERY
    )
    requests = CounterMetricFamily(
        "millpond_requests", "Requests of slots to the object store with the state.", labels=(*_QUERY, "kind")
    )
    sent = CounterMetricFamily(
        "millpond_request_bytes", "Bytes that slots have put there, and got.", labels=(*_QUERY, "kind")
    )
    hedges = CounterMetricFamily(
        "millpond_hedged_requests", "Requests that were made a second time, as the first took long.", labels=_QUERY
    )
    blocks = CounterMetricFamily(
        "millpond_blocks", "Blocks of files that were read, by the tier that had them.", labels=(*_QUERY, "tier")
    )
    copied = CounterMetricFamily(
        "millpond_copied_bytes", "Bytes of local copies that were made of files in the object store.", labels=_QUERY
    )
    waiting = GaugeMetricFamily(
        "millpond_waiting_compactions", "Compactions that waited for a compactor after the last batch.", labels=_QUERY
    )
    compactions = CounterMetricFamily(
        "millpond_compactions",
        "Compactions that compactors were asked for, by who has done them.",
        labels=(*_QUERY, "by"),
    )
    compacted = CounterMetricFamily(
        "millpond_remote_compacted_bytes", "Bytes of the files that compactors have made for the query.", labels=_QUERY
    )
    compacting = CounterMetricFamily(
        "millpond_compaction_seconds", "Processor time of compactions in slots.", labels=_QUERY
    )
    moved = CounterMetricFamily("millpond_moved_partitions", description(MOVED), labels=_QUERY)
    hosts = GaugeMetricFamily(
        "millpond_host_partitions",
        "Partitions that ran on the host, of the newest durable version.",
        labels=(*_QUERY, "host"),
    )
    restarts = CounterMetricFamily(
        "millpond_restarts",
        "Starts of the query by its application after lost hosts, by reason.",
        labels=(*_QUERY, "reason"),
    )
    for query in queries:
        with query.counts.lock:
            if MOVED in query.counts.requests:
                moved.add_metric(query.labels, query.counts.requests[MOVED])
                for reason in get_args(RestartReason):
                    restarts.add_metric((*query.labels, reason), query.counts.restarts.get(reason, 0))
            if WAITING in query.counts.requests:
                waiting.add_metric(query.labels, query.counts.waiting)
                compactions.add_metric((*query.labels, "compactor"), query.counts.requests["remote_compactions"])
                compactions.add_metric((*query.labels, "slot"), query.counts.requests["local_compactions"])
                compacted.add_metric(query.labels, query.counts.requests["remote_compacted_bytes"])
                compacting.add_metric(query.labels, query.counts.requests["compaction_ms"] / 1000)
            if "hedges" in query.counts.requests:
                hedges.add_metric(query.labels, query.counts.requests["hedges"])
                for tier in ("memory", "disk", "remote"):
                    blocks.add_metric((*query.labels, tier), query.counts.requests[f"{tier}_blocks"])
                copied.add_metric(query.labels, query.counts.requests["copied_bytes"])
                for name in REQUEST_PRICES:
                    requests.add_metric((*query.labels, name.removesuffix("s")), query.counts.requests[name])
                for kind in ("put", "get"):
                    sent.add_metric((*query.labels, kind), query.counts.requests[f"{kind}_bytes"])
            batches.add_metric(query.labels, query.counts.batches, query.counts.seconds)
            if query.counts.batches:
                last.add_metric(query.labels, query.counts.last_seconds)
        if query.progress is not None:
            lag.add_metric(query.labels, query.progress.commit_lag)
            for host, partitions in query.progress.hosts.items():
                hosts.add_metric((*query.labels, host), partitions)
        if query.status is not None:
            failed.add_metric(query.labels, query.status.failed_commits)
    yield from (batches, last, lag, failed, requests, sent, hedges, blocks, copied)
    yield from (waiting, compactions, compacted, compacting, moved, hosts, restarts)
    yield from _of_operators(queries)


def _of_operators(queries: Sequence[ScrapedQuery]) -> Iterator[Metric]:
    info = GaugeMetricFamily("millpond_operator_info", "What the operator is; always 1.", labels=(*_OPERATOR, "title"))
    counters = {
        name: CounterMetricFamily(f"millpond_{name}", description(name), labels=_OPERATOR) for name in ADDED_METRICS
    }
    rows = GaugeMetricFamily("millpond_state_rows", "Keys held.", labels=_OPERATOR)
    memory = GaugeMetricFamily("millpond_state_memory_bytes", "Bytes of the state in memory.", labels=_OPERATOR)
    files = GaugeMetricFamily("millpond_state_file_bytes", "Bytes of the state in files.", labels=_OPERATOR)
    wait = GaugeMetricFamily(
        "millpond_commit_wait_seconds", "Seconds that the last batch waited for the commit before.", labels=_OPERATOR
    )
    for query in queries:
        for index, title in enumerate(query.titles):
            labels = (*query.labels, str(index))
            info.add_metric((*labels, title), 1)
            with query.counts.lock:
                for name, family in counters.items():
                    family.add_metric(labels, query.counts.totals[index][name])
                metrics = query.counts.last[index]
            if metrics:
                rows.add_metric(labels, metrics["state_rows"])
                wait.add_metric(labels, metrics["commit_wait_ms"] / 1000)
            if query.progress is not None and query.progress.batches:
                durable = query.progress.batches[-1].operators[index]
                memory.add_metric(labels, durable.memory_bytes)
                files.add_metric(labels, durable.file_bytes)
    yield from (info, *counters.values(), rows, memory, files, wait)

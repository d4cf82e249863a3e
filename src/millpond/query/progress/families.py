"""The metrics by their names: what an endpoint answers, in the terms of prometheus-client, which this file needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from millpond.metrics import COUNTED, PRICES, WAITING
from millpond.query.progress.counts import Counts
from millpond.query.progress.reader import Progress
from millpond.slot.pipe.client import CommitHealth

_QUERY = ("query_id", "query_name")
_OPERATOR = (*_QUERY, "operator")

_COUNTERS = {
    "input_rows": "Rows that the operator read.",
    "output_rows": "Rows that the operator wrote.",
    "late_rows": "Rows that the operator dropped because they were late.",
    "cache_hits": "Keys that were looked for and were in memory.",
    "cache_misses": "Keys that had to be sought in files.",
}


@dataclass(frozen=True)
class Shown:
    """A query at a scrape.

    Attributes:
        labels: its id and name.
        titles: of its operators.
        counts: since its start.
        progress: what its checkpoint tells; None if it could not be read.
        health: what its slots on this host say of commits; None if they did not answer.
    """

    labels: tuple[str, str]
    titles: Sequence[str]
    counts: Counts
    progress: Progress | None
    health: CommitHealth | None


def families(queries: Sequence[Shown]) -> Iterator[Metric]:
    """All metrics of these queries; what is not known now has no sample."""
    batches = SummaryMetricFamily("millpond_batch_seconds", "Batches, and the seconds they took.", labels=_QUERY)
    last = GaugeMetricFamily("millpond_last_batch_seconds", "Seconds that the last batch took.", labels=_QUERY)
    lag = GaugeMetricFamily(
        "millpond_commit_lag_versions", "Versions by which durable state is behind Spark's ledger.", labels=_QUERY
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
    for one in queries:
        with one.counts.lock:
            if WAITING in one.counts.requests:
                waiting.add_metric(one.labels, one.counts.waiting)
                compactions.add_metric((*one.labels, "compactor"), one.counts.requests["remote_compactions"])
                compactions.add_metric((*one.labels, "slot"), one.counts.requests["local_compactions"])
                compacted.add_metric(one.labels, one.counts.requests["remote_compacted_bytes"])
                compacting.add_metric(one.labels, one.counts.requests["compaction_ms"] / 1000)
            if "hedges" in one.counts.requests:
                hedges.add_metric(one.labels, one.counts.requests["hedges"])
                for tier in ("memory", "disk", "remote"):
                    blocks.add_metric((*one.labels, tier), one.counts.requests[f"{tier}_blocks"])
                copied.add_metric(one.labels, one.counts.requests["copied_bytes"])
                for name in PRICES:
                    requests.add_metric((*one.labels, name.removesuffix("s")), one.counts.requests[name])
                for kind in ("put", "get"):
                    sent.add_metric((*one.labels, kind), one.counts.requests[f"{kind}_bytes"])
            batches.add_metric(one.labels, one.counts.batches, one.counts.seconds)
            if one.counts.batches:
                last.add_metric(one.labels, one.counts.last_seconds)
        if one.progress is not None:
            lag.add_metric(one.labels, one.progress.commit_lag)
        if one.health is not None:
            failed.add_metric(one.labels, one.health.failed)
    yield from (batches, last, lag, failed, requests, sent, hedges, blocks, copied)
    yield from (waiting, compactions, compacted, compacting)
    yield from _of_operators(queries)


def _of_operators(queries: Sequence[Shown]) -> Iterator[Metric]:
    info = GaugeMetricFamily("millpond_operator_info", "What the operator is; always 1.", labels=(*_OPERATOR, "title"))
    counters = {name: CounterMetricFamily(f"millpond_{name}", _COUNTERS[name], labels=_OPERATOR) for name in COUNTED}
    rows = GaugeMetricFamily("millpond_state_rows", "Keys held.", labels=_OPERATOR)
    memory = GaugeMetricFamily("millpond_state_memory_bytes", "Bytes of the state in memory.", labels=_OPERATOR)
    files = GaugeMetricFamily("millpond_state_file_bytes", "Bytes of the state in files.", labels=_OPERATOR)
    wait = GaugeMetricFamily(
        "millpond_commit_wait_seconds", "Seconds that the last batch waited for the commit before.", labels=_OPERATOR
    )
    for one in queries:
        for index, title in enumerate(one.titles):
            labels = (*one.labels, str(index))
            info.add_metric((*labels, title), 1)
            with one.counts.lock:
                for name, family in counters.items():
                    family.add_metric(labels, one.counts.totals[index][name])
                figures = one.counts.last[index]
            if figures:
                rows.add_metric(labels, figures["state_rows"])
                wait.add_metric(labels, figures["commit_lag_ms"] / 1000)
            if one.progress is not None and one.progress.batches:
                durable = one.progress.batches[-1].operators[index]
                memory.add_metric(labels, durable.memory_bytes)
                files.add_metric(labels, durable.file_bytes)
    yield from (info, *counters.values(), rows, memory, files, wait)

"""The metrics that slots report with each batch: one record for each metric, and their path to Spark's listeners.

A slot's client ends its output with rows that are null but for one column, `__figure`. The rewritten plan observes that
column and filters the rows out again. Packing a metric's number and value into one nullable bigint keeps the cost for
ordinary rows at one null check per metric (about 8 ns a row and metric; a struct costs twice that, a string more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

METRIC_COLUMN = "__figure"
_BITS = 6


class Metric(NamedTuple):
    """One metric of an operator, in one batch.

    Attributes:
        name: as in Spark's `observedMetrics`.
        group: the operators that report it (see `GROUPS`).
        description: what it counts or measures.
        unit: the unit of its values.
        reducer: how the partitions' values are aggregated: `sum`, `max` or `min`.
        durable: whether the manifest of a partition keeps it, for readers outside of the application.
        scale: the factor that makes its values whole numbers.
    """

    name: str
    group: str
    description: str
    unit: str = "count"
    reducer: Callable[[Iterable[float]], float] = sum
    durable: bool = False
    scale: int = 1


GROUPS = {
    "every": "every operator",
    "combined": "aggregates whose rows Spark may combine before the exchange ([combining](guides/combining.md))",
    "lists": "sessions that keep rows until they close",
    "observed": "aggregates whose store is chosen while the query runs (`explain` says `observed`)",
    "hints": "operators whose keys may be prefetched ([prefetching](guides/prefetching.md#figures))",
    "lookups": "lookup joins ([figures](guides/enrichment.md#figures))",
    "processors": "processors of the user",
    "requests": "state on an object store: requests of the slots since their last report",
    "tiers": "state on an object store: blocks of runs (32 KiB) and their filters, by the tier that had them",
    "commit": "state on an object store",
    "compactions": "`spark.millpond.compaction=remote`: compactions since the slots' last report",
    "hosts": "queries on a cluster",
    "manifest": "kept in manifests only",
}
"""Groups of metrics, and the operators that report each group."""

FETCH = "fetch_ms"
LOOKAHEAD, PREFETCH, SLACK = "lookahead", "prefetch_ms", "slack_ms"
WAITING = "waiting_compactions"
MOVED, OPEN = "moved_partitions", "open_ms"

LOOKAHEADS = ("off", "exchange", "source, exchange", "stage, exchange")
"""Values of the metric `lookahead`; a stage is one of the user's plan (`millpond.lookahead`)."""

METRICS = (
    Metric("input_rows", "every", "rows that the operator read"),
    Metric("output_rows", "every", "rows that it wrote"),
    Metric("late_rows", "every", "rows that it dropped because they were late (Spark counts groups)", durable=True),
    Metric("state_rows", "every", "keys held", durable=True),
    Metric("state_bytes", "every", "the state in memory and in files; of a shared file, the partition's part", "bytes"),
    Metric("cache_hits", "every", "keys that were looked up and were in memory", durable=True),
    Metric("cache_misses", "every", "keys that had to be looked up in files", durable=True),
    Metric(
        "commit_wait_ms",
        "every",
        "how long the batch waited for the commit of the batch before (with `commit.mode=sync` for its own)",
        "ms",
        max,
    ),
    Metric("read_ahead_hits", "lists", "lists of rows on disk that were asked for and had been read ahead"),
    Metric("read_ahead_misses", "lists", "lists of rows on disk that were asked for and had not been read ahead"),
    Metric("fetched_rows", "lists", "rows read from disk, ahead of time or not"),
    Metric("taken_rows", "lists", "rows on disk that were asked for; fetched by taken rows is the read amplification"),
    Metric("appending", "observed", "partitions that append rows instead of keeping groups"),
    Metric("moved_rows", "observed", "appended rows that became groups in this batch"),
    Metric("left_rows", "observed", "appended rows that still have to become groups, about"),
    Metric("puts", "requests", "requests that put an object, or a part of a large one", durable=True),
    Metric("put_bytes", "requests", "bytes put", "bytes"),
    Metric("gets", "requests", "requests that read; ranges less than 1 MiB apart are one request", durable=True),
    Metric("get_bytes", "requests", "bytes read", "bytes"),
    Metric("lists", "requests", "pages of listings", durable=True),
    Metric("heads", "requests", "requests whether an object exists", durable=True),
    Metric(
        "request_cost", "requests", "their [list price](guides/state-on-s3.md#what-it-costs)", "micro-dollars", scale=10
    ),
    Metric("hedges", "requests", "reads that were sent a second time because the first answer took long"),
    Metric("memory_blocks", "tiers", "blocks read from the cache in memory", durable=True),
    Metric("disk_blocks", "tiers", "blocks read from local copies", durable=True),
    Metric("remote_blocks", "tiers", "blocks read from the object store", durable=True),
    Metric("copied_bytes", "tiers", "bytes of local copies made of files in the store", "bytes", durable=True),
    Metric("commit_ms", "commit", "how long the slot's last commit took, from sealed to durable", "ms", max),
    Metric(WAITING, "compactions", "compactions that wait for a compactor when the batch ends", durable=True),
    Metric("remote_compactions", "compactions", "compactions that compactors did", durable=True),
    Metric("local_compactions", "compactions", "compactions that slots did because no compactor did", durable=True),
    Metric("remote_compacted_bytes", "compactions", "files that compactors made", "bytes", durable=True),
    Metric("compaction_ms", "compactions", "processor time of compactions in slots", "ms", durable=True),
    Metric(
        MOVED,
        "hosts",
        "partitions that were opened while the query ran: their tasks moved to another host, or their slot had died",
        durable=True,
    ),
    Metric("restarts", "hosts", "how often the application has started the query again after lost hosts", reducer=max),
    Metric("called_keys", "processors", "keys with rows that the processor was called for"),
    Metric("due_timers", "processors", "timers that were due"),
    Metric("prefetched_keys", "hints", "keys that were not in memory and were read before their rows", durable=True),
    Metric("prefetched_used", "hints", "prefetched keys that the batch asked for", durable=True),
    Metric("dropped_hints", "hints", "hints that came too late or had no memory", durable=True),
    Metric("hint_bytes", "hints", "bytes of all hints", "bytes", durable=True),
    Metric(PREFETCH, "hints", "how long the longest prefetch took", "ms", max, durable=True),
    Metric(SLACK, "hints", "how long before the first row the first hint came", "ms", min, durable=True),
    Metric(
        LOOKAHEAD, "hints", f"who sends hints: {', '.join(map('`{}`'.format, LOOKAHEADS))}", "code", max, durable=True
    ),
    Metric("fetches", "lookups", "requests to the table", durable=True),
    Metric("fetched_keys", "lookups", "keys that the requests asked for", durable=True),
    Metric(FETCH, "lookups", "how long the slowest request took, with its retries", "ms", max, durable=True),
    Metric("announced_keys", "lookups", "requested keys that were hinted before their rows came", durable=True),
    Metric("failed_keys", "lookups", "keys that could not be looked up", durable=True),
    Metric("exchanged_rows", "combined", "rows that reached the slots, combined or not"),
    Metric("combined_rows", "combined", "rows of the source that were combined"),
    Metric("changed_rows", "combined", "rows of the state that the batch changed"),
    Metric("memory_bytes", "manifest", "the state in memory", "bytes", durable=True),
    Metric(
        "process_ms",
        "manifest",
        "from the first row to the last one processed, with waits for input",
        "ms",
        durable=True,
    ),
    Metric(OPEN, "manifest", "how long the state took to open before this batch", "ms", max, durable=True),
)
"""All metrics. A metric's position is its number between slot and plan, which are always of one version."""

_METRICS = {metric.name: metric for metric in METRICS}


def _group(*groups: str) -> tuple[str, ...]:
    return tuple(metric.name for metric in METRICS if metric.group in groups)


OPERATOR_METRICS = _group("every")
LIST_METRICS = _group("lists")
ADAPTIVE_METRICS = _group("observed")
REQUEST_METRICS = _group("requests")
TIER_METRICS = _group("tiers")
OBJECT_STORE_METRICS = _group("requests", "tiers", "commit")
COMPACTION_METRICS = _group("compactions")
HINT_METRICS = _group("hints")
PROCESSOR_METRICS = _group("processors")
HOST_METRICS = _group("hosts")
LOOKUP_METRICS = _group("lookups")
COMBINED_METRICS = _group("combined")
DURABLE_METRICS = tuple(metric.name for metric in METRICS if metric.durable)

ADDED_METRICS = ("input_rows", "output_rows", "late_rows", "cache_hits", "cache_misses")
"""Metrics of every operator that add up over batches."""

REQUEST_PRICES = {"puts": 5.0, "gets": 0.4, "lists": 5.0, "heads": 0.4}
"""Micro-dollars a request: the list price of S3 Standard in us-east-1 as of November 2026, 0.005 dollars for 1,000 PUT,
COPY, POST and LIST requests, 0.0004 for 1,000 of any other kind; deletions are free (https://aws.amazon.com/s3/pricing).
docs/guides/state-on-s3.md has the same figures."""


def observation_name(operator: int) -> str:
    """Return the name of an operator's metrics in Spark's `observedMetrics`."""
    return f"millpond-{operator}" if operator else "millpond"


def description(name: str) -> str:
    """Return a metric's description as a sentence."""
    sentence = _METRICS[name].description
    return f"{sentence[0].upper()}{sentence[1:]}."


def reducer(name: str) -> Callable[[Iterable[float]], float]:
    """Return how the partitions' values of a metric are aggregated: `sum`, `max` or `min`; `sum` for unknown names."""
    metric = _METRICS.get(name)
    return sum if metric is None else metric.reducer


def pack(metrics: Mapping[str, float]) -> list[int]:
    """Return the `__figure` values for one partition's metrics; unknown metrics are dropped."""
    return [
        round(metrics[metric.name] * metric.scale) << _BITS | number
        for number, metric in enumerate(METRICS)
        if metric.name in metrics and metric.group != "manifest"
    ]


def unpack_sql(name: str) -> str:
    """Return SQL that computes one metric from the column of the partitions' values."""
    metric = _METRICS[name]
    chosen = f"{METRIC_COLUMN} & {(1 << _BITS) - 1} = {METRICS.index(metric)}"
    value = f"if({chosen}, shiftright({METRIC_COLUMN}, {_BITS}), null)"
    total = f"{metric.reducer.__name__}({value})"
    return f"{total} / {metric.scale}" if metric.scale != 1 else total


def request_cost(metrics: Mapping[str, float]) -> float:
    """Return the cost of the requests that the metrics count, in micro-dollars."""
    return sum(price * metrics.get(name, 0.0) for name, price in REQUEST_PRICES.items())

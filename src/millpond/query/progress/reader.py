"""Progress of a query from its checkpoint, read from outside, without Spark and at no cost to the query.

Commits hold the metrics of their batch. Spark's offset log and commit log hold the times of plan and commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.checkpoint.generation import Restart
from millpond.errors import UsageError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import open_filesystem
from millpond.metrics import (
    COMPACTION_METRICS,
    HINT_METRICS,
    LOOKAHEAD,
    LOOKUP_METRICS,
    MOVED,
    OPEN,
    REQUEST_PRICES,
    TIER_METRICS,
    reducer,
)
from millpond.query.checkpoints.finding import find_state
from millpond.query.logs.query_logs import QueryLogs
from millpond.state_reader.reader import StateOperator, StateReader

_ADVICE = "Give the query's checkpointLocation, also if its state lies elsewhere."


@dataclass(frozen=True)
class OperatorProgress:
    """One operator in one batch, over all partitions.

    Attributes:
        title: the operator's title.
        rows: rows that it read.
        late_rows: the rows of these that it dropped as late.
        state_rows: keys in its state after the batch.
        memory_bytes: bytes of its state in memory.
        file_bytes: bytes of its state in files, deltas included; what partitions share counts once.
        cache_hits: keys that were in memory.
        cache_misses: keys that had to be looked up in files.
        prefetched: the metrics of hints (`millpond.metrics.HINT_METRICS`); empty without hints, or if an older version
            of Millpond wrote the commits.
        looked_up: the metrics of a lookup join's table (`millpond.metrics.LOOKUP_METRICS`); empty for other operators.
        seconds: its time in the slowest partition.
        requests: requests of slots to the object store by kind (`millpond.metrics.REQUEST_PRICES`), since the last
            report, which may have been that of another operator; empty for state on a disk.
        tiers: likewise, blocks by tier, and copied bytes (`millpond.metrics.TIER_METRICS`).
        compactions: likewise, also on a disk, the metrics of compactions (`millpond.metrics.COMPACTION_METRICS`).
        moved_partitions: its partitions that were opened in mid-run: their tasks moved, or their slot had died.
        open_seconds: how long the slowest partition took to open, if any was opened before this batch.
        hosts: number of partitions by the host that ran them, as Spark names it; empty under a local master.
    """

    title: str
    rows: int = 0
    late_rows: int = 0
    state_rows: int = 0
    memory_bytes: int = 0
    file_bytes: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    prefetched: Mapping[str, int] = field(default_factory=dict)
    looked_up: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    requests: Mapping[str, int] = field(default_factory=dict)
    tiers: Mapping[str, int] = field(default_factory=dict)
    compactions: Mapping[str, int] = field(default_factory=dict)
    moved_partitions: int = 0
    open_seconds: float = 0.0
    hosts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchProgress:
    """One batch whose state is durable in every partition.

    Attributes:
        batch: its number.
        seconds: the time from Spark's plan to Spark's commit; None if Spark's logs do not have both: the batch is not
            committed yet, was planned by an earlier run, or its entries were deleted.
        operators: the progress of each operator.
        planned: when Spark planned it, in seconds since the epoch; None likewise.
    """

    batch: int
    seconds: float | None
    operators: tuple[OperatorProgress, ...]
    planned: float | None = None

    @property
    def rows(self) -> int:
        """Input rows of the batch: those of the operator that read most, since one operator may feed another."""
        return max(operator.rows for operator in self.operators)

    @property
    def requests(self) -> dict[str, int]:
        """Requests to the object store by kind; empty for state on a disk."""
        return _summed_by_name([operator.requests for operator in self.operators])

    @property
    def tiers(self) -> dict[str, int]:
        """Blocks by tier, and copied bytes; empty for state on a disk."""
        return _summed_by_name([operator.tiers for operator in self.operators])

    @property
    def compactions(self) -> dict[str, int]:
        """Metrics of compactions; without `compaction=remote`, only the time."""
        return _summed_by_name([operator.compactions for operator in self.operators])


@dataclass(frozen=True)
class Progress:
    """A query at one moment.

    Attributes:
        state: URL of its state.
        generation: the generation of its newest run.
        partitions: the number of partitions of that run.
        planned: the last batch that Spark has planned; −1: no batch.
        committed: the last batch that Spark has committed; −1: no batch.
        durable: the newest version that every partition has; 0: no version yet.
        last: when Spark last wrote to its logs, in seconds since the epoch; None: never.
        batches: the last batches with their metrics, oldest first.
        started: when that run was started, in seconds since the epoch.
        restart: why its application has started it after lost hosts; None if the user has.
    """

    state: str
    generation: int
    partitions: int
    planned: int
    committed: int
    durable: int
    last: float | None
    batches: tuple[BatchProgress, ...]
    started: float = 0.0
    restart: Restart | None = None

    @property
    def hosts(self) -> Mapping[str, int]:
        """Partitions by host in the newest durable batch, of the first operator: all operators have one placement."""
        return self.batches[-1].operators[0].hosts if self.batches else {}

    @property
    def commit_lag(self) -> int:
        """Versions by which the durable state is behind Spark's commit log."""
        return max(0, self.committed + 1 - self.durable)


class ProgressReader:
    """Reader of the progress of one query.

    Args:
        checkpoint: the query's checkpoint location: a path or URL. It leads to the state also with
            `spark.millpond.state.location`. The state's own folder works, too, but has no logs of Spark, so that
            batches have no times.
        batches: the largest number of batches to show.

    Raises:
        UsageError: the location has no Millpond state.
    """

    def __init__(self, checkpoint: str, batches: int = 40) -> None:
        if not checkpoint.strip():
            raise UsageError("The location of the checkpoint is empty.", action=_ADVICE)
        self._files: FileSystem = open_filesystem(checkpoint)
        self._logs = QueryLogs(self._files)
        self.state = find_state(checkpoint)
        self._batches = batches
        self._known: dict[tuple[int, int], tuple[OperatorProgress, ...]] = {}  # by generation and version
        StateReader(self.state, action=_ADVICE)  # raises an error without state

    @property
    def has_logs(self) -> bool:
        """Whether the location is a checkpoint; a state folder outside of the checkpoint has no logs of Spark."""
        return self._logs.query_id() is not None

    def read(self) -> Progress:
        """Return the query's current progress; metrics from its commits are cached for the next call."""
        planned, committed = self._logs.entry_times("offsets"), self._logs.entry_times("commits")
        reader = StateReader(self.state)
        versions: list[int] = []
        for version in reversed(reader.known()):
            if len(versions) == self._batches:
                break
            if self._figures(reader, version):
                versions.append(version)
        generation = reader.claim.number
        self._known = {(generation, version): self._known[generation, version] for version in versions}
        batches = []
        for version in reversed(versions):
            start, end = planned.get(version - 1, 0.0), committed.get(version - 1)
            # A plan of an earlier run says nothing about how long this run's batch took.
            began = start if end is not None and start >= reader.claim.created else None
            seconds = None if began is None or end is None else end - began
            batches.append(BatchProgress(version - 1, seconds, self._known[generation, version], began))
        return Progress(
            state=reader.location,
            generation=generation,
            partitions=reader.partitions,
            planned=max(planned, default=-1),
            committed=max(committed, default=-1),
            durable=versions[0] if versions else 0,
            last=max([*planned.values(), *committed.values()], default=None),
            batches=tuple(batches),
            started=reader.claim.created,
            restart=reader.claim.restart,
        )

    def _figures(self, reader: StateReader, version: int) -> tuple[OperatorProgress, ...]:
        """Return the operators' progress at a version; empty if a partition does not have the version."""
        key = reader.claim.number, version
        if key not in self._known:
            manifests = reader.manifests(version)
            if len(manifests) < len(reader.operators) * reader.partitions:
                return ()
            self._known[key] = tuple(
                _operator_progress(operator, [manifests[operator.index, number] for number in range(reader.partitions)])
                for operator in reader.operators
            )
        return self._known[key]


def _operator_progress(operator: StateOperator, manifests: Sequence[PartitionManifest]) -> OperatorProgress:
    def total(name: str) -> int:
        return sum(manifest.metrics.get(name, 0) for manifest in manifests)

    def totals(names: Iterable[str]) -> dict[str, int]:
        return {name: total(name) for name in names if any(name in manifest.metrics for manifest in manifests)}

    def metrics(names: Iterable[str]) -> dict[str, int]:
        values_by_name = {
            name: [manifest.metrics[name] for manifest in manifests if name in manifest.metrics] for name in names
        }
        return {name: int(reducer(name)(values)) for name, values in values_by_name.items() if values}

    tables = [table for manifest in manifests for table in manifest.tables.values()]
    # After a rescale, partitions share files and deltas.
    runs = {run.name: run.bytes for table in tables for run in table.runs.runs if not run.pending}
    deltas = {(delta.commit, delta.offset): delta.length for table in tables for delta in table.deltas}
    return OperatorProgress(
        title=operator.title,
        rows=sum(manifest.input_rows for manifest in manifests),
        late_rows=total("late_rows"),
        state_rows=total("state_rows"),
        memory_bytes=total("memory_bytes"),
        file_bytes=sum(runs.values()) + sum(deltas.values()),
        cache_hits=total("cache_hits"),
        cache_misses=total("cache_misses"),
        prefetched=metrics(HINT_METRICS) if any(LOOKAHEAD in manifest.metrics for manifest in manifests) else {},
        looked_up=metrics(LOOKUP_METRICS),
        seconds=max(manifest.metrics.get("process_ms", 0) for manifest in manifests) / 1000,
        requests=totals(REQUEST_PRICES),
        tiers=totals(TIER_METRICS),
        compactions=totals(COMPACTION_METRICS),
        moved_partitions=total(MOVED),
        open_seconds=max(manifest.metrics.get(OPEN, 0) for manifest in manifests) / 1000,
        hosts=dict(sorted(Counter(manifest.host for manifest in manifests if manifest.host).items())),
    )


def _summed_by_name(metrics: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sum figures by name over the operators that have them."""
    names = dict.fromkeys(name for operator_figures in metrics for name in operator_figures)
    return {name: sum(operator_figures.get(name, 0) for operator_figures in metrics) for name in names}

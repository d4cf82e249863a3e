"""How a query gets on, as its checkpoint tells: read from outside, without Spark, at no cost to the query.

Commits hold the figures of the batch that made them, Spark's ledger when each batch was planned and done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.errors import UsageError
from millpond.files.backends.filesystem import FileSystem, open_filesystem
from millpond.metrics import AHEAD, COMPACTIONS, LOOKAHEAD, LOOKUPS, PRICES, TIERS, together
from millpond.query.ledger.finding import find_state
from millpond.query.ledger.ledger import Ledger
from millpond.slot.reading.reader import StateOperator, StateReader

_GIVE = "Give the query's checkpointLocation, also if its state lies elsewhere."


@dataclass(frozen=True)
class OperatorProgress:
    """One operator in one batch, over all partitions.

    Attributes:
        rows, late_rows: rows that it read; of them, those that it dropped as late.
        state_rows: keys held after the batch.
        memory_bytes, file_bytes: of the state in memory; in files, deltas included.
        cache_hits, cache_misses: keys that were in memory; that had to be sought in files.
        prefetched: keys that were not in memory and were read ahead, and what else `millpond.metrics.AHEAD` has of
            hints; empty if nobody announces keys, or a version of Millpond wrote the commits that does not tell.
        looked_up: what a lookup join asked of its table (`millpond.metrics.LOOKUPS`); empty for others.
        seconds: how long it took, in the partition that took longest.
        requests: of slots to the object store, by kind (those of `millpond.metrics.PRICES`), since the figures before,
            which may have been another operator's; empty if the state is on a disk.
        tiers: likewise: blocks by where they were read, and bytes copied (`millpond.metrics.TIERS`).
        compactions: likewise, also on a disk: what was compacted, and where (`millpond.metrics.COMPACTIONS`).
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


@dataclass(frozen=True)
class BatchProgress:
    """One batch whose state is durable in every partition.

    Attributes:
        seconds: from Spark's plan to Spark's commit; None where the ledger does not tell: the batch is not committed
            yet, was planned by an earlier run, or has been forgotten.
        planned: when Spark planned it, seconds since the epoch; None likewise.
    """

    batch: int
    seconds: float | None
    operators: tuple[OperatorProgress, ...]
    planned: float | None = None

    @property
    def rows(self) -> int:
        """Rows that went into the query's operators: those of the one that read most, as one may feed another."""
        return max(one.rows for one in self.operators)

    @property
    def requests(self) -> dict[str, int]:
        """Requests to the object store by kind; empty if the state is on a disk."""
        return _added([one.requests for one in self.operators])

    @property
    def tiers(self) -> dict[str, int]:
        """Blocks by where they were read, and bytes copied; empty if the state is on a disk."""
        return _added([one.tiers for one in self.operators])

    @property
    def compactions(self) -> dict[str, int]:
        """What was compacted, and where; only the time if compactors are not asked."""
        return _added([one.compactions for one in self.operators])


@dataclass(frozen=True)
class Progress:
    """A query at a moment.

    Attributes:
        state: URL of its state.
        generation, partitions: of its newest run.
        planned, committed: the last batch that Spark has planned, and committed; −1: none.
        durable: the newest version that every partition has; 0: none yet.
        last: when Spark last wrote to its ledger, seconds since the epoch; None: never.
        batches: the last few with their figures, oldest first.
    """

    state: str
    generation: int
    partitions: int
    planned: int
    committed: int
    durable: int
    last: float | None
    batches: tuple[BatchProgress, ...]

    @property
    def commit_lag(self) -> int:
        """Versions by which the durable state is behind Spark's ledger."""
        return max(0, self.committed + 1 - self.durable)


class ProgressReader:
    """Looks at one query, as often as it is asked.

    Args:
        checkpoint: the query's checkpoint location: a path or URL. With `spark.millpond.state.location`, the state is
            found from there; its own folder will do, too, but there is no ledger, so batches have no times.
        batches: how many of the last batches to tell of.

    Raises:
        UsageError: there is no Millpond state.
    """

    def __init__(self, checkpoint: str, batches: int = 40) -> None:
        if not checkpoint.strip():
            raise UsageError("The location of the checkpoint is empty.", action=_GIVE)
        self._files: FileSystem = open_filesystem(checkpoint)
        self._ledger = Ledger(self._files)
        self.state = find_state(checkpoint)
        self._batches = batches
        self._known: dict[tuple[int, int], tuple[OperatorProgress, ...]] = {}  # by generation and version
        StateReader(self.state, action=_GIVE)  # says so if there is none

    @property
    def has_ledger(self) -> bool:
        """Whether what was given is a checkpoint: the folder of its state, if that lies elsewhere, has no ledger."""
        return self._ledger.query_id() is not None

    def look(self) -> Progress:
        """The query now; what was read of its commits is kept for the next look."""
        planned, committed = self._ledger.written("offsets"), self._ledger.written("commits")
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
        )

    def _figures(self, reader: StateReader, version: int) -> tuple[OperatorProgress, ...]:
        """The operators' figures at a version; empty if some partition does not have it."""
        key = reader.claim.number, version
        if key not in self._known:
            found = reader.manifests(version)
            if len(found) < len(reader.operators) * reader.partitions:
                return ()
            self._known[key] = tuple(
                _summed(operator, [found[operator.index, number] for number in range(reader.partitions)])
                for operator in reader.operators
            )
        return self._known[key]


def _summed(operator: StateOperator, manifests: Sequence[PartitionManifest]) -> OperatorProgress:
    def total(name: str) -> int:
        return sum(manifest.metrics.get(name, 0) for manifest in manifests)

    def totals(names: Iterable[str]) -> dict[str, int]:
        return {name: total(name) for name in names if any(name in manifest.metrics for manifest in manifests)}

    def figures(names: Iterable[str]) -> dict[str, int]:
        found = {name: [one.metrics[name] for one in manifests if name in one.metrics] for name in names}
        return {name: together(name)(values) for name, values in found.items() if values}

    tables = [table for manifest in manifests for table in manifest.tables.values()]
    return OperatorProgress(
        title=operator.title,
        rows=sum(manifest.input_rows for manifest in manifests),
        late_rows=total("late_rows"),
        state_rows=total("state_rows"),
        memory_bytes=total("memory_bytes"),
        file_bytes=sum(run.bytes for table in tables for run in table.runs.runs if not run.pending)
        + sum(delta.length for table in tables for delta in table.deltas),
        cache_hits=total("cache_hits"),
        cache_misses=total("cache_misses"),
        prefetched=figures(AHEAD) if any(LOOKAHEAD in manifest.metrics for manifest in manifests) else {},
        looked_up=figures(LOOKUPS),
        seconds=max(manifest.metrics.get("process_ms", 0) for manifest in manifests) / 1000,
        requests=totals(PRICES),
        tiers=totals(TIERS),
        compactions=totals(COMPACTIONS),
    )


def _added(figures: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Figures by name, of all that have them."""
    names = dict.fromkeys(name for one in figures for name in one)
    return {name: sum(one.get(name, 0) for one in figures) for name in names}

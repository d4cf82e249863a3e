"""Resources of a slot, and of one run of a query in it: checkpoint, committer, sealed files, caches and compactor."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.committer import Committer
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.sealed import SealedFiles
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.retry import LONG_RETRY
from millpond.files.locations.counted import CountedFiles
from millpond.files.locations.hedged import HedgedFiles
from millpond.files.locations.opening import on_disk
from millpond.files.tiers.local_copies import LocalCache
from millpond.metrics import TIER_METRICS, WAITING, request_cost
from millpond.operators.processors.calls import CallsUserCode
from millpond.slot.partition.copies import CopiesFolder, claim_copies, remove_old_copies
from millpond.slot.partition.remote_compaction import RemoteCompaction
from millpond.slot.partition.timed import TimedExecutor
from millpond.slot.prefetch.switch import HintSwitch
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import Account, MemoryBudget
from millpond.stores.runs.run_store import RunStore
from millpond.tasks.block_references import delete_batches_before, delete_generations, exchange_folder
from millpond.tasks.offset_log import Planned, planned
from millpond.tasks.operator_task import OperatorTask

_CACHE_SHARE = 8
_CLOSE_SECONDS = 5.0
"""Seconds for which `close` waits until compaction requests are removed; the process may exit right after."""


@dataclass(frozen=True)
class SlotResources:
    """Resources that all queries of a slot share.

    Attributes:
        slot: uuid of the slot.
        number: number of the slot on the host.
        host: the host as Spark names it; empty under a local master.
        directory: the application's private directory on this host.
        budget: the slot's memory.
        arrow: account of the memory that record batches take.
        merges: thread that merges runs in the background.
        writers: thread that writes evicted rows; no task on it may block.
        namers: thread that writes the names of matched rows.
        readers: threads that read prefetched keys.
        caches: local copies of files of object stores, of each query that runs.
    """

    slot: str
    number: int
    host: str
    directory: Path
    budget: MemoryBudget
    arrow: Account
    merges: Executor
    writers: Executor
    namers: Executor
    readers: Executor
    caches: list[LocalCache] = field(default_factory=list)

    @property
    def unfilled_cache_bytes(self) -> int:
        """Bytes of the local disk that the caches may take beyond what they have."""
        return sum(cache.limit - cache.bytes for cache in self.caches.copy())

    @property
    def cache_memory(self) -> int:
        """Maximum size in bytes of one query's block cache."""
        return self.budget.total // _CACHE_SHARE


@dataclass
class QueryResources:
    """Resources that the partitions of one generation of a query share in a slot.

    Opening it takes over versions that dead slots of this host had sealed but not made durable.

    Attributes:
        lost_call: operator, partition, batch and keys for which user code was running when its process died; empty if
            that has not happened.
    """

    task: OperatorTask
    resources: SlotResources
    files: FileSystem = field(init=False)
    checkpoint: Checkpoint = field(init=False)
    committer: Committer = field(init=False)
    sealed: SealedFiles = field(init=False)
    runs: RunStore = field(init=False)
    append_files: AppendFiles = field(init=False)
    spill: Path = field(init=False)
    remote: RemoteCompaction | None = field(init=False, default=None)
    lost_call: str = field(init=False, default="")
    merges: TimedExecutor = field(init=False)
    _waiting_reported: int = field(init=False, default=-1)
    _counted: CountedFiles | None = field(init=False, default=None)
    _hedged: HedgedFiles | None = field(init=False, default=None)
    _copies: CopiesFolder | None = field(init=False, default=None)
    _claims: ExitStack = field(init=False)

    def __post_init__(self) -> None:
        task = self.task
        self.files = open_state(task.location, retry_config=LONG_RETRY)
        if not on_disk(task.location):
            # An object store: count its requests, and send a second request where the first one is slow.
            self._counted = CountedFiles(self.files)
            self.files = self._hedged = HedgedFiles(self._counted, task.settings.hedging)
        self.checkpoint = Checkpoint(self.files, task.generation)
        self.spill = self.resources.directory / "sealed" / task.key
        self.spill.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:  # until everything is open; `close` releases it later
            self._open_files(undo)
            self._claims = undo.pop_all()
        try:
            for adopted in self.sealed.adopt(task.generation):
                self.committer.submit(adopted, adopted=True)
        except BaseException:
            self.close()  # release the adopted files for the next attempt
            raise

    def _open_files(self, undo: ExitStack) -> None:
        """Open caches, stores and the committer; `undo` gets what must not stay claimed after an error."""
        task = self.task
        if task.exchange == "local":
            # The driver removes a run's rows at its end; this removes those of replays, and of drivers that died.
            self.resources.writers.submit(delete_generations, self.resources.directory, task, up_to=task.generation - 1)
        cache = self.resources.directory / "cache" / task.key / str(self.resources.number)
        cache.mkdir(parents=True, exist_ok=True)
        if self._counted is not None:
            # Files on a local disk are mapped in place, so only object stores need copies.
            remove_old_copies(self._copies_root)
            self._copies = claim_copies(self._copies_root, task.key, self.resources.number)
            undo.callback(self._release_copies)
        disk = task.settings.cache_disk
        if disk is None:
            held = self._copies.bytes if self._copies is not None else 0
            # Half of the space for the slots of this host. Existing copies count as free, since they can be evicted;
            # what the caches of other queries may still take does not.
            free = shutil.disk_usage(cache).free + held - self.resources.unfilled_cache_bytes * task.slots
            disk = max(0, free) // (2 * task.slots)
        self.runs = RunStore(
            self.files,
            str(cache if self._copies is None else self._copies.path),
            renew=partial(self._renew_copies, cache),
            disk=disk,
            memory=self.resources.cache_memory,
            admission=task.settings.cache_admission,
        )
        # A state on a local disk is mapped in place: its cache has a limit, and never fills.
        if self._counted is not None:
            self.resources.caches.append(self.runs.copies)
            undo.callback(self.resources.caches.remove, self.runs.copies)
        self.append_files = AppendFiles(self.files, str(cache), copies=self.runs.copies)
        if task.settings.compaction == "remote":
            self.remote = RemoteCompaction(self.files, task.generation, timeout=task.settings.compaction_timeout)
        self.merges = TimedExecutor(self.resources.merges)
        self._exchange = exchange_folder(self.resources.directory, task)
        account = self.resources.budget.open()
        undo.callback(account.close)
        account.force(self.resources.cache_memory)
        self._reported: dict[str, float] = {}
        self._planned: dict[int, Planned] = {}
        self._lock = threading.Lock()
        self.sealed = SealedFiles(str(self.spill), self.resources.slot)
        self.committer = Committer(
            self.checkpoint, self.resources.slot, self.sealed, limit=task.settings.commit_timeout
        )

    @property
    def _copies_root(self) -> Path:
        return self.resources.directory.parent / "copies"

    def _release_copies(self) -> None:
        """Release the current folder for copies, which `_renew_copies` may have replaced."""
        if self._copies is not None:
            self._copies.release()

    def _renew_copies(self, cache: Path) -> str | None:
        """Return a new folder for copies if the current one is gone, else None (see `LocalCache`).

        The folder may be deleted at any time, and another process may then claim a new one.
        """
        if self._copies is not None:
            if self._copies.is_current:
                return None
            self._copies.release()
            self._copies = claim_copies(self._copies_root, self.task.key, self.resources.number)
            if self._copies is not None:
                return str(self._copies.path)
        elif cache.is_dir():
            return None
        cache.mkdir(parents=True, exist_ok=True)
        return str(cache)

    def new_figures(self, version: int) -> dict[str, float]:
        """Return the figures of committer, caches, store and compactors since the previous call.

        Args:
            version: the version being created. Only the first caller for a version gets the number of waiting
                compactions, so that it is counted once.
        """
        now: dict[str, float] = {"compaction_ms": self.merges.seconds * 1000}
        if self.remote is not None:
            stats = self.remote.stats
            now |= {"remote_compactions": stats.remote, "local_compactions": stats.local}
            now["remote_compacted_bytes"] = stats.bytes
        if self._counted is not None and self._hedged is not None:
            tiers = self.runs.stats()
            tiers["remote_blocks"] += self.append_files.remote_blocks
            now |= (
                self._counted.counts() | {name: tiers[name] for name in TIER_METRICS} | {"hedges": self._hedged.hedges}
            )
        with self._lock:
            before, self._reported = self._reported, {name: float(value) for name, value in now.items()}
            new = {name: value - before.get(name, 0.0) for name, value in self._reported.items()}
            if self.remote is not None:
                first, self._waiting_reported = version != self._waiting_reported, version
                new[WAITING] = float(self.remote.waiting) if first else 0.0
        if "puts" in new:
            new |= {"request_cost": request_cost(new), "commit_ms": self.committer.stats.seconds * 1000}
        return new

    def planned(self, batch: int) -> Planned:
        """Return the watermark and time that Spark planned for a batch, read once for all partitions."""
        with self._lock:
            if batch not in self._planned:
                # `Partition._times` also needs the batch before.
                kept = {known: entry for known, entry in self._planned.items() if known >= batch - 1}
                self._planned = kept | {batch: planned(self.task, batch)}
            return self._planned[batch]

    def hint_switch(self, task: OperatorTask, partition: int) -> HintSwitch | None:
        """Return the hint switch of an operator's partition; None if the operator has no lookaheads."""
        if not task.lookaheads:
            return None
        return HintSwitch(self.resources.directory, task, partition)

    def record_lost_call(self, operator: object, number: int, partition: int, batch: int) -> None:
        """Record where user code was running when its process died, if that made the operator fail."""
        if isinstance(operator, CallsUserCode) and operator.lost:
            self.lost_call = f"operator {number}, partition {partition}, batch {batch}, {operator.lost}"

    def mark_durable(self, versions: Iterable[tuple[int, int, int]]) -> None:
        """Report to the compactor that versions (operator, partition, version) sealed here are durable."""
        if self.remote is not None:
            for operator, partition, version in versions:
                self.remote.mark_durable(operator, partition, version)

    def forget_batches(self, below: int) -> None:
        """Remove the exchanged rows of earlier batches in the background."""
        if self.task.exchange == "local":
            self.resources.writers.submit(delete_batches_before, self._exchange, below)

    def close(self) -> None:
        """Release everything.

        Versions that are not durable stay in the sealed files, for the next run to adopt. The files of the exchange
        stay for the host's other slots; the driver removes them when the run has ended.
        """
        if self.remote is not None:
            self.remote.close()
        self.committer.close()
        self.sealed.close()
        self.runs.close()
        self.append_files.close()
        if self._hedged is not None:
            self._hedged.close()
        self._claims.close()
        if self.remote is not None:
            self.remote.join(_CLOSE_SECONDS)

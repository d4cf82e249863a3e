"""One run of a query as a slot sees it: its checkpoint, its committer, its sealed files, its partitions."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.committer import Committer
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.sealed import SealedFiles
from millpond.files.backends.counted import CountedFiles
from millpond.files.backends.filesystem import FileSystem, on_disk
from millpond.files.backends.hedged import HedgedFiles
from millpond.files.backends.patience import LASTING
from millpond.metrics import TIERS, WAITING, request_cost
from millpond.operators.processors.calls import Calling
from millpond.slot.batch.offsets import Planned, planned
from millpond.slot.batch.parcels import exchange_folder, forget_batches
from millpond.slot.batch.task import PipeTask
from millpond.slot.compaction.remote import RemoteCompaction
from millpond.slot.partition.copies import CopiesFolder, claim_copies, remove_old_copies
from millpond.slot.partition.timed import Timed
from millpond.slot.prefetch.switch import HintSwitch
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import Account, MemoryBudget
from millpond.stores.runs.run_store import RunStore

_CACHE_SHARE = 8
_LAST_SECONDS = 5.0
"""How long an end waits until requests to compactors are removed: the process may be about to end, too."""


@dataclass(frozen=True)
class Means:
    """What all queries of a slot share.

    Attributes:
        slot: uuid of the slot.
        number: of the slot among those of the host.
        directory: the application's private directory on this host.
        budget: the slot's memory.
        arrow: the part of it that record batches take.
        merges: thread that merges runs behind the batch's back.
        writers: thread that writes what leaves memory; nothing may keep it waiting.
        readers: threads that read what was announced.
    """

    slot: str
    number: int
    directory: Path
    budget: MemoryBudget
    arrow: Account
    merges: Executor
    writers: Executor
    readers: Executor

    @property
    def cache_memory(self) -> int:
        """Bytes that one query's cache of file blocks may hold."""
        return self.budget.total // _CACHE_SHARE


@dataclass
class RunningQuery:
    """What the partitions of one generation of a query share in a slot.

    Opening it takes over what dead slots of this host had sealed and not made durable.

    Attributes:
        lost_call: where, and for which keys, code of the user was called last when its process went.
    """

    task: PipeTask
    means: Means
    files: FileSystem = field(init=False)
    checkpoint: Checkpoint = field(init=False)
    committer: Committer = field(init=False)
    sealed: SealedFiles = field(init=False)
    runs: RunStore = field(init=False)
    append_files: AppendFiles = field(init=False)
    spill: Path = field(init=False)
    remote: RemoteCompaction | None = field(init=False, default=None)
    lost_call: str = field(init=False, default="")
    merges: Timed = field(init=False)
    _told: int = field(init=False, default=-1)
    _counted: CountedFiles | None = field(init=False, default=None)
    _hedged: HedgedFiles | None = field(init=False, default=None)
    _copies: CopiesFolder | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        task = self.task
        self.files = open_state(task.location, retry_config=LASTING)
        if not on_disk(task.location):
            self._counted = CountedFiles(self.files)
            self.files = self._hedged = HedgedFiles(self._counted, task.settings.hedging)
        self.checkpoint = Checkpoint(self.files, task.generation)
        self.spill = self.means.directory / "sealed" / task.key
        self.spill.mkdir(parents=True, exist_ok=True)
        cache = self.means.directory / "cache" / task.key / str(self.means.number)
        cache.mkdir(parents=True, exist_ok=True)
        if self._counted is not None:
            remove_old_copies(self._copies_root)
            self._copies = claim_copies(self._copies_root, task.key, self.means.number)
        disk = task.settings.cache_disk
        if disk is None:
            held = self._copies.bytes if self._copies is not None else 0
            disk = (shutil.disk_usage(cache).free + held) // (2 * task.slots)
        self.runs = RunStore(
            self.files,
            str(cache if self._copies is None else self._copies.path),
            renew=partial(self._renew_copies, cache),
            disk=disk,
            memory=self.means.cache_memory,
            admission=task.settings.cache_admission,
        )
        self.append_files = AppendFiles(self.files, str(cache), copies=self.runs.copies)
        if task.settings.compaction == "remote":
            self.remote = RemoteCompaction(self.files, task.generation, timeout=task.settings.compaction_timeout)
        self.merges = Timed(self.means.merges)
        self._exchange = exchange_folder(self.means.directory, task)
        self._account = self.means.budget.open()
        self._account.force(self.means.cache_memory)
        self._reported: dict[str, float] = {}
        self._planned: dict[int, Planned] = {}
        self._lock = threading.Lock()
        self.sealed = SealedFiles(str(self.spill), self.means.slot)
        self.committer = Committer(self.checkpoint, self.means.slot, self.sealed, limit=task.settings.commit_timeout)
        try:
            for left in self.sealed.adopt(task.generation):
                self.committer.submit(left, adopted=True)
        except BaseException:
            self.close()  # what it took over is free for the next attempt
            raise

    @property
    def _copies_root(self) -> Path:
        return self.means.directory.parent / "copies"

    def _renew_copies(self, cache: Path) -> str | None:
        """See `LocalCache`: the folder of copies may be deleted at any time, and somebody else may have it then."""
        if self._copies is not None:
            if self._copies.held:
                return None
            self._copies.release()
            self._copies = claim_copies(self._copies_root, self.task.key, self.means.number)
            if self._copies is not None:
                return str(self._copies.path)
        elif cache.is_dir():
            return None
        cache.mkdir(parents=True, exist_ok=True)
        return str(cache)

    def new_figures(self, version: int) -> dict[str, float]:
        """What committer, caches, store and compactors were asked since this was last asked for.

        Args:
            version: which is being made. The first that asks for it is told how many compactions wait.
        """
        now: dict[str, float] = {"put_retries": self.committer.stats.retries}
        now["compaction_ms"] = self.merges.seconds * 1000
        if self.remote is not None:
            stats = self.remote.stats
            now |= {"remote_compactions": stats.remote, "local_compactions": stats.local}
            now["remote_compacted_bytes"] = stats.bytes
        if self._counted is not None and self._hedged is not None:
            tiers = self.runs.stats()
            tiers["remote_blocks"] += self.append_files.remote_blocks
            now |= self._counted.counts() | {name: tiers[name] for name in TIERS} | {"hedges": self._hedged.hedges}
        with self._lock:
            before, self._reported = self._reported, {name: float(value) for name, value in now.items()}
            new = {name: value - before.get(name, 0.0) for name, value in self._reported.items()}
            if self.remote is not None:
                first, self._told = version != self._told, version
                new[WAITING] = float(self.remote.waiting) if first else 0.0
        if "puts" in new:
            new |= {"request_cost": request_cost(new), "commit_ms": self.committer.stats.seconds * 1000}
        return new

    def planned(self, batch: int) -> Planned:
        """What Spark has planned for a batch, read once for all partitions."""
        with self._lock:
            if batch not in self._planned:
                kept = {known: entry for known, entry in self._planned.items() if known >= batch - 1}
                self._planned = kept | {batch: planned(self.task, batch)}
            return self._planned[batch]

    def hint_switch(self, task: PipeTask, partition: int) -> HintSwitch | None:
        """The switch of hints for an operator's partition, where they can be had."""
        if not task.lookaheads:
            return None
        return HintSwitch(self.means.directory, task, partition)

    def note_lost_call(self, operator: object, number: int, partition: int, batch: int) -> None:
        """Note where code of the user was called when its process went, if that is why an operator has failed."""
        if isinstance(operator, Calling) and operator.lost:
            self.lost_call = f"operator {number}, partition {partition}, batch {batch}, {operator.lost}"

    def durable(self, versions: Iterable[tuple[int, int, int]]) -> None:
        """Versions (operator, partition, version) that were sealed here are durable."""
        if self.remote is not None:
            for operator, partition, version in versions:
                self.remote.durable(operator, partition, version)

    def forget_batches(self, below: int) -> None:
        """Remove, in the background, the rows that earlier batches exchanged."""
        if self.task.exchange == "local":
            self.means.writers.submit(forget_batches, self._exchange, below)

    def close(self) -> None:
        """Let go; what is not durable stays in the sealed files."""
        if self.remote is not None:
            self.remote.close()
        self.committer.close()
        self.sealed.close()
        self.runs.close()
        self.append_files.close()
        if self._hedged is not None:
            self._hedged.close()
        if self._copies is not None:
            self._copies.release()
        self._account.close()
        if self.remote is not None:
            self.remote.join(_LAST_SECONDS)
        shutil.rmtree(self._exchange, ignore_errors=True)

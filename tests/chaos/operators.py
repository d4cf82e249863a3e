"""A world (see `world.py`) whose slots run real partitions: operators over the real stores and files.

The truth is an uncrashed run of the same operator over the same batches, in one partition whose state never leaves
memory: whatever happens, each batch has to give the same rows. What the slot's threads do in the background is done
when the world says so, so that a seed determines everything.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.formats import deltas
from millpond.checkpoint.sealed import SealedFiles
from millpond.errors import MillpondError, StateDamagedError
from millpond.files.backends import retry
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.key_groups import KEY_GROUP_BITS
from millpond.operators import slice_assigner
from millpond.operators.aggregate import cardinality_observer
from millpond.operators.processors import input as processor_input
from millpond.slot.partition.attempt_lock import Attempt
from millpond.slot.partition.partition import Partition
from millpond.slot.partition.remote_compaction import RemoteCompaction
from millpond.slot.partition.resources import QueryResources, SlotResources
from millpond.slot.partition.timed import TimedExecutor
from millpond.slot.process.messages import Hints
from millpond.spec.kinds.join import JoinSpec
from millpond.stores import append_files, delta_backlog
from millpond.stores.aligned import hash_intervals
from millpond.stores.aligned import table as aligned
from millpond.stores.append_files import AppendFiles
from millpond.stores.memory.budget import MemoryBudget
from millpond.stores.ordered import files as ordered_files
from millpond.stores.rmw import eviction_buffer
from millpond.stores.runs import run_store
from millpond.stores.runs.run_store import RunStore
from millpond.stores.unaligned import table as unaligned
from millpond.tasks.offset_log import Planned
from millpond.tasks.operator_task import OperatorTask, SlotSettings
from tests.chaos.compactors import Compactor, made_for
from tests.chaos.kinds import KINDS, Batch, Kind, Rows, ordered, part_of, shown
from tests.chaos.later import Later, at_once, wait_for
from tests.chaos.tripwire import Crash, LocalTripwire, Tripwire
from tests.chaos.world import TaskFailed, WatchedCommitter, World
from tests.operators.called import Called
from tests.operators.join_rig import JoinRig
from tests.operators.rig import Rig

MEMORY = 64 << 20
STREAMS = 4
"""Different streams of a kind; what each has to give is computed once."""
LONGEST = 24
"""Batches of a stream, at most."""

_attempts = itertools.count()


@contextmanager
def small(most_deltas: int = 2, many_slices: int = 32) -> Iterator[None]:
    """Stores write, flush and merge files after a few batches; nothing runs in a thread, and nothing sleeps.

    Slices of event time get wider once there are `many_slices`, by partitions each as its rows come.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slice_assigner, "_TARGET_SLICES", many_slices)
        patch.setattr(unaligned, "_CHUNK_ROWS", 32)
        patch.setattr(delta_backlog, "_MAX_DELTAS", most_deltas)
        patch.setattr(aligned, "_MAX_SMALL_SEGMENTS", most_deltas)
        patch.setattr(hash_intervals, "_MIN_INTERVAL_BYTES", 256)
        for name, value in {
            "SAMPLING_BITS": 0,
            "_MIN_ACCESSES": 4,
            "_REPEATING_DIVISOR": 2,
            "_GROWN_DIVISOR": 1 << 13,
            "_SMALL_DIVISOR": 1 << 12,
        }.items():
            patch.setattr(cardinality_observer, name, value)
        patch.setattr(processor_input, "MAX_KEYS", 3)
        patch.setattr(retry, "_FIRST_PAUSE_SECONDS", 0.0)
        for module in (deltas, run_store, append_files):
            patch.setattr(module, "ThreadPoolExecutor", at_once)
        patch.setattr(eviction_buffer, "wait", wait_for)
        patch.setattr(ordered_files, "wait", wait_for)
        yield


class Query(QueryResources):
    """Resources that a slot's partitions share, over the world's stores; `later` does the work of threads."""

    def __init__(self, task: OperatorTask, resources: SlotResources, slot: OperatorSlot) -> None:
        self._slot = slot
        super().__init__(task, resources)

    def __post_init__(self) -> None:
        slot, resources, world = self._slot, self.resources, self._slot.world
        self.files = world.state
        self.checkpoint = Checkpoint(world.state, self.task.generation)
        self.spill = resources.directory
        cache = resources.directory / f"cache{resources.number}"
        cache.mkdir(parents=True, exist_ok=True)
        self.runs = RunStore(world.state, str(cache), disk=world.disk, memory=1 << 20)
        self.runs._requests, self.runs._hydrator = Later(), slot.later  # type: ignore[assignment]
        self.append_files = AppendFiles(world.state, str(cache), copies=self.runs.copies)
        self.append_files._requests = self.append_files._readers = self.append_files._copier = Later()  # type: ignore[assignment]
        self.remote = None
        self.merges = TimedExecutor(self.resources.merges)
        if world.workers:
            self.remote = RemoteCompaction(
                world.state, self.task.generation, threaded=False, clock=world.clock, stats=world.compactions
            )
        self._account = resources.budget.open()
        self._reported: dict[str, float] = {}
        self._lock = threading.Lock()
        self.sealed = slot.sealed
        self.committer = slot.committer = WatchedCommitter(
            self.checkpoint, slot.name, slot.sealed, threaded=False, backoff=(0.0, 0.0), limit=600
        )
        for left in slot.sealed.adopt(slot.generation):
            self.committer.submit(left, adopted=True)

    def planned(self, batch: int) -> Planned:
        return self._slot.world.plan(batch)


class OperatorSlot:
    """A slot with real partitions."""

    committer: WatchedCommitter

    def __init__(self, world: OperatorWorld, index: int, generation: int, sync: bool) -> None:
        self.world = world
        self.host = index % world.host_count
        self.name = f"{world.next_slot():04d}"
        self.generation = generation
        self.sync = sync
        self.later = Later(world.random)
        self.partitions: dict[int, Partition] = {}
        directory = world.hosts / str(self.host)
        sealed = directory / "sealed"
        sealed.mkdir(parents=True, exist_ok=True)
        self.sealed = SealedFiles(str(sealed), self.name, self._folder)
        budget = MemoryBudget(world.memory)
        resources = SlotResources(
            self.name, index, "", directory, budget, budget.open(), self.later, self.later, self.later, Later()
        )
        try:
            self.query = Query(world.task(generation), resources, self)
        except BaseException:
            self.vanish()
            raise

    def _folder(self, path: str) -> FileSystem:
        return Tripwire(LocalFiles(path), "disk", self.world.decide, self.world.delayed)

    def run(self, batch: int, partition: int, pieces: list[pa.RecordBatch]) -> dict[int, Rows]:
        """One task."""
        if partition not in self.partitions:
            self.partitions[partition] = Partition(self.query, self.query.task, partition)
        attempt = Attempt(batch, next(_attempts), lambda: None)
        self._send_hints(batch, partition, pieces)
        user = self.world.kind.user
        caller = None if user is None else Called(user, self._called)
        output = self.partitions[partition].run(attempt, self._fed(pieces), sync=self.sync, caller=caller)
        if not self.world.quiet and self.world.random.random() < 0.03:
            next(output, None)
            output.close()  # the consumer has seen enough
            raise TaskFailed("The output was not read.")
        return {partition: shown(list(output))}

    def _send_hints(self, batch: int, partition: int, pieces: list[pa.RecordBatch]) -> None:
        """Sometimes keys are announced: of these rows or others, for this batch or another."""
        random = self.world.random
        if random.random() < 0.4:
            hashes = pa.concat_arrays([piece.column(0) for piece in pieces]).to_numpy().view(np.uint64)
            if random.random() < 0.2:
                hashes = hashes ^ np.uint64(1)
            some = np.unique(hashes)[: random.randrange(len(hashes) + 1)]
            hints = Hints(self.query.task, partition, batch + random.choice([0, 0, 0, 1, -1]), "exchange")
            self.partitions[partition].hint(hints, pa.record_batch([pa.array(some)], names=["__hash"]))

    def _fed(self, pieces: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The input as it comes; sometimes the attempt dies in the middle of it."""
        for piece in pieces:
            yield piece
            if not self.world.quiet and self.world.random.random() < 0.02:
                raise TaskFailed("The attempt died.")

    def _called(self) -> None:
        """The user's code is about to run; sometimes it fails, or takes its process along."""
        if not self.world.quiet and self.world.random.random() < 0.003:
            raise TaskFailed("The user's code failed.")

    @property
    def remote(self) -> RemoteCompaction | None:
        """Compactions done elsewhere."""
        return self.query.remote

    def step(self) -> None:
        """Threads in the background go on."""
        while self.world.random.random() < 0.5 and self.later.step():
            pass
        while self.remote is not None and self.world.random.random() < 0.7:
            self.remote.step()
            self.world.clock.now += 1.0

    def vanish(self) -> None:
        """The process is gone: its locks are free, nothing else happens."""
        for folder in self.sealed._folders.values():
            os.close(folder.lock)
        self.sealed._folders.clear()
        self.partitions.clear()


class OperatorWorld(World):
    """An application with one real operator.

    Args:
        kind: the operator. stream: which of its streams. bits: how many bits of the hashes vary.
        local: whether the state location is on a local disk.
        others: as for `World`.
    """

    key_groups = 1 << KEY_GROUP_BITS
    calm_files = False
    compactor = Compactor

    def __init__(
        self,
        directory: Path,
        seed: int = 0,
        *,
        kind: str,
        stream: int = 0,
        bits: int = 64,
        local: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(directory, seed, **others)
        self.kind = KINDS[kind]
        self.stream, self.expected = truth(kind, stream, bits)
        self.memory = MEMORY
        self._given: dict[tuple[int, int, int], Rows] = {}
        self.disk = 0
        self.folder = self.hosts.with_name(self.hosts.name + "-state")
        if local:
            self.raw = LocalFiles(str(self.folder))
            self.state = LocalTripwire(self.raw, "state", self.decide, self.delayed)
            self.times = time.time
            self.workers = [made_for(self, Compactor) for _ in self.workers]

    def task(self, generation: int) -> OperatorTask:
        """The task that a run's slot stages carry."""
        return task_of(self.kind, self.partitions, generation)

    def plan(self, batch: int) -> Planned:
        """Times that Spark has planned for a batch."""
        return Planned(0, 0) if batch < 0 else Planned(*self.stream[batch].times[1:])

    def new_slot(self, index: int, sync: bool) -> OperatorSlot:
        return OperatorSlot(self, index, self.generation, sync)

    def rows(self, batch: int, partition: int, run: int) -> list[pa.RecordBatch]:
        """The input of a task as some attempt sees it: marker row first, the others in any order and pieces."""
        rows = part_of(self.stream[batch].rows, partition, self.partitions)
        if not self.kind.ordered:
            order = list(range(rows.num_rows))
            self.random.shuffle(order)
            rows = rows.take(pa.array(order, pa.int64()))
        cut = self.random.randrange(rows.num_rows + 1)
        return [marked(rows.slice(0, cut), partition, self.partitions), unmarked(rows.slice(cut))]

    def run_task(self, batch: int, partition: int, *, sync: bool, remote_compactor: int = 0) -> Any:
        index = (partition + remote_compactor) % self.slot_count
        try:
            slot = self.slot(index, sync)
            found = slot.run(batch, partition, self.rows(batch, partition, self.run))
        except Crash as crash:
            self.kill_slot(index)
            raise TaskFailed(str(crash)) from None
        except StateDamagedError:
            raise
        except MillpondError as error:
            raise TaskFailed(str(error)) from error
        before = self._given.setdefault((batch, partition, self.partitions), found[partition])
        assert found[partition] == before, f"batch {batch} of partition {partition} gives other rows when it runs again"
        return found

    def write(self, batch: int, rows: Any) -> None:
        found = sorted((row for part in rows.values() for row in part), key=repr)
        assert found == self.expected[batch], f"batch {batch} in the sink"
        self.sink.setdefault(batch, []).append((self.run, rows))

    def go_back(self, version: int) -> None:
        """Have Spark's logs end before a version, as if batches had been taken back by hand."""
        ends = {"offsets": self._raw_ledger.last_planned, "commits": self._raw_ledger.last_committed}
        for log, last in ends.items():
            for batch in range(version, last + 1):
                self._raw_ledger.remove(log, batch)
        self.sink = {batch: written for batch, written in self.sink.items() if batch < version}

    def check_end(self, batches: int) -> None:
        self.ended(batches)

    def clean(self) -> None:
        super().clean()
        shutil.rmtree(self.folder, ignore_errors=True)


def task_of(kind: Kind, partitions: int, generation: int, **others: Any) -> OperatorTask:
    """A task of an operator."""
    settings = SlotSettings(memory=MEMORY, open_timeout=0.0)
    given = {"location": "memory:nowhere", "offsets": "memory:nowhere", "settings": settings} | others
    given.setdefault("lookaheads", ("exchange",))
    return OperatorTask("app", "query", "run", 0, kind.spec, partitions, 1, generation=generation, **given)


def marked(rows: pa.RecordBatch, partition: int, partitions: int) -> pa.RecordBatch:
    """Rows as the pipe gives them, behind the partition's marker row."""
    group = -(-(partition << 15) // partitions)
    mark = np.array([group << 49], np.uint64).view(np.int64)
    first = [pa.array(mark), *(pa.nulls(1, column.type) for column in rows.columns[1:])]
    both = [pa.concat_arrays([one, column]) for one, column in zip(first, rows.columns, strict=True)]
    marks = pa.array([True] + [False] * rows.num_rows)
    return pa.RecordBatch.from_arrays([both[0], marks, *both[1:]], names=_names(rows))


def unmarked(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Further rows as the pipe gives them."""
    marks = pa.array([False] * rows.num_rows, pa.bool_())
    return pa.RecordBatch.from_arrays([rows.column(0), marks, *rows.columns[1:]], names=_names(rows))


def _names(rows: pa.RecordBatch) -> list[str]:
    return [rows.schema.names[0], "__mark", *rows.schema.names[1:]]


@cache
def truth(kind: str, stream: int, bits: int = 64) -> tuple[list[Batch], list[Rows]]:
    """A stream of an operator and what each of its batches gives when nothing goes wrong."""
    batches = KINDS[kind].stream(stream, LONGEST, bits)
    return batches, list(_uncrashed(KINDS[kind], batches))


def _uncrashed(kind: Kind, batches: list[Batch]) -> Iterator[Rows]:
    if isinstance(kind.spec, JoinSpec):
        joined = JoinRig(kind.spec)
        for rows, times in batches:
            yield ordered(joined.batch([rows], times.late, times.closed))
        joined.close()
        return
    rig = Rig(kind.spec)
    for rows, times in batches:
        if kind.user is not None:
            rig.operator.caller = Called(kind.user)  # type: ignore[attr-defined]
        yield shown(rig.batch(rows, times=times).to_batches())
    rig.close()

"""A whole application without Spark: driver, query logs, sink, slots, committers and store, moved step by step.

The parts under test are the real ones: file layer, checkpoint, committer, sealed files, recovery, other partitions at a
start, compactions by workers, garbage collection, forks, and the start procedure's decisions and changes to Spark's
logs. Spark itself is a model of its rules: a batch is planned (`offsets/`), run, given to the sink, then committed
(`commits/`); a start goes on with the batch that is planned and not committed; a sink may skip a batch that it has, and
then no task of it runs.

State is a running sum per key, its files are JSON. Whenever a slot opens a version, it is compared with the truth at
once. A source may be `unrepeatable`: each run sees other rows in a batch (and so commits synchronously); then the truth
is what the sink got.

Objects have the times of one clock, which the world turns. Beside the application live others (`neighbours.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.committer import Committer
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.formats.manifest import PartitionManifest, seal
from millpond.checkpoint.generation import claim
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.retention.collector import Collector
from millpond.checkpoint.sealed import SealedFiles
from millpond.checkpoint.state_schema import OperatorSchema, StateSchema, plain
from millpond.compactor.worker import Worker
from millpond.errors import MillpondError, StateDamagedError
from millpond.files.backends import objects
from millpond.files.backends.filesystem import FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.refs import RunRef, TableManifest
from millpond.query.checkpoints.fork import check_fork
from millpond.query.logs.query_logs import LOGS, QueryLogs, RollBack
from millpond.query.schema.comparison import write_or_check_schema
from millpond.query.starting.recovery_point import write_base_and_find_replays
from millpond.slot.partition.remote_compaction import RemoteCompaction, RemoteStats
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from tests.chaos.compactors import Compactor, Merger, Stalled, made_for
from tests.chaos.sums import (
    GROUPS,
    HASHES,
    Merge,
    State,
    deltas_of,
    merging,
    partition_of,
    read_run,
    runs_of,
    write_run,
)
from tests.chaos.tripwire import Clock, Crash, Timed, Tripwire
from tests.operators.rig import fields

PINNED = OperatorSchema("sums", plain(DeduplicateSpec(fields("k string"), (0,))), {"main": {}})
_worlds = itertools.count()
_memory_files = objects.memory_files


class TaskFailed(Exception):
    """An attempt failed; Spark may try again."""


@dataclass
class Held:
    """A partition in a slot's memory.

    Attributes:
        recent: rows that no run has. flushed: a run of them that is written, and adopted with the next batch.
        merging: what is made of all `merged` runs.
    """

    manifest: PartitionManifest
    state: State
    runs: TableManifest
    recent: State
    flushed: RunRef | None = None
    merging: Future[RunRef | None] | None = None
    merged: tuple[RunRef, ...] = ()
    batch: int = -1
    rows: State = field(default_factory=dict)


@dataclass
class Sending:
    """A merge whose file is on its way to the store.

    Attributes:
        merging: waits for it. made: the file. sent: ends the upload. speed: how likely that is at each look.
    """

    merging: Future[RunRef | None]
    made: RunRef | None
    sent: ExitStack
    speed: float

    def end(self) -> None:
        """All of it has arrived."""
        wanted = self.merging.set_running_or_notify_cancel()
        try:
            self.sent.close()
        except MillpondError as error:
            if wanted:
                self.merging.set_exception(error)
        else:
            if wanted:
                self.merging.set_result(self.made)


class Violation(BaseException):
    """The protocol was broken; not an `Exception`, since committers outlive those."""


class WatchedCommitter(Committer):
    """A committer that is caught acknowledging what a newer run may not see."""

    def _acknowledge(self, group: Any) -> None:
        files = self.checkpoint.files
        if getattr(files, "own", files).claimed > self.checkpoint.generation:
            raise Violation("acknowledged after a newer run has begun")
        super()._acknowledge(group)


class Slot:
    """A slot over the real checkpoint classes."""

    def __init__(self, world: World, host: int, generation: int, sync: bool) -> None:
        self.world = world
        self.host = host
        self.name = f"{world.next_slot():04d}"
        self.generation = generation
        self.sync = sync
        self.held: dict[int, Held] = {}
        self.sending: list[Sending] = []
        self.checkpoint = Checkpoint(world.state, generation)
        directory = world.hosts / str(host)
        directory.mkdir(parents=True, exist_ok=True)
        self.remote: RemoteCompaction | None = None
        if world.workers:
            self.remote = RemoteCompaction(
                world.state, generation, threaded=False, clock=world.clock, stats=world.compactions
            )
        self.sealed = SealedFiles(str(directory), self.name, self._folder)
        try:
            self.committer = WatchedCommitter(
                self.checkpoint, self.name, self.sealed, threaded=False, backoff=(0.0, 0.0), limit=600
            )
            for left in self.sealed.adopt(generation):
                self.committer.submit(left, adopted=True)
        except BaseException:
            self.vanish()
            raise

    def _folder(self, path: str) -> FileSystem:
        return Tripwire(LocalFiles(path), "disk", self.world.decide, self.world.delayed)

    def run(self, batch: int, partition: int, rows: State) -> State:
        """One task: apply, seal, output, wait for the version that was read (in sync mode, the one that was made)."""
        held = self.held.get(partition)
        if held is None or held.batch != batch or held.rows != rows:
            if held is None or held.manifest.version != batch:
                held = self._open(partition, batch)
            self._apply(held, batch, rows)
            self.held[partition] = held
        output = {key: held.state[key] for key in rows}
        self.world.maybe_commit()
        version = batch + 1 if self.sync else batch
        self.committer.wait_durable(0, partition, version)
        if self.remote is not None:
            self.remote.mark_durable(0, partition, version)
        return output

    def _open(self, partition: int, version: int) -> Held:
        self._release(partition)
        self.committer.drain()
        manifest = self.checkpoint.open_partition(0, partition, version)
        self.committer.mark_durable(manifest)
        runs = next((table.runs for table in manifest.tables.values()), TableManifest())
        recent = deltas_of(self.world.state, manifest)
        state = runs_of(self.world.state, manifest) | recent
        self.world.check_state(partition, version, state)
        return Held(manifest, state, runs, recent)

    def _release(self, partition: int) -> None:
        held = self.held.pop(partition, None)
        if held is not None and held.merging is not None:
            held.merging.cancel()

    def _apply(self, held: Held, batch: int, rows: State) -> None:
        if held.flushed is not None:
            held.runs = TableManifest((held.flushed, *held.runs.runs), held.manifest.version)
            held.flushed, held.recent = None, {}
        self._take_merged(held)
        self.held.pop(held.manifest.partition, None)  # until it is sealed, what is in memory is half a batch
        for key, amount in rows.items():
            held.state[key] = held.state.get(key, 0) + amount
        changed = {key: held.state[key] for key in rows}
        delta = json.dumps(changed).encode()
        pieces = [delta[:3], delta[3:]] if rows else []
        checksum = hash(tuple(sorted((HASHES[key], amount) for key, amount in rows.items()))) & (2**64 - 1)
        counts = {"main": len(rows)}
        tables = {"main": (held.runs, pieces)}
        sealed = seal(held.manifest, tables, input_checksum=checksum, input_rows=len(rows), rows=counts)
        sealed = self.sealed.write(sealed, self.generation)
        if self.remote is not None:
            self.remote.record_sealed(sealed.manifest)
        self.committer.submit(sealed)
        held.manifest, held.batch, held.rows = sealed.manifest, batch, rows
        held.recent = held.recent | changed
        if self.world.calm:
            return
        if held.recent and self.world.random.random() < 0.3:
            self._flush(held)
        if held.merging is None and len(held.runs.runs) > 1 and self.world.random.random() < 0.7:
            self._merge(held)

    def _flush(self, held: Held) -> None:
        """Write what no run has, of all batches so far."""
        with suppress(MillpondError):
            held.flushed = write_run(self.world.state, held.recent)

    def _merge(self, held: Held) -> None:
        range_ = self.checkpoint.claim.hash_range(held.manifest.partition)
        job = Merge(held.runs.runs, range_.lo, range_.hi - 1)
        files = self.world.state

        def local() -> Future[RunRef | None]:
            found: Future[RunRef | None] = Future()
            sending = ExitStack()
            try:
                made = sending.enter_context(merging(files, job))
            except MillpondError as error:
                found.set_exception(error)
            else:
                self.sending.append(Sending(found, made, sending, self.world.random.choice([1.0, 0.2, 0.02])))
            return found

        def opened(refs: Any) -> RunRef | None:
            for ref in refs:
                read_run(files, ref)
            return refs[0] if refs else None

        held.merged = held.runs.runs
        held.merging = self.remote.submit(lambda: job, local, opened) if self.remote is not None else local()

    def _take_merged(self, held: Held) -> None:
        if held.merging is None or not held.merging.done():
            return
        merging, held.merging = held.merging, None
        if merging.cancelled() or merging.exception() is not None:
            return
        newer = held.runs.runs[: -len(held.merged)]
        assert (*newer, *held.merged) == held.runs.runs
        made = merging.result()
        runs = (*newer, made) if made is not None else newer
        held.runs = msgspec.structs.replace(held.runs, runs=runs)

    def step(self) -> None:
        """Threads in the background go on."""
        for one in list(self.sending):
            if self.world.random.random() < one.speed:
                self.sending.remove(one)
                one.end()
        while self.remote is not None and self.world.random.random() < 0.7:
            self.remote.step()
            self.world.clock.now += 1.0

    def vanish(self) -> None:
        """The process is gone: its locks are free, nothing else happens."""
        for folder in self.sealed._folders.values():
            os.close(folder.lock)
        self.sealed._folders.clear()


class World:
    """One application and its checkpoint; see the module.

    Attributes:
        key_groups: of its state. calm_files: whether no files are written in a world that is calm.
        clock: which others wait by; times: by which objects are written.
        retain: Spark's `minBatchesToRetain`. state_retain: versions that are kept to be read.
        grace: seconds for which what is not needed any more stays.
        calm: whether slots write no files but sealed ones.
        during: called before each operation, so that others get in between.

    Args:
        directory: for the hosts' disks.
        seed: of everything random.
        partitions, slots, hosts: how many; slot *i* lives on host *i mod hosts*.
        decide: what becomes of an operation: `ok`, `before|after crash|failure`, `torn crash|failure` and
            `late crash|failure` (half of what is put is written; a put or a deletion arrives later), or `twice`.
        workers: how many compactors there are; slots compact by themselves if there are none.
        rescales: whether starts may change how many partitions and slots there are.
        origin: the world whose state this one goes on from; they share the clock and what goes wrong.
        location: of the checkpoint, if it is there already.
    """

    key_groups = GROUPS
    calm_files = True
    compactor: type[Compactor] = Merger

    def __init__(
        self,
        directory: Path,
        seed: int = 0,
        *,
        partitions: int = 2,
        slots: int = 2,
        hosts: int = 1,
        decide: Callable[[str], str] | None = None,
        workers: int = 0,
        rescales: bool = False,
        origin: World | None = None,
        location: str = "",
    ) -> None:
        number = next(_worlds)
        self.random = random.Random(seed)
        self.hosts = directory / f"world{number}"
        self.partitions = partitions
        self.slot_count = slots
        self.host_count = hosts
        self.rescales = rescales
        self.sync = False
        self.unrepeatable = False
        self.chatty = 0.5
        self.skipping_sink = True
        self.retain = 2
        self.state_retain = 0
        self.grace = 0.0
        self.origin = origin
        self.delayed: list[Callable[[], None]] = [] if origin is None else origin.delayed
        self.stalled: list[Stalled] = []
        self.trace: list[str] = [] if origin is None else origin.trace
        self._choose = decide or (lambda step: "ok")
        self._quiet = False
        self.calm = False
        self._opening = True
        self.clock: Clock = Clock() if origin is None else origin.clock
        self.times: Callable[[], float] = self.clock
        self.during: Callable[[], None] | None = None
        self.location = location or f"memory:chaos{number}/query"
        with self.wired():
            self.state: Any = open_state(self.location)
            self._ledger_files = objects.memory_files(self.location.removeprefix("memory:"))
        with self.wired(safe=True):
            self.raw: FileSystem = open_state(self.location)
            self._raw_ledger_files = objects.memory_files(self.location.removeprefix("memory:"))
        self.query_logs = QueryLogs(self._ledger_files)
        self._raw_ledger = QueryLogs(self._raw_ledger_files)
        if origin is None:
            self._raw_ledger.identify()
        self._opening = False
        self.slots: dict[int, Slot] = {}
        self.zombies: list[Slot] = []
        self.sink: dict[int, list[tuple[int, State]]] = {}
        self.replayed: list[int] = []
        self.generation = 0
        self.run = 0
        self.runs: list[int] = []
        self._runs: Iterator[int] = itertools.count(1) if origin is None else origin._runs
        self._slot_numbers = itertools.count()
        self.compactions: RemoteStats = RemoteStats()
        self.workers: list[Worker] = [made_for(self, self.compactor) for _ in range(workers)]

    # --- what is true

    def all_rows(self, batch: int, run: int) -> State:
        """The input of a batch in a run: the same in every run if the source is repeatable."""
        choice = random.Random(batch * 1000 + (run * 7_000_000 if self.unrepeatable else 0))
        return {key: choice.randrange(1, 100) for key in HASHES if choice.random() < 0.6}

    def rows(self, batch: int, partition: int, run: int) -> Any:
        """Rows of a batch that go to a partition."""
        rows = self.all_rows(batch, run)
        return {key: amount for key, amount in rows.items() if partition_of(key, self.partitions) == partition}

    def truth(self, version: int, last: int | None = None) -> State:
        """The state after `version` batches, as the sink has them; the last of them as a run has seen it."""
        state: State = {}
        for batch in range(version):
            run = self.sink[batch][-1][0] if batch in self.sink else self.run
            if last is not None and batch == version - 1:
                run = last
            for key, amount in self.all_rows(batch, run).items():
                state[key] = state.get(key, 0) + amount
        return state

    def output(self, batch: int, run: int) -> State:
        """Rows that the sink must get of a batch in a run."""
        state = self.truth(batch)
        return {key: state.get(key, 0) + amount for key, amount in self.all_rows(batch, run).items()}

    def write(self, batch: int, rows: State) -> None:
        """The sink takes a batch, as a whole."""
        assert rows == self.output(batch, self.run), f"batch {batch} in the sink"
        self.sink.setdefault(batch, []).append((self.run, rows))

    @property
    def committed(self) -> int:
        """The last batch in Spark's commit log."""
        return self._raw_ledger.last_committed

    @property
    def planned_batches(self) -> int:
        """How many batches there are in Spark's offset log."""
        return self._raw_ledger.last_planned + 1

    @property
    def planned(self) -> dict[int, float]:
        """Spark's plans, and when they were written."""
        return self._raw_ledger.entry_times("offsets")

    def check_ledger(self) -> None:
        """Whatever dies now, a start can go on: every partition is durable at the last committed batch, at least."""
        committed = self.committed
        if committed >= 0:
            recovery = Recovery(self.raw)
            assert recovery.durable(committed) or recovery.durable(committed + 1)

    def check_state(self, partition: int, version: int, state: State) -> None:
        """A wrong state must never be seen without an error."""
        truth = self.truth(version).items()
        own = {key: value for key, value in truth if partition_of(key, self.partitions) == partition}
        assert state == own, f"partition {partition} at version {version} is wrong"

    # --- what may go wrong

    @property
    def quiet(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self._quiet if self.origin is None else self.origin.quiet

    @quiet.setter
    def quiet(self, value: bool) -> None:
        self._quiet = value

    def decide(self, step: str) -> str:
        """Decide the fate of one operation."""
        if self._opening:
            return "ok"
        if self.origin is not None:
            return self.origin.decide(step)
        if self.during is not None:
            others, self.during = self.during, None
            others()
            self.during = others
        fate = "ok" if self.quiet else self._choose(step)
        if not step.startswith(("state", "disk")) and fate.partition(" ")[0] in ("torn", "late", "twice"):
            fate = "before " + (fate.partition(" ")[2] or "failure")  # query logs and sink are written atomically
        if step.startswith("disk delete"):
            fate = fate.replace("late", "before")
        if not step.startswith(("state", "disk")):
            fate = fate.replace("failure", "crash")
        self.trace.append(f"{step}: {fate}")
        return fate

    @contextmanager
    def meanwhile(self, others: Callable[[], None]) -> Iterator[None]:
        """Within this, each operation may be preceded by what others do."""
        before, self.during = self.during, others
        try:
            yield
        finally:
            self.during = before

    @contextmanager
    def wired(self, *, safe: bool = False, mortal: bool = False) -> Iterator[None]:
        """Within this, locations in memory are opened with the world's times, and unless it is `safe`, its troubles.

        Who is `mortal` does nothing any more once it has crashed, not even in a handler for all that may happen.
        """
        dead = []

        def decide(step: str) -> str:
            fate = "before crash" if dead else self.decide(step)
            if mortal and fate.endswith("crash"):
                dead.append(step)
            return fate

        def opened(name: str) -> FileSystem:
            files: FileSystem = Timed(_memory_files(name), self.clock)
            store = "state" if name.endswith("/millpond") else "spark"
            return files if safe else Tripwire(files, store, decide, self.delayed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(objects, "memory_files", opened)
            yield

    def arrive(self) -> None:
        """A put that was on its way reaches the store."""
        if self.delayed:
            with suppress(FileExistsError):
                self.delayed.pop(self.random.randrange(len(self.delayed)))()

    def kill_slot(self, index: int) -> None:
        """SIGKILL."""
        slot = self.slots.pop(index, None)
        if slot is not None:
            slot.vanish()

    def stop_slot(self, index: int) -> None:
        """SIGSTOP: another slot takes its place, and it may go on at any time."""
        slot = self.slots.pop(index, None)
        if slot is not None:
            self.zombies.append(slot)

    def wake_zombie(self) -> None:
        """SIGCONT, for one step of its committer; it cannot do harm any more."""
        if self.zombies:
            zombie = self.random.choice(self.zombies)
            try:
                zombie.committer.step()
            except Crash:
                self.zombies.remove(zombie)
                zombie.vanish()

    def kill_zombies(self) -> None:
        """SIGKILL for all that were stopped."""
        for zombie in self.zombies:
            zombie.vanish()
        self.zombies.clear()

    def lose_host(self, host: int) -> None:
        """A host with its disk."""
        for index in [index for index, slot in self.slots.items() if slot.host == host]:
            self.kill_slot(index)
        for zombie in [zombie for zombie in self.zombies if zombie.host == host]:
            self.zombies.remove(zombie)
            zombie.vanish()
        shutil.rmtree(self.hosts / str(host), ignore_errors=True)

    def end_application(self, how: str) -> None:
        """The driver is gone; its slots are killed, stopped, or finish what is sealed first."""
        for index, slot in list(self.slots.items()):
            if how == "stop":
                self.stop_slot(index)
                continue
            if how == "drain":
                try:
                    while slot.committer.step():
                        pass
                    if slot.remote is not None:
                        slot.remote.close()
                        slot.remote.step()
                except Crash:
                    pass
            self.kill_slot(index)

    def maybe_commit(self) -> None:
        """Threads in the background, and other processes, are as far as they are whenever anybody looks."""
        self.compact()
        for index, slot in list(self.slots.items()):
            try:
                slot.step()
                while self.random.random() < self.chatty:
                    if not slot.committer.step():
                        break
            except Crash:
                self.kill_slot(index)

    def compact(self) -> None:
        """Compactors are as far as they are; one that dies is followed by another, one that has stalled may go on."""
        for at in range(len(self.workers)):
            self.clock.now += self.random.choice([0.0, 1.0, 5.0, 20.0])
            try:
                if self.random.random() < 0.5:
                    self.workers[at].step()
                if self.stalled and self.random.random() < 0.3:
                    self.stalled.pop(self.random.randrange(len(self.stalled)))()
            except Crash:
                self.workers[at] = made_for(self, self.compactor)
            except MillpondError:
                pass  # a worker's answer was not taken by the store

    # --- the driver

    def start(self) -> None:
        """Do the steps of `start()` before the real sink, on a driver that has no slots yet."""
        if self.rescales and self.random.random() < 0.7:
            self.partitions = self.random.randrange(1, 6)
            self.slot_count = self.random.randrange(1, 4)
            self.trace.append(f"{self.partitions} partitions, {self.slot_count} slots")
        with self.wired():
            check_fork(self.location, self._ledger_files)
        write_or_check_schema(self.state, StateSchema(self.key_groups, (PINNED,)))
        generation = claim(self.state, run="chaos", partitions=self.partitions, key_groups=self.key_groups)
        # From here on it looks at what is durable.
        getattr(self.state, "own", self.state).claimed = generation.number
        rollback = RollBack(self._ledger_files, self.query_logs, self.state, generation.number)
        rollback.undo_interrupted()
        recovery = Recovery(self.state, generation, operators=1)
        again = write_base_and_find_replays(recovery, self.query_logs, retain=self.state_retain)
        self.generation, self.run = generation.number, next(self._runs)
        self.runs.append(self.run)
        for batch in again:
            with rollback.replaying(batch):
                self._replay(batch)
        self._collector = Collector(
            self.state,
            self.generation,
            retain=max(self.retain, self.state_retain),
            grace=self.grace,
            clock=self.times,
            elapsed=self.times,
        )

    def _replay(self, expected: int) -> None:
        planned, committed = self.query_logs.last_planned, self.query_logs.last_committed
        assert planned == expected > committed, "Spark would not run the batch that is to be repeated"
        self.run_tasks(planned, sync=True)
        self.query_logs.put("commits", planned, b"{}")
        self.replayed.append(planned)

    def next_batch(self) -> int:
        """The batch that runs next: the planned one that is not committed, else a new one, which this plans."""
        planned, committed = self.query_logs.last_planned, self.query_logs.last_committed
        if planned == committed:
            planned += 1
            self.query_logs.put("offsets", planned, b"{}")
            for log in LOGS:
                for batch in self._raw_ledger.entry_times(log):
                    if batch < planned - self.retain:
                        self.query_logs.remove(log, batch)
        assert planned == committed + 1
        return planned

    def run_batch(self) -> None:
        """One micro-batch, from planning to Spark's commit."""
        batch = self.next_batch()
        if not (self.skipping_sink and batch in self.sink):
            rows = self.run_tasks(batch, sync=self.sync)
            fate = self.decide("sink write rows")
            if fate != "before crash":
                self.write(batch, rows)
            if fate.endswith("crash"):
                raise Crash("sink")
        self.query_logs.put("commits", batch, b"{}")
        if self.random.random() < 0.5:
            self.collect()

    def collect(self, ago: int = 0) -> None:
        """Remove what is not needed while a batch runs: the newest, or the one `ago` batches before it."""
        planned = self.query_logs.retained()
        try:
            with self.wired(), self.meanwhile(self._go_on):
                self._collector.collect(planned.stop - 1 - ago, planned.start)
        except StateDamagedError as error:
            if "commits/" not in (error.file or ""):  # a torn put: as long as it is retained nothing is removed
                self.forget_torn_pin(error)

    def forget_torn_pin(self, error: StateDamagedError) -> None:
        """Delete the pin that ends all collections: the fork was interrupted while it was written."""
        name = (error.file or "").removeprefix(f"{self.raw.url}/")
        if not name.startswith("forks/"):
            raise error
        self.raw.delete(name)

    def _go_on(self) -> None:
        """Sometimes slots and compactors get in between."""
        if not self.quiet and self.random.random() < 0.1:
            self.maybe_commit()

    def run_tasks(self, batch: int, *, sync: bool) -> State:
        """All tasks of a batch, each tried up to four times; sometimes one runs again."""
        found: State = {}
        order = list(range(self.partitions))
        self.random.shuffle(order)
        for partition in order:
            for attempt in range(4):
                self.maybe_commit()
                try:
                    rows = self.run_task(batch, partition, sync=sync)
                    break
                except TaskFailed:
                    if attempt == 3:
                        raise
            found |= rows
        if self.random.random() < 0.2:  # a resubmitted stage, here or on another executor
            with suppress(TaskFailed):
                self.run_task(batch, order[0], sync=sync, remote_compactor=self.random.randrange(2))
        return found

    def run_task(self, batch: int, partition: int, *, sync: bool, remote_compactor: int = 0) -> State:
        """One attempt, in the partition's slot (or, after an executor is lost, in one that is `remote_compactor`)."""
        index = (partition + remote_compactor) % self.slot_count
        try:
            slot = self.slot(index, sync)
            return slot.run(batch, partition, self.rows(batch, partition, self.run))
        except Crash as crash:
            self.kill_slot(index)
            raise TaskFailed(str(crash)) from None
        except MillpondError as error:
            raise TaskFailed(str(error)) from error

    def slot(self, index: int, sync: bool) -> Slot:
        """The slot of that index in the present generation; a new one if it is gone or of an older one."""
        slot = self.slots.get(index)
        if slot is not None and slot.generation != self.generation:
            self.kill_slot(index)
            slot = None
        if slot is None:
            slot = self.slots[index] = self.new_slot(index, sync)
        slot.sync = sync
        return slot

    def new_slot(self, index: int, sync: bool) -> Slot:
        """A slot of the present generation."""
        return Slot(self, index % self.host_count, self.generation, sync)

    def next_slot(self) -> int:
        """A fresh slot's number."""
        return next(self._slot_numbers)

    # --- the end

    def ended(self, batches: int) -> tuple[Recovery, int]:
        """The sink has every batch, each time as it should be, and so has what is durable; its newest version."""
        assert self.committed == batches - 1
        assert sorted(self.sink) == list(range(batches))
        assert not self.skipping_sink or all(len(written) == 1 for written in self.sink.values())
        while self.delayed:
            self.arrive()
        recovery = Recovery(self.raw)
        version = batches if recovery.durable(batches) else batches - 1
        assert recovery.durable(version), "Spark's ledger is more than one batch ahead of what is durable"
        return recovery, version

    def check_end(self, batches: int) -> None:
        """The query has ended as it should; the state is that after all batches."""
        recovery, version = self.ended(batches)
        state: State = {}
        for manifest in recovery.manifests(version):
            state |= runs_of(self.raw, manifest) | deltas_of(self.raw, manifest)
        assert state == self.truth(version), f"version {version} is wrong"

    def stop_all(self) -> None:
        """No process is left, and nothing is on its way."""
        while self.delayed:
            self.arrive()
        self.end_application("kill")
        self.kill_zombies()
        self.stalled.clear()

    def clean(self) -> None:
        """End all processes and delete their folders."""
        self.end_application("kill")
        self.kill_zombies()
        shutil.rmtree(self.hosts, ignore_errors=True)

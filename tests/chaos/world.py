"""A whole application without Spark: driver, ledger, sink, slots, committers and store, moved step by step.

The parts under test are the real ones: file layer, checkpoint, committer, sealed files, recovery, garbage collection,
and the start procedure's decisions and changes to Spark's ledger. Spark itself is a model of its rules: a batch is
planned (`offsets/`), run, given to the sink, then committed (`commits/`); a start goes on with the batch that is
planned and not committed; a sink may skip a batch that it has, and then no task of it runs.

State is a running sum per key. Whenever a slot opens a version, it is compared with the truth at once. A source may be
`unrepeatable`: each run sees other rows in a batch (and so commits synchronously); then the truth is what the sink got.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.committer import Committer
from millpond.checkpoint.formats.manifest import PartitionManifest, seal
from millpond.checkpoint.generation import claim
from millpond.checkpoint.pinned import PinnedQuery, pin
from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.retention.collector import Collector
from millpond.checkpoint.sealed import SealedFiles
from millpond.errors import MillpondError
from millpond.files.backends.filesystem import FileSystem, open_filesystem
from millpond.files.backends.local import LocalFiles
from millpond.files.refs import RunRef, TableManifest
from millpond.query.ledger.ledger import Ledger, RollBack
from millpond.query.starting.start import begin
from tests.chaos.tripwire import Crash, Tripwire

KEYS = 4
State = dict[str, int]
_worlds = itertools.count()


class TaskFailed(Exception):
    """An attempt failed; Spark may try again."""


@dataclass
class Held:
    """A partition in a slot's memory."""

    manifest: PartitionManifest
    state: State
    runs: TableManifest
    flushed: RunRef | None = None  # written, adopted with the next batch
    batch: int = -1
    rows: State = field(default_factory=dict)


class Violation(BaseException):
    """The protocol was broken; not an `Exception`, since committers outlive those."""


class WatchedCommitter(Committer):
    """A committer that is caught acknowledging what a newer run may not see."""

    def _acknowledge(self, group: Any, size: int) -> None:
        if self.checkpoint.files.claimed > self.checkpoint.generation:  # type: ignore[attr-defined]
            raise Violation("acknowledged after a newer run has begun")
        super()._acknowledge(group, size)


class Slot:
    """What a slot does, over the real checkpoint classes."""

    def __init__(self, world: World, host: int, generation: int, sync: bool) -> None:
        self.world = world
        self.host = host
        self.name = f"{world.next_slot():04d}"
        self.generation = generation
        self.sync = sync
        self.held: dict[int, Held] = {}
        self.handles: list[int] = []
        self.checkpoint = Checkpoint(world.state, generation)
        directory = world.hosts / str(host)
        directory.mkdir(parents=True, exist_ok=True)
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
        self.committer.wait_durable(0, partition, batch + 1 if self.sync else batch)
        return output

    def _open(self, partition: int, version: int) -> Held:
        self.held.pop(partition, None)
        self.committer.drain()
        manifest = self.checkpoint.open_partition(0, partition, version)
        self.committer.opened(manifest)
        state: State = {}
        runs = TableManifest()
        for table in manifest.tables.values():
            runs = table.runs
            for run in reversed(runs.runs):
                state |= json.loads(self.world.state.get(run.name))
            for data in self.checkpoint.read_deltas(table.deltas):
                state |= json.loads(bytes(memoryview(data)))
        self.world.check_state(partition, version, state)
        return Held(manifest, state, runs)

    def _apply(self, held: Held, batch: int, rows: State) -> None:
        if held.flushed is not None:
            held.runs, held.flushed = TableManifest((held.flushed,), held.flushed.flushed), None
        self.held.pop(held.manifest.partition, None)  # until it is sealed, what is in memory is half a batch
        for key, amount in rows.items():
            held.state[key] = held.state.get(key, 0) + amount
        delta = json.dumps({key: held.state[key] for key in rows}).encode()
        pieces = [delta[:3], delta[3:]] if rows else []
        checksum = hash(tuple(sorted(rows.items()))) & (2**64 - 1)
        sealed = seal(held.manifest, {"main": (held.runs, pieces)}, input_checksum=checksum, input_rows=len(rows))
        sealed = self.sealed.write(sealed, self.generation)
        self.committer.submit(sealed)
        held.manifest, held.batch, held.rows = sealed.manifest, batch, rows
        if self.world.random.random() < 0.3:
            self._flush(held)

    def _flush(self, held: Held) -> None:
        content = json.dumps(held.state).encode()
        name = f"files/{uuid.uuid4().hex}.run"
        try:
            self.world.state.put(name, [content])
        except MillpondError:
            return
        held.flushed = RunRef(name, len(held.state), len(content), 0, 2**64 - 1, held.manifest.version)

    def vanish(self) -> None:
        """The process is gone: its locks are free, nothing else happens."""
        for folder in self.sealed._folders.values():
            os.close(folder.lock)
        self.sealed._folders.clear()


class World:
    """One application and its checkpoint; see the module.

    Attributes:
        key_groups: of its state.

    Args:
        directory: for the hosts' disks.
        seed: of everything random.
        partitions, slots, hosts: how many; slot *i* lives on host *i mod hosts*.
        decide: what becomes of an operation: `ok`, `before|after crash|failure`, `torn crash|failure` and
            `late crash|failure` (puts only: half of it is written; it arrives later), or `twice`.
    """

    key_groups = 64

    def __init__(
        self,
        directory: Path,
        seed: int = 0,
        *,
        partitions: int = 2,
        slots: int = 2,
        hosts: int = 1,
        decide: Callable[[str], str] | None = None,
    ) -> None:
        number = next(_worlds)
        self.random = random.Random(seed)
        self.hosts = directory / f"world{number}"
        self.partitions = partitions
        self.slot_count = slots
        self.host_count = hosts
        self.sync = False
        self.unrepeatable = False
        self.chatty = 0.5
        self.skipping_sink = True
        self.retain = 2
        self.delayed: list[Callable[[], None]] = []
        self.trace: list[str] = []
        self._choose = decide or (lambda step: "ok")
        self.quiet = False
        store = open_filesystem(f"memory:chaos{number}/state")
        self.raw = store
        self.state = Tripwire(store, "state", self.decide, self.delayed)
        ledger = open_filesystem(f"memory:chaos{number}/spark")
        self._ledger_files: FileSystem = Tripwire(ledger, "spark", self.decide, self.delayed)
        self.ledger = Ledger(self._ledger_files)
        self._raw_ledger = Ledger(ledger)
        self.slots: dict[int, Slot] = {}
        self.zombies: list[Slot] = []
        self.sink: dict[int, list[tuple[int, State]]] = {}
        self.replayed: list[int] = []
        self.generation = 0
        self._slot_numbers = itertools.count()

    # --- what is true

    def rows(self, batch: int, partition: int, run: int) -> State:
        """The input of a batch in a run (by its generation): the same in every run if the source is repeatable."""
        choice = random.Random(batch * 1000 + partition + (run * 7_000_000 if self.unrepeatable else 0))
        keys = [f"{partition}/{key}" for key in range(KEYS) if choice.random() < 0.6]
        return {key: choice.randrange(1, 100) for key in keys}

    def truth(self, partition: int, version: int) -> State:
        """The state after `version` batches, as the sink has them."""
        state: State = {}
        for batch in range(version):
            run = self.sink[batch][-1][0] if batch in self.sink else self.generation
            for key, amount in self.rows(batch, partition, run).items():
                state[key] = state.get(key, 0) + amount
        return state

    def output(self, batch: int, run: int) -> State:
        """What the sink must get of a batch in a run."""
        found: State = {}
        for partition in range(self.partitions):
            state, rows = self.truth(partition, batch), self.rows(batch, partition, run)
            found |= {key: state.get(key, 0) + amount for key, amount in rows.items()}
        return found

    def write(self, batch: int, rows: State) -> None:
        """The sink takes a batch, as a whole."""
        assert rows == self.output(batch, self.generation), f"batch {batch} in the sink"
        self.sink.setdefault(batch, []).append((self.generation, rows))

    @property
    def committed(self) -> int:
        """The last batch in Spark's ledger."""
        return self._raw_ledger.last("commits")

    def check_ledger(self) -> None:
        """Whatever dies now, a start can go on: every partition is durable at the last committed batch, at least."""
        committed = self.committed
        if committed >= 0:
            recovery = Recovery(self.raw)
            assert recovery.durable(committed) or recovery.durable(committed + 1)

    def check_state(self, partition: int, version: int, state: State) -> None:
        """A wrong state must never be seen without an error."""
        assert state == self.truth(partition, version), f"partition {partition} at version {version} is wrong"

    # --- what may go wrong

    def decide(self, step: str) -> str:
        """What becomes of one operation."""
        fate = "ok" if self.quiet else self._choose(step)
        if not step.startswith(("state", "disk")) and fate.partition(" ")[0] in ("torn", "late", "twice"):
            fate = "before " + (fate.partition(" ")[2] or "failure")  # ledger and sink are written atomically
        if not step.startswith(("state", "disk")):
            fate = fate.replace("failure", "crash")
        self.trace.append(f"{step}: {fate}")
        return fate

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
                except Crash:
                    pass
            self.kill_slot(index)

    def maybe_commit(self) -> None:
        """Committers are threads of their own: each may be at any point whenever anybody looks."""
        for index, slot in list(self.slots.items()):
            while self.random.random() < self.chatty:
                try:
                    if not slot.committer.step():
                        break
                except Crash:
                    self.kill_slot(index)
                    break

    # --- the driver

    def start(self) -> None:
        """What happens in `start()` before the real sink, on a driver that has no slots yet."""
        pin(self.state, PinnedQuery(self.key_groups, ()))
        generation = claim(self.state, run="chaos", partitions=self.partitions, key_groups=self.key_groups)
        self.state.claimed = generation.number  # from here on it looks at what is durable
        rollback = RollBack(self._ledger_files, self.ledger, self.state, generation.number)
        rollback.undo_interrupted()
        recovery = Recovery(self.state, generation, operators=1)
        again = begin(recovery, self.ledger)
        self.generation = generation.number
        for batch in again:
            with rollback.again(batch):
                self._replay(batch)
        self._collector = Collector(self.state, self.generation, retain=self.retain, grace=0.0)

    def _replay(self, expected: int) -> None:
        planned, committed = self.ledger.last("offsets"), self.ledger.last("commits")
        assert planned == expected > committed, "Spark would not run the batch that is to be repeated"
        self.run_tasks(planned, sync=True)
        self.ledger.put("commits", planned, b"{}")
        self.replayed.append(planned)

    def next_batch(self) -> int:
        """The batch that runs next: the planned one that is not committed, else a new one, which this plans."""
        planned, committed = self.ledger.last("offsets"), self.ledger.last("commits")
        if planned == committed:
            planned += 1
            self.ledger.put("offsets", planned, b"{}")
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
        self.ledger.put("commits", batch, b"{}")
        if self.random.random() < 0.5:
            self.collect(batch + 1)

    def collect(self, running: int) -> None:
        """Remove what is not needed while a batch runs."""
        self._collector.collect(running)

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
                self.run_task(batch, order[0], sync=sync, elsewhere=self.random.randrange(2))
        return found

    def run_task(self, batch: int, partition: int, *, sync: bool, elsewhere: int = 0) -> State:
        """One attempt, in the partition's slot (or, after an executor is lost, in one that is `elsewhere`)."""
        index = (partition + elsewhere) % self.slot_count
        try:
            slot = self.slot(index, sync)
            return slot.run(batch, partition, self.rows(batch, partition, self.generation))
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
        reader = Checkpoint(self.raw, self.generation)
        for partition in range(self.partitions):
            state: State = {}
            for table in recovery.manifest(0, partition, version).tables.values():
                for run in reversed(table.runs.runs):
                    state |= json.loads(self.raw.get(run.name))
                for data in reader.read_deltas(table.deltas):
                    state |= json.loads(bytes(memoryview(data)))
            self.check_state(partition, version, state)

    def clean(self) -> None:
        """Let go of everything on disk."""
        self.end_application("kill")
        self.kill_zombies()
        shutil.rmtree(self.hosts, ignore_errors=True)

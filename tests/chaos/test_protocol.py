"""The commit protocol as a state machine: Hypothesis looks for a sequence of steps that breaks it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millpond.errors import FencedError, TransientError
from tests.chaos.neighbours import Neighbours
from tests.chaos.sums import State
from tests.chaos.test_schedules import CRASHES, FAILURES, FIRST, SCHEDULES, drive
from tests.chaos.tripwire import Crash
from tests.chaos.world import TaskFailed, World
from tests.selection import scaled

T = TypeVar("T")
MORE = 2
"""Batches that run undisturbed at the end."""


@seed(FIRST)
class Protocol(RuleBasedStateMachine):
    """Batches task by task, with committers, deaths, stops, late puts, lost hosts and restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.armed: list[tuple[int, str]] = []
        self.running = False
        self.batch: int | None = None
        self.done: dict[int, State] = {}

    @initialize(
        partitions=st.integers(1, 3),
        slots=st.integers(1, 3),
        hosts=st.integers(1, 2),
        skipping=st.booleans(),
        kind=st.sampled_from(["async", "sync", "unrepeatable"]),
        workers=st.integers(0, 1),
    )
    def build(self, partitions: int, slots: int, hosts: int, skipping: bool, kind: str, workers: int) -> None:
        self.world = World(
            Path(self.directory.name),
            partitions=partitions,
            slots=slots,
            hosts=hosts,
            decide=self.decide,
            workers=workers,
        )
        self.neighbours = Neighbours(self.world, alone=True)
        self.world.chatty = 0.0
        self.world.skipping_sink = skipping
        self.world.sync = kind != "async"
        self.world.unrepeatable = kind == "unrepeatable"
        self.start(partitions)
        self.run_batches(2)

    def decide(self, step: str) -> str:
        self.armed = [(left - 1, fate) for left, fate in self.armed]
        due = [fate for left, fate in self.armed if left <= 0]
        self.armed = [(left, fate) for left, fate in self.armed if left > 0]
        return due[0] if due else "ok"

    # --- what goes wrong

    @precondition(lambda self: not self.armed)
    @rule(after=st.integers(1, 40), fate=st.sampled_from(CRASHES + FAILURES))
    def arm(self, after: int, fate: str) -> None:
        self.armed.append((after, fate))

    @rule(
        what=st.sampled_from(["kill slot", "stop slot", "wake zombie", "arrive", "lose host"]),
        index=st.integers(0, 2),
    )
    def trouble(self, what: str, index: int) -> None:
        world = self.world
        acts: dict[str, Callable[[], None]] = {
            "kill slot": lambda: world.kill_slot(index),
            "stop slot": lambda: world.stop_slot(index),
            "wake zombie": world.wake_zombie,
            "arrive": world.arrive,
            "lose host": lambda: world.lose_host(index % world.host_count),
        }
        acts[what]()

    @precondition(lambda self: self.running)
    @rule(how=st.sampled_from(["kill", "stop", "drain"]))
    def end_application(self, how: str) -> None:
        self.running = False
        self.batch = None
        self.world.end_application(how)

    # --- what goes on

    @precondition(lambda self: not self.running)
    @rule(partitions=st.integers(1, 4))
    def start(self, partitions: int) -> None:
        self.world.partitions = partitions
        self.running = self.driver(lambda: self.world.start() or True) is True

    @precondition(lambda self: self.running)
    @rule(remote_compactor=st.integers(0, 3))
    def advance(self, remote_compactor: int) -> None:
        """Plan a batch, run its next task, or finish it."""
        if self.batch is None:
            self.batch, self.done = self.driver(self.world.next_batch), {}
            return
        missing = [p for p in range(self.world.partitions) if p not in self.done]
        if missing and not self.skipped():
            self.task(missing[0], remote_compactor // 3)
        else:
            self.finish(self.batch)

    @precondition(lambda self: self.running and self.batch is None)
    @rule(count=st.integers(1, 3))
    def run_batches(self, count: int) -> None:
        for _ in range(count):
            if self.running:
                self.driver(self.world.run_batch)

    @precondition(lambda self: self.batch is not None and self.done)
    @rule(partition=st.integers(0, 2), remote_compactor=st.integers(0, 1))
    def second_attempt(self, partition: int, remote_compactor: int) -> None:
        if partition in self.done:
            self.task(partition, remote_compactor)

    @rule(index=st.integers(0, 2))
    def commit_some(self, index: int) -> None:
        slot = self.world.slots.get(index)
        if slot is not None:
            try:
                slot.committer.step()
            except Crash:
                self.world.kill_slot(index)

    @rule(what=st.sampled_from(["fork", "live", "open", "read", "collect", "compact"]), which=st.integers(0, 2))
    def others(self, what: str, which: int) -> None:
        """Another process at the location does something; the time goes on."""
        others = self.neighbours
        world = others.family[which % len(others.family)]
        self.world.clock.now += 30.0
        with suppress(Crash):  # a process of its own
            if what == "fork" and len(others.family) < 3:
                others.fork(world)
            elif what == "live" and world is not self.world:
                others.live(world)
            elif what == "open":
                others.open_version(world)
            elif what == "read" and others.reading:
                others.read(others.reading.pop())
            elif what == "collect":
                others.collect(world)
            elif what == "compact":
                self.world.compact()

    @precondition(lambda self: self.running)
    @rule()
    def collect(self) -> None:
        self.driver(self.world.collect)

    def task(self, partition: int, remote_compactor: int) -> None:
        assert self.batch is not None
        with suppress(TaskFailed):
            self.done[partition] = self.world.run_task(
                self.batch, partition, sync=self.world.sync, remote_compactor=remote_compactor
            )

    def finish(self, batch: int) -> None:
        if not self.skipped():
            rows: State = {}
            for piece in self.done.values():
                rows |= piece
            self.world.write(batch, rows)
        self.driver(lambda: self.world.query_logs.put("commits", batch, b"{}"))
        self.batch = None

    def skipped(self) -> bool:
        return self.world.skipping_sink and self.batch in self.world.sink

    def driver(self, act: Callable[[], T]) -> T | None:
        """A step of the driver: it dies of a crash, and ends with an error."""
        try:
            return act()
        except (Crash, TaskFailed, TransientError, FencedError):
            self.end_application("stop")
            return None

    @invariant()
    def a_start_can_go_on(self) -> None:
        if hasattr(self, "world"):
            self.world.check_ledger()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.quiet = True
                self.world.end_application("stop")
                batches = self.world.committed + 1 + MORE
                drive(self.world, batches)
                for zombie in self.world.zombies:
                    while zombie.committer.step():
                        pass
                self.world.check_end(batches)
                self.neighbours.end()
                self.world.clean()
        finally:
            self.directory.cleanup()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=max(scaled(40), SCHEDULES // 5),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

"""The handle of a query over the runs behind it, and when the supervisor starts it again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

import millpond.query.running.handle as handle
import millpond.query.running.supervisor as supervision
from millpond.checkpoint.generation import Restart, check_overtaken, claim
from millpond.errors import StateDamagedError, TransientError
from millpond.humanize import first_line
from millpond.query.running.handle import RunningQuery
from millpond.query.running.supervisor import Supervisor
from tests.checkpoint.rig import begin, memory
from tests.support.waiting import wait_until


class Java:
    """A run of a query as PySpark sees it: goes on until it is stopped, or fails."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.error: str | None = None

    def id(self) -> Any:
        return SimpleNamespace(toString=lambda: "0f3c")

    def isActive(self) -> bool:
        return not self.over.is_set()

    def awaitTermination(self, *milliseconds: int) -> bool | None:
        ended = self.over.wait(milliseconds[0] / 1000 if milliseconds else None)
        if self.error is not None:
            error: Any = StreamingQueryException(self.error)
            error._desc = self.error  # as errors that come from Spark's JVM have it
            raise error
        return ended if milliseconds else None

    def processAllAvailable(self) -> None:
        self.over.wait(0.05)

    def stop(self) -> None:
        self.over.set()

    def fail(self, error: str) -> None:
        self.error = error
        self.over.set()

    def exception(self) -> Any:
        return SimpleNamespace(isDefined=lambda: False)

    def lastProgress(self) -> None:
        return None

    def recentProgress(self) -> list[Any]:
        return []


class Placing:
    """A placement whose hosts are lost by a test."""

    def __init__(self) -> None:
        self.lost: list[tuple[str, set[int]]] = []
        self.error: Exception | None = None

    def update(self) -> tuple[frozenset[str], frozenset[int]]:
        if self.error is not None:
            raise self.error
        if not self.lost:
            return frozenset(), frozenset()
        host, partitions = self.lost.pop()
        return frozenset([host]), frozenset(partitions)


class Hanging:
    """Hosts that a test lets hang."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self.polls = 0

    def remove_silent(self) -> None:
        self.polls += 1

    def removed_hosts(self) -> frozenset[str]:
        return frozenset(self.hosts)


class World:
    """A supervised query whose commits, hosts and restarts are the test's."""

    def __init__(self, limit: int = 3) -> None:
        self.placing, self.hanging, self.java, self.committed = Placing(), Hanging(), [Java()], 4
        self.durable = False
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self.restarts: list[Restart] = []
        self.replaced: list[int] = []
        self.query = RunningQuery(self.java[0], supervised=True)
        self.in_batch = True
        task = SimpleNamespace(query="0f3c", partitions=4, generation=7, location="")
        self.supervisor = Supervisor(self.query, self.placing, self.hanging, [task], self, self.restart, limit)  # type: ignore[arg-type]
        self.supervisor._is_durable = lambda partitions, version: self.durable  # type: ignore[method-assign]
        self.supervisor.start()

    @property
    def last_committed(self) -> int:
        return self.committed

    @property
    def last_planned(self) -> int:
        return self.committed + self.in_batch

    def restart(self, restart: Restart, replaced: int) -> Any:
        self.restarts.append(restart)
        self.replaced.append(replaced)
        self.java[-1].over.set()  # a start stops the run before
        assert self.gate.wait(10)
        if self.errors:
            raise self.errors.pop()
        self.java.append(Java())
        return StreamingQuery(self.java[-1])

    def runs(self, count: int) -> None:
        """Wait until this many runs have begun."""
        wait_until(lambda: len(self.java) >= count and self.query._jsq is self.java[count - 1])


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(supervision, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(supervision, "_COMMIT_SECONDS", 0.2)
    monkeypatch.setattr(supervision, "_STUCK_SECONDS", 0.5)
    monkeypatch.setattr(supervision, "open_state", lambda location, retry_config: None)
    monkeypatch.setattr(supervision, "check_overtaken", lambda *_: None)
    monkeypatch.setattr(supervision, "_FIRST_PAUSE_SECONDS", 0.01)
    made: list[World] = []

    def make(**options: int) -> World:
        made.append(World(**options))
        return made[-1]

    yield make
    for world in made:
        world.query.stop()


def test_a_loss_that_is_not_durable_restarts_behind_the_same_handle(worlds: Any) -> None:
    world = worlds()
    waited: list[Any] = []
    waiting = threading.Thread(target=lambda: waited.append(world.query.awaitTermination()))
    waiting.start()
    world.placing.lost.append(("b", {1, 3}))
    world.runs(2)
    assert world.query.isActive
    assert waiting.is_alive()
    assert world.query.awaitTermination(0.1) is False
    world.query.processAllAvailable()
    world.query.stop()
    waiting.join(10)
    assert waited == [None]
    assert not world.query.isActive
    assert world.query.exception() is None
    assert len(world.java) == 2
    assert world.restarts == [Restart(1, "state_lost", ("b",))]
    assert world.replaced == [7]


def test_executors_are_asked_while_the_query_is_started_again(worlds: Any) -> None:
    """One that hangs then would hold the repeated batch up until Spark notices it."""
    world = worlds()
    world.gate.clear()
    world.placing.lost.append(("b", {1}))
    wait_until(lambda: bool(world.restarts))
    before = world.hanging.polls
    wait_until(lambda: world.hanging.polls > before + 2)
    world.gate.set()
    world.runs(2)


def test_a_loss_whose_versions_are_durable_leaves_the_run_alone(worlds: Any) -> None:
    world = worlds()
    world.durable = True
    world.placing.lost.append(("b", {1}))
    time.sleep(0.4)
    world.committed += 1  # the batch that ran during the loss; what it made is durable, too
    time.sleep(0.4)
    world.durable = False  # as every version is at first
    time.sleep(0.4)
    assert len(world.java) == 1
    assert world.query.isActive


def test_a_lost_host_without_partitions_leaves_the_run_alone(worlds: Any) -> None:
    world = worlds()
    world.placing.lost.append(("b", set()))
    world.supervisor._is_durable = lambda partitions, version: not partitions
    time.sleep(0.6)  # three times as long as commits may take here
    assert not world.restarts


def test_batches_that_went_on_end_a_loss(worlds: Any) -> None:
    world = worlds()
    world.durable = True
    world.placing.lost.append(("b", {1}))
    time.sleep(0.1)
    world.committed += 2
    time.sleep(0.1)
    world.durable = False
    time.sleep(0.4)
    assert len(world.java) == 1


def test_what_the_running_batch_made_on_the_lost_host_may_be_lost_later(worlds: Any) -> None:
    """Tasks that had finished there are not run again: the batch ends, and the next one misses their state."""
    world = worlds()
    world.durable = True
    world.placing.lost.append(("b", {1}))
    time.sleep(0.3)
    assert len(world.java) == 1
    world.committed, world.durable = 5, False
    world.runs(2)
    assert world.query.isActive


def test_a_run_that_a_newer_one_has_fenced_is_not_started_again(worlds: Any) -> None:
    world = worlds()
    world.placing.lost.append(("b", {1}))
    world.java[0].fail("[FENCED] A newer run has taken over.")
    with pytest.raises(StreamingQueryException, match="FENCED"):
        world.query.awaitTermination()
    assert len(world.java) == 1


def test_a_refusal_keeps_its_code(worlds: Any) -> None:
    world = worlds()
    world.errors.append(StateDamagedError("A commit is gone."))
    world.placing.lost.append(("b", {1}))
    with pytest.raises(StreamingQueryException, match=r"\[STATE_DAMAGED\] A commit is gone"):
        world.query.awaitTermination()


@pytest.mark.parametrize("placed", [{1}, set()])
def test_a_run_that_fails_after_a_loss_is_started_again(worlds: Any, placed: set[int]) -> None:
    """A task may have run on a host on which no partition was placed."""
    world = worlds()
    world.placing.lost.append(("b", placed))
    world.java[0].fail("a task failed four times")
    world.runs(2)
    assert world.restarts == [Restart(1, "run_failed", ("b",))]
    assert world.query.exception() is None
    assert world.query.isActive


def test_a_batch_that_waits_for_a_host_that_hangs_is_repeated(worlds: Any) -> None:
    world = worlds()
    world.durable = True
    world.hanging.hosts.add("b")
    world.placing.lost.append(("b", {1}))
    world.runs(2)
    assert world.restarts == [Restart(1, "batch_stuck", ("b",))]


@pytest.mark.parametrize(("hangs", "in_batch"), [("b", False), ("c", True)])
def test_only_a_batch_that_runs_when_its_host_hangs_is_repeated(worlds: Any, hangs: str, in_batch: bool) -> None:
    world = worlds()
    world.durable, world.in_batch = True, in_batch
    world.hanging.hosts.add(hangs)
    world.placing.lost.append(("b", {1}))
    time.sleep(1.5)  # three times as long as a batch may take here
    assert not world.restarts


def test_a_batch_that_has_ended_is_not_stuck(worlds: Any) -> None:
    world = worlds()
    world.durable, world.committed = True, 4
    loss = supervision.Loss(frozenset("b"), frozenset({1}), frozenset("b"), last=6, stuck_at=0.0)
    assert not world.supervisor._is_over(loss, None)
    assert loss.stuck_at == 0.0
    world.committed = 5
    assert world.supervisor._is_over(loss, None)
    assert loss.stuck_at == math.inf


OWN = Restart(1, "state_lost", ("b",))


@pytest.mark.parametrize("claims", [[], [OWN], [None], [None, OWN], [OWN, Restart(1, "state_lost", ("c",))]])
def test_a_newer_run_is_not_overtaken(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, claims: list[Restart | None]
) -> None:
    """Tries of this restart that have failed may have claimed the query, before or after a newer run."""
    files = memory()
    claim(files, run="own", partitions=1, minimum=7)
    for restart in claims:
        claim(files, run="newer", partitions=1, restart=restart)
    world = worlds()
    monkeypatch.setattr(supervision, "open_state", lambda location, retry_config: files)
    monkeypatch.setattr(supervision, "check_overtaken", check_overtaken)
    world.placing.lost.append(("b", {1}))
    if set(claims) <= {OWN}:
        world.runs(2)
        return
    with pytest.raises(StreamingQueryException, match="newer run of the query has taken over"):
        world.query.awaitTermination()
    assert not world.restarts


def test_a_loss_ends_while_the_query_is_idle(worlds: Any) -> None:
    world = worlds()
    world.durable, world.in_batch = True, False
    loss = supervision.Loss(frozenset("b"), frozenset({1}), frozenset())
    assert world.supervisor._is_over(loss, None)
    world.in_batch = True
    assert not world.supervisor._is_over(loss, None)


def test_a_run_that_fails_by_itself_stays_failed(worlds: Any) -> None:
    world = worlds()
    world.java[0].fail("the user's mistake")
    with pytest.raises(StreamingQueryException, match="the user's mistake"):
        world.query.awaitTermination()
    assert len(world.java) == 1
    assert not world.query.isActive


def test_restarts_are_bounded(worlds: Any) -> None:
    world = worlds(limit=2)
    for runs in (2, 3):
        world.placing.lost.append(("b", {1}))
        world.runs(runs)
    world.placing.lost.append(("c", {0}))
    assert [restart.number for restart in world.restarts] == [1, 2]
    with pytest.raises(StreamingQueryException, match=r"hosts were lost \(c\) .* 2 times within ten minutes"):
        world.query.awaitTermination()
    assert not world.query.isActive
    assert not world.java[2].isActive()
    assert isinstance(world.query.exception().__cause__, TransientError)


@pytest.mark.parametrize(
    "error", [TransientError("The store is slow."), StreamingQueryException("[STREAM_FAILED] The source is away.")]
)
def test_a_restart_that_fails_for_a_while_counts(worlds: Any, error: Exception) -> None:
    """A batch that the start repeats ends with a `StreamingQueryException`."""
    world = worlds()
    world.errors.append(error)
    world.placing.lost.append(("b", {1}))
    world.runs(2)
    assert [restart.number for restart in world.restarts] == [1, 1]  # only one has begun
    assert world.query.isActive


@pytest.mark.parametrize(
    "error",
    [
        OSError("the driver has no memory"),
        StreamingQueryException("[STREAM_FAILED] [FENCED] A newer run has taken over."),
        StreamingQueryException("[STREAM_FAILED] [STATE_INCOMPATIBLE] The query differs."),
    ],
)
def test_a_restart_that_cannot_succeed_ends_the_query(worlds: Any, error: Exception) -> None:
    world = worlds()
    world.errors.append(error)
    world.placing.lost.append(("b", {1}))
    with pytest.raises(StreamingQueryException, match="could not be started again") as ended:
        world.query.awaitTermination()
    assert first_line(error) in str(ended.value)
    assert len(world.restarts) == 1


def test_a_query_whose_restarts_all_fail_says_why(worlds: Any) -> None:
    world = worlds(limit=2)
    world.errors += [StreamingQueryException("[STREAM_FAILED] The source is away.")] * 2
    world.placing.lost.append(("b", {1}))
    with pytest.raises(StreamingQueryException, match=r"2 times .* failed: \[STREAM_FAILED\] The source is away"):
        world.query.awaitTermination()
    assert len(world.restarts) == 2


def test_a_stop_while_it_is_started_again_ends_the_next_run(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handle, "_SILENT_SECONDS", 0.05)
    world = worlds()
    world.gate.clear()
    world.placing.lost.append(("b", {1}))
    assert world.java[0].over.wait(10)
    stopping = threading.Thread(target=world.query.stop)
    stopping.start()
    deadline = time.monotonic() + 30
    while "stop() waits" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stopping.is_alive()
    assert "query 0f3c is checked, or started again, after a lost host: stop() waits" in caplog.text
    world.gate.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert not world.query.isActive
    assert len(world.java) == 2
    assert not world.java[1].isActive()


def test_a_stop_does_not_wait_for_the_next_try(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_FIRST_PAUSE_SECONDS", 600.0)
    world = worlds()
    world.errors.append(TransientError("the store is away"))
    world.placing.lost.append(("b", {1}))
    wait_until(lambda: world.restarts and not world.errors)
    stopping = threading.Thread(target=world.query.stop)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive()


@pytest.mark.parametrize("runs", [True, False])
def test_a_query_outlives_its_supervision(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: bool
) -> None:
    monkeypatch.setattr(supervision, "_application_runs", lambda: runs)
    world = worlds()
    error = world.placing.error = ZeroDivisionError("a bug")
    deadline = time.monotonic() + 30
    while not world.query._over:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert world.query.isActive
    assert world.query.exception() is None
    warned = [record for record in caplog.records if "supervision failed" in record.message]
    assert [record.exc_info[1] for record in warned if record.exc_info] == ([error] if runs else [])
    world.java[0].over.set()
    assert not world.query.isActive


class Failing:
    """A store that lists nothing while a test says so."""

    def __init__(self, files: Any) -> None:
        self.files, self.fails = files, False

    def __getattr__(self, name: str) -> Any:
        if self.fails and name == "list":
            raise TransientError("The store failed.")
        return getattr(self.files, name)


def test_a_store_that_fails_does_not_say_that_a_version_is_lost(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Failing(memory())
    monkeypatch.setattr(supervision, "open_state", lambda location, retry_config: files)
    generation, _ = begin(files.files, partitions=4)
    world = worlds()
    world.supervisor._tasks = [SimpleNamespace(query="0f3c", partitions=4, generation=generation.number, location="")]
    del world.supervisor._is_durable
    assert world.supervisor._is_durable([1], 0)
    assert not world.supervisor._is_durable([1], 5)
    files.fails = True
    with pytest.raises(TransientError, match="The store failed"):
        world.supervisor._is_durable([1], 5)
    world.placing.lost.append(("b", {1}))
    time.sleep(0.6)  # three times as long as commits may take here
    assert not world.restarts
    files.fails = False
    world.runs(2)
    assert world.restarts == [Restart(1, "state_lost", ("b",))]

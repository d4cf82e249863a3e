"""Partitions that move between hosts: a slot of each host, on one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from millpond.checkpoint.checkpoint import Checkpoint
from millpond.checkpoint.forks.parents import open_state
from millpond.checkpoint.formats.commit import commit_prefix, read_header
from millpond.slot.partition import partitions
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.messages import RunBatch
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall, Field
from millpond.tasks.operator_task import OperatorTask
from tests.support.waiting import wait_until

from .conftest import begin, grouped, own_jvm, table_of


@pytest.fixture
def located(counting: OperatorTask, tmp_path: Path) -> OperatorTask:
    task = msgspec.structs.replace(counting, partitions=2, located=True, location=f"file:{tmp_path}/located")
    begin(task)
    return task


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[list[PartitionServer]]:
    servers = []
    for host in "ab":
        (tmp_path / host).mkdir()
        servers.append(PartitionServer(tmp_path / host, host=host))
    yield servers
    for server in servers:
        server.close()


def run(slot: PartitionServer, task: OperatorTask, partition: int, batch: int) -> dict[int, tuple[int, ...]]:
    rows = grouped(partition, [2 * n + partition for n in range(50)], [batch] * 50, partitions=2)
    return table_of(slot.run(RunBatch(task, partition, batch, 0), iter([rows])))


def open_partitions(slot: PartitionServer, task: OperatorTask) -> set[int]:
    return {number for _, number in slot._query(task.key).partitions}


def test_a_partition_that_moved_is_closed_and_may_come_back(
    slots: list[PartitionServer], located: OperatorTask
) -> None:
    here, there = slots
    places = [here, here, there, there, there, here, here, there]  # of partition 1, by batch
    for batch, place in enumerate(places):
        for partition, slot in ((0, here), (1, place)):
            found = run(slot, located, partition, batch)
            total = sum(range(batch + 1))
            assert found == {2 * n + partition: (batch + 1, total) for n in range(50)}
        # The batch in which it moves still waits for its last commit, so that it is closed in the one after it.
        gone = batch >= 1 and places[batch - 1] is not here and place is not here
        if gone:
            running = here._query(located.key).running
            assert running is not None
            wait_until(lambda running=running: not running.committer._pending)
            run(here, located, 0, batch)
            assert open_partitions(here, located) == {0}
    checkpoint = Checkpoint(open_state(located.location), located.generation)
    versions = range(1, len(places))
    manifests = [checkpoint.open_partition(0, 1, version) for version in versions]
    assert [manifest.metrics["moved_partitions"] for manifest in manifests] == [0, 0, 1, 0, 0, 1, 0]
    opening = [manifest.metrics["open_ms"] for manifest in manifests]
    assert [at for at, ms in enumerate(opening) if ms] == [0, 2, 5]
    assert "".join(manifest.host for manifest in manifests) == "aabbbaa"


def test_a_slot_whose_partitions_have_all_moved_releases_the_query(
    slots: list[PartitionServer], located: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_IDLE_SECONDS", 0.05)
    here, there = slots
    held = here._query(located.key)
    for batch in range(2):
        run(there, located, 0, batch)
        run(here, located, 1, batch)
    # Version 3 of the other partition is no proof that batch 2 has ended.
    run(there, located, 0, 2)
    running = there._query(located.key).running
    assert running is not None
    wait_until(lambda: running.checkpoint.has_commits_from(3))
    time.sleep(0.5)
    assert open_partitions(here, located) == {1}
    run(there, located, 1, 2)
    for partition in range(2):
        run(there, located, partition, 3)
    wait_until(lambda: held.running is None)
    assert not held.partitions
    time.sleep(0.5)
    assert open_partitions(there, located) == {0, 1}  # the query is idle, and nothing runs elsewhere
    run(there, located, 0, 4)
    assert run(here, located, 1, 4) == {2 * n + 1: (5, 10) for n in range(50)}


def test_without_placement_nothing_is_closed(slots: list[PartitionServer], located: OperatorTask) -> None:
    task = msgspec.structs.replace(located, located=False)
    here, there = slots
    for batch in range(5):
        run(here, task, 0, batch)
        run(here if batch == 0 else there, task, 1, batch)
    assert open_partitions(here, task) == {0, 1}


FIRST = AggregateSpec(
    keys=(Field("k", "bigint"),),
    inputs=(Field("v", "bigint"),),
    calls=(AggregateCall("first", (0,), "bigint"),),
    output_mode="update",
)


def give(slot: PartitionServer, task: OperatorTask, batch: int, values: list[int], attempt: int) -> dict[int, object]:
    rows = grouped(0, [2] * len(values), values, partitions=1)
    return dict(table_of(slot.run(RunBatch(task, 0, batch, attempt), iter([rows]))))


@pytest.fixture
def drawing(counting: OperatorTask, tmp_path: Path) -> OperatorTask:
    """An operator on several hosts that gives other rows in each attempt; each batch waits for its commit."""
    settings = msgspec.structs.replace(counting.settings, commit_mode="sync")
    location = f"file:{tmp_path}/state"
    task = msgspec.structs.replace(counting, spec=FIRST, settings=settings, location=location, jvm=None)
    begin(task)
    return task


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[PartitionServer]]:
    servers = []
    for host in "abc":
        (tmp_path / host).mkdir()
        servers.append(PartitionServer(tmp_path / host, host=host))
    yield servers
    for server in servers:
        server.close()


GOES_ON = ["where the first attempt ran", "where another attempt ran", "in a third slot", "after a restart"]


def go_on(how: str, slots: list[PartitionServer], task: OperatorTask) -> dict[int, object]:
    """The output of the next batch, which shows the state again."""
    first, other, third = slots
    if how == "after a restart":
        task = msgspec.structs.replace(task, generation=2)
        begin(task, (1,))
    slot = {"where the first attempt ran": first, "where another attempt ran": other}.get(how, third)
    return give(slot, task, 1, [30], 9)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize("how", GOES_ON)
def test_state_is_that_of_the_last_attempt(
    three: list[PartitionServer], drawing: OperatorTask, number: int, located: bool, how: str
) -> None:
    """Each number draws other ids of slots, by which commits are ordered."""
    task = msgspec.structs.replace(drawing, located=located)
    give(three[0], task, 0, [10, 20], 0)  # its executor dies before Spark has the rows
    shown = give(three[1], task, 0, [20, 10], 1)
    assert go_on(how, three, task) == shown


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize("how", GOES_ON)
def test_an_attempt_that_is_answered_from_memory_is_the_last(
    three: list[PartitionServer], drawing: OperatorTask, number: int, located: bool, how: str
) -> None:
    task = msgspec.structs.replace(drawing, located=located)
    first = give(three[0], task, 0, [10, 20], 0)
    assert give(three[1], task, 0, [20, 10], 1) != first
    shown = give(three[0], task, 0, [20, 10], 2)
    assert shown == first
    assert go_on(how, three, task) == shown


def test_a_commit_of_an_attempt_before_may_come_after_that_of_the_last(
    three: list[PartitionServer], drawing: OperatorTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, third = three
    give(here, drawing, 0, [10, 20], 0)
    there.open_ahead([drawing], [0], 0)
    running = there._query(drawing.key).running
    assert running is not None
    put, answered = running.checkpoint.put_commit, threading.Event()
    monkeypatch.setattr(running.checkpoint, "put_commit", lambda *args: (answered.wait(10), put(*args))[1])
    slow = threading.Thread(target=give, args=(there, drawing, 0, [20, 10], 1))
    slow.start()
    wait_until(lambda: bool(running.committer._pending))
    shown = give(here, drawing, 0, [20, 10], 2)
    answered.set()
    slow.join()
    assert give(third, drawing, 1, [30], 3) == shown


@pytest.mark.parametrize("hosts", ["one", "several"])
def test_on_one_host_no_attempt_costs_a_request(
    three: list[PartitionServer], drawing: OperatorTask, monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    task = msgspec.structs.replace(drawing, jvm=own_jvm() if hosts == "one" else None)
    slot, listed = three[0], []
    listing = Checkpoint._listing
    monkeypatch.setattr(
        Checkpoint, "_listing", lambda self, version, fresh: (listed.append(version), listing(self, version, fresh))[1]
    )
    give(slot, task, 0, [10, 20], 0)
    listed.clear()
    give(slot, task, 0, [20, 10], 1)
    give(slot, task, 1, [30], 2)
    files = open_state(task.location)
    commits = files.list(commit_prefix(1, task.generation))
    large = [info for info in commits if read_header(files, info.name).payload]
    assert (listed, len(commits), len(large)) == (([], 1, 1) if hosts == "one" else ([1], 2, 1))

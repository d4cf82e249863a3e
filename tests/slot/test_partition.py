"""Partitions driven in this process, without sockets and without Spark."""

import errno
import json
import pickle
import threading
import time
from pathlib import Path

import msgspec
import pytest

from millpond.checkpoint.recovery import Recovery
from millpond.checkpoint.sealed import SealedFiles
from millpond.errors import FencedError, MillpondError, TransientError
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.slot.partition.attempt_lock import AttemptLock
from millpond.slot.partition.partition import Partition
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.messages import RunBatch
from millpond.spec.kinds.enrich import EnrichSpec
from millpond.spec.operators import Field
from tests.lookup.tables import Memory, MemoryTable
from tests.support.waiting import wait_until

from .conftest import GROUPED, TIME, begin, grouped, table_of


@pytest.fixture
def servers(folder):
    """Makes slots; all are closed in the end."""
    made = []

    def make() -> PartitionServer:
        directory = folder / "host"
        directory.mkdir(exist_ok=True)
        made.append(PartitionServer(directory))
        return made[-1]

    yield make
    for server in made:
        server.close()


def run(server, task, batch, *batches, partition=0, attempt=0):
    """Output by key, and what closes the batch."""
    answer = server.run(RunBatch(task, partition, batch, attempt), iter(batches))
    done = []

    def watched():
        done.append((yield from answer))

    return table_of(watched()), done[0]


def durable(task) -> Recovery:
    return Recovery(open_filesystem(join_url(task.location, "millpond")), operators=1)


def test_state_grows_from_batch_to_batch(counting, servers):
    server = servers()
    assert run(server, counting, 0, grouped(0, [1, 2, 1], [10, 20, 30]))[0] == {1: (2, 40), 2: (1, 20)}
    output, done = run(server, counting, 1, grouped(0, [1], [1]), grouped(0, [3], [3]))
    assert output == {1: (3, 41), 3: (1, 3)}
    assert done.metrics["input_rows"] == 2
    assert done.metrics["output_rows"] == 2
    assert run(server, counting, 2, grouped(0, [], []))[0] == {}
    assert server.status(counting.key).answered == [(0, 0, 2)]


def test_another_slot_goes_on_from_the_store(counting, servers):
    first = servers()
    run(first, counting, 0, grouped(0, [1, 2], [10, 20]))
    run(first, counting, 1, grouped(0, [1], [1]))
    assert first.drain(counting.key, 10) == [(0, 0, 2)]
    assert first.status(counting.key).answered == []
    assert run(servers(), counting, 2, grouped(0, [2, 1], [5, 5]))[0] == {1: (3, 16), 2: (2, 25)}


def test_what_was_opened_ahead_is_not_opened_again(counting, servers, monkeypatch):
    first = servers()
    run(first, counting, 0, grouped(0, [1, 2], [10, 20]))
    first.drain(counting.key, 10)
    second = servers()
    second.open_ahead([counting], [0], 1)
    monkeypatch.setattr(Partition, "_open", None)
    assert run(second, counting, 1, grouped(0, [1], [5]))[0] == {1: (2, 15)}


def test_what_cannot_be_opened_ahead_is_left_to_the_batch(counting, servers):
    counting = msgspec.structs.replace(counting, settings=msgspec.structs.replace(counting.settings, open_timeout=0.0))
    server = servers()
    server.open_ahead([counting], [0], 3)
    with pytest.raises(TransientError, match="not durable"):
        run(server, counting, 3, grouped(0, [1], [5]))
    assert run(server, counting, 0, grouped(0, [1], [5]))[0] == {1: (1, 5)}


class Gate:
    """Holds up the opening of partitions until it is released."""

    def __init__(self, monkeypatch):
        self.reached, self.released = threading.Event(), threading.Event()
        self.opened = []
        inner = Partition._open

        def held(partition, version):
            self.reached.set()
            assert self.released.wait(60)
            self.opened.append((partition.number, version))
            inner(partition, version)

        monkeypatch.setattr(Partition, "_open", held)


def test_a_batch_waits_for_what_is_being_opened(counting, servers, monkeypatch):
    gate, server, rows = Gate(monkeypatch), servers(), []
    ahead = threading.Thread(target=server.open_ahead, args=([counting], [0], 0))
    batch = threading.Thread(target=lambda: rows.append(run(server, counting, 0, grouped(0, [1], [5]))[0]))
    ahead.start()
    assert gate.reached.wait(60)
    batch.start()
    time.sleep(0.2)
    assert not rows
    gate.released.set()
    ahead.join(60)
    batch.join(60)
    assert rows == [{1: (1, 5)}]
    assert gate.opened == [(0, 0)]


def test_a_stop_does_not_wait_for_lookups(counting, servers):
    memory = Memory("stopped")
    memory.gate.clear()
    spec = EnrichSpec(
        GROUPED.keys + GROUPED.inputs,
        (0,),
        ("id",),
        (Field("name", "string"),),
        timeout_ms=60_000,
        table=pickle.dumps(MemoryTable("stopped")),
        name="stopped",
    )
    task, server, errors = msgspec.structs.replace(counting, spec=spec), servers(), []

    def look_up():
        try:
            run(server, task, 0, grouped(0, [1], [1]))
        except TransientError as error:
            errors.append(str(error))

    batch = threading.Thread(target=look_up)
    batch.start()
    wait_until(lambda: memory.requests == 1)
    server.drain(task.key, 10)
    batch.join(5)
    assert not batch.is_alive()
    assert ["its query has stopped" in error for error in errors] == [True]
    memory.gate.set()


def with_timeout(task, seconds):
    """The task with another limit of waiting for input."""
    return msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, attempt_timeout=seconds))


def test_opening_ahead_does_not_cut_off_a_running_batch(counting, servers):
    counting = with_timeout(counting, 0.2)
    server, outputs = servers(), []
    gate = _Gate(grouped(0, [1], [5]), grouped(0, [2], [6]))
    batch = threading.Thread(
        target=lambda: outputs.append(table_of(server.run(RunBatch(counting, 0, 0, 0), iter(gate), gate.cancel)))
    )
    batch.start()
    assert gate.reached.wait(60)
    server.open_ahead([counting], [0], 0)
    assert not gate.cut
    gate.go.set()
    batch.join(60)
    assert outputs == [{1: (1, 5), 2: (1, 6)}]


@pytest.mark.parametrize("ahead", [True, False])
def test_an_opening_is_not_cut_off(counting, servers, monkeypatch, ahead):
    """Attempts at its batch wait as long as it takes, also if one of them is what opens the partition."""
    counting = with_timeout(counting, 0.1)
    gate, server, outputs, cut = Gate(monkeypatch), servers(), {}, []

    def attempt(number):
        rows, cancel = iter([grouped(0, [1], [5])]), lambda: cut.append(number)
        outputs[number] = table_of(server.run(RunBatch(counting, 0, 0, number), rows, cancel))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
    if ahead:
        threads.insert(0, threading.Thread(target=server.open_ahead, args=([counting], [0], 0)))
    threads[0].start()
    assert gate.reached.wait(60)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.5)
    gate.released.set()
    for thread in threads:
        thread.join(60)
    assert outputs == {0: {1: (1, 5)}, 1: {1: (1, 5)}}
    assert not cut


def test_what_is_let_go_of_while_it_is_opened_does_not_come_to_life_again(counting, servers, monkeypatch):
    other = msgspec.structs.replace(counting, operator=1)
    gate, server = Gate(monkeypatch), servers()
    ahead = threading.Thread(target=server.open_ahead, args=([counting, other], [0], 0))
    ahead.start()
    assert gate.reached.wait(60)
    drain = threading.Thread(target=server.drain, args=(counting.key, 10))
    drain.start()
    while counting.key not in server._queries or not server._queries[counting.key].lock.locked():
        time.sleep(0.01)
    gate.released.set()
    ahead.join(60)
    drain.join(60)
    assert server._queries[counting.key].running is None
    assert not server._queries[counting.key].partitions


def test_a_repeated_attempt_is_answered_from_memory_when_its_input_is_the_same(counting, servers, monkeypatch):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    output, _ = run(server, counting, 1, grouped(0, [1, 2], [5, 6]), grouped(0, [3], [7]))
    monkeypatch.setattr(Partition, "_open", None)
    again, _ = run(server, counting, 1, grouped(0, [3, 2], [7, 6]), grouped(0, [1], [5]), attempt=1)
    assert again == output
    assert run(server, counting, 2, grouped(0, [1], [0]))[0] == {1: (3, 6)}


def test_a_repeated_attempt_with_other_input_is_computed_again(counting, servers):
    counting = msgspec.structs.replace(
        counting, settings=msgspec.structs.replace(counting.settings, commit_mode="sync")
    )
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    run(server, counting, 1, grouped(0, [1, 2], [5, 6]))
    assert run(server, counting, 1, grouped(0, [1, 4], [6, 6]))[0] == {1: (2, 7), 4: (1, 6)}
    assert run(server, counting, 2, grouped(0, [1, 2], [0, 0]))[0] == {1: (3, 7), 2: (1, 0)}


def _broken(*batches):
    yield from batches
    raise ConnectionError("the attempt died")


def test_an_attempt_that_dies_in_mid_input_leaves_nothing_behind(counting, servers):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    with pytest.raises(ConnectionError):
        list(server.run(RunBatch(counting, 0, 1, 0), _broken(grouped(0, [1, 2], [100, 100]))))
    assert run(server, counting, 1, grouped(0, [1], [2]))[0] == {1: (2, 3)}
    assert run(server, counting, 2, grouped(0, [2], [2]))[0] == {2: (1, 2)}


@pytest.mark.parametrize("arguments", [(errno.ENOSPC,), ()])
def test_a_batch_is_not_applied_twice_where_its_tables_cannot_be_closed(counting, servers, monkeypatch, arguments):
    """A full disk fails the seal, and then the operator's `close`. Errors of Arrow may have no number."""
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    (partition,) = server._query(counting.key).partitions.values()

    def fail(*args):
        raise OSError(*arguments, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(SealedFiles, "write", fail)
        patch.setattr(partition._operator, "close", fail)
        with pytest.raises(TransientError, match="No space left on device"):
            run(server, counting, 1, grouped(0, [1], [10]))
    assert partition.version is None
    assert run(server, counting, 1, grouped(0, [1], [10]), attempt=1)[0] == {1: (2, 11)}
    assert run(server, counting, 2, grouped(0, [1], [0]))[0] == {1: (3, 11)}


def test_a_consumer_that_stops_early_leaves_nothing_half_done(counting, servers):
    server = servers()
    answer = server.run(RunBatch(counting, 0, 0, 0), iter([grouped(0, [1, 2, 3], [1, 2, 3])]))
    next(answer)
    answer.close()
    assert run(server, counting, 1, grouped(0, [1], [1]))[0] == {1: (2, 2)}


def test_output_comes_after_the_version_that_was_read_is_durable(counting, servers):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    answer = server.run(RunBatch(counting, 0, 1, 0), iter([grouped(0, [1], [1])]))
    next(answer)
    assert (0, 0) not in durable(counting).missing(1)


def test_in_sync_mode_output_comes_after_its_own_version_is_durable(counting, servers):
    counting = msgspec.structs.replace(
        counting, settings=msgspec.structs.replace(counting.settings, commit_mode="sync")
    )
    answer = servers().run(RunBatch(counting, 0, 0, 0), iter([grouped(0, [1], [1])]))
    next(answer)
    assert (0, 0) not in durable(counting).missing(1)


def test_a_batch_is_answered_only_when_what_it_waits_for_is_durable(counting, servers, monkeypatch):
    """Else a reader that is cut off while it waits would let Spark's logs run ahead of the state."""
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    assert server.status(counting.key).answered == [(0, 0, 0)]

    def cut_off(self, version):
        raise ConnectionError("the task was cancelled")

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "_wait_durable", cut_off)
        with pytest.raises(ConnectionError):
            run(server, counting, 1, grouped(0, [1], [1]))
    assert server.status(counting.key).answered == [(0, 0, 0)]
    assert run(server, counting, 1, grouped(0, [1], [1]), attempt=1)[0] == {1: (2, 2)}
    assert server.status(counting.key).answered == [(0, 0, 1)]


def test_an_attempt_whose_input_is_in_is_not_cut_off_by_another_reader_of_the_batch(counting, servers, monkeypatch):
    counting = with_timeout(counting, 0.1)
    server, sealing, abandoned = servers(), threading.Event(), []
    seal = Partition._seal

    def slowly(*args):
        sealing.set()
        time.sleep(0.6)
        return seal(*args)

    monkeypatch.setattr(Partition, "_seal", slowly)
    outputs = []
    first = threading.Thread(
        target=lambda: outputs.append(
            table_of(server.run(RunBatch(counting, 0, 0, 0), iter([grouped(0, [1], [1])]), lambda: abandoned.append(1)))
        )
    )
    first.start()
    assert sealing.wait(60)
    assert run(server, counting, 0, grouped(0, [1], [1]), attempt=1)[0] == {1: (1, 1)}
    first.join(60)
    assert outputs == [{1: (1, 1)}]
    assert not abandoned


class _Gate:
    """Input that waits in the middle until it is released or cut off."""

    def __init__(self, *batches):
        self.batches = batches
        self.reached = threading.Event()
        self.go = threading.Event()
        self.cut = False

    def __iter__(self):
        yield self.batches[0]
        self.reached.set()
        assert self.go.wait(60)
        if self.cut:
            raise ConnectionError("cut off")
        yield from self.batches[1:]

    def cancel(self):
        self.cut = True
        self.go.set()


def test_two_live_attempts_take_turns_and_agree(counting, servers):
    server = servers()
    gate = _Gate(grouped(0, [1], [1]), grouped(0, [2], [2]))
    slow, outputs = RunBatch(counting, 0, 0, 0), {}
    threads = [
        threading.Thread(target=lambda: outputs.update(slow=table_of(server.run(slow, iter(gate), gate.cancel)))),
        threading.Thread(
            target=lambda: outputs.update(fast=run(server, counting, 0, grouped(0, [2, 1], [2, 1]), attempt=1)[0])
        ),
    ]
    threads[0].start()
    assert gate.reached.wait(60)
    threads[1].start()
    gate.go.set()
    for thread in threads:
        thread.join(60)
    assert outputs == {"slow": {1: (1, 1), 2: (1, 2)}, "fast": {1: (1, 1), 2: (1, 2)}}


def test_an_attempt_whose_input_keeps_coming_is_not_cut_off(counting, servers):
    counting = with_timeout(counting, 0.5)
    server, begun, cut, outputs = servers(), threading.Event(), [], []

    def rows():
        for number in range(12):
            yield grouped(0, [1], [number])
            begun.set()
            time.sleep(0.1)

    slow = RunBatch(counting, 0, 0, 0)
    first = threading.Thread(target=lambda: outputs.append(table_of(server.run(slow, rows(), lambda: cut.append(1)))))
    first.start()
    assert begun.wait(60)
    again = [grouped(0, [1], [number]) for number in range(12)]
    assert run(server, counting, 0, *again, attempt=1)[0] == {1: (12, 66)}
    first.join(60)
    assert outputs == [{1: (12, 66)}]
    assert not cut


@pytest.mark.parametrize("later", [0, 1])
def test_an_attempt_that_was_given_up_is_cut_off(counting, servers, later):
    patience = 0.2 if later == 0 else 600.0
    counting = with_timeout(counting, patience)
    server = servers()
    if later:
        run(server, counting, 0, grouped(0, [1], [1]))
    gate = _Gate(grouped(0, [7], [7]))
    failed = []

    def slow():
        try:
            list(server.run(RunBatch(counting, 0, 0, 0), iter(gate), gate.cancel))
        except ConnectionError as error:
            failed.append(error)

    thread = threading.Thread(target=slow)
    if later:
        # A repeated attempt of batch 0 reads without the turn: let it be a first attempt of a reopened partition.
        server.drain(counting.key, 10)
    thread.start()
    assert gate.reached.wait(60)
    if later:
        assert run(server, counting, 1, grouped(0, [1], [1]))[0] == {1: (2, 2)}
    else:
        assert run(server, counting, 0, grouped(0, [1], [1]), attempt=1)[0] == {1: (1, 1)}
    thread.join(60)
    assert failed


def test_an_attempt_at_a_batch_that_is_over_is_refused(counting, servers):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    run(server, counting, 1, grouped(0, [1], [1]))
    with pytest.raises(TransientError, match="overtaken by batch 1"):
        run(server, counting, 0, grouped(0, [1], [1]))
    assert run(server, counting, 2, grouped(0, [1], [1]))[0] == {1: (3, 3)}


def test_draining_cuts_off_an_attempt_under_way(counting, servers):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    gate = _Gate(grouped(0, [1], [1]))
    failed = []

    def attempt():
        try:
            list(server.run(RunBatch(counting, 0, 1, 0), iter(gate), gate.cancel))
        except ConnectionError as error:
            failed.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    assert gate.reached.wait(60)
    assert server.drain(counting.key, 10) == [(0, 0, 1)]
    thread.join(60)
    assert failed
    assert (0, 0) in durable(counting).missing(2)
    assert run(server, counting, 1, grouped(0, [1], [1]))[0] == {1: (2, 2)}


def test_a_query_that_drains_slowly_keeps_no_other_waiting(counting, servers):
    server = servers()
    slow = msgspec.structs.replace(
        counting, query="query-2", location=f"faults+{counting.location}-2?stall=1&stall_s=0.3"
    )
    begin(slow)
    run(server, counting, 0, grouped(0, [1], [1]))
    run(server, slow, 0, grouped(0, [1], [1]))
    drained = threading.Event()
    thread = threading.Thread(target=lambda: (server.drain(slow.key, 30), drained.set()))
    thread.start()
    run(server, counting, 1, grouped(0, [1], [1]))
    assert not drained.is_set()
    thread.join(60)
    assert drained.is_set()


def test_a_run_that_has_ended_leaves_nothing_behind(counting, servers):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    assert server.drain(counting.key, 10, counting.generation) == [(0, 0, 1)]
    assert server.status(counting.key).answered == []
    with pytest.raises(FencedError, match="has ended"):
        run(server, counting, 1, grouped(0, [1], [1]))
    later = msgspec.structs.replace(counting, generation=counting.generation + 1)
    begin(later, (1,))
    assert run(server, later, 1, grouped(0, [1], [5]))[0] == {1: (2, 6)}
    assert server.drain(counting.key, 10, counting.generation) == []  # the end of the run before
    assert run(server, later, 2, grouped(0, [1], [5]))[0] == {1: (3, 11)}


def test_what_still_works_when_its_run_ends_lets_go_when_it_can(counting, servers, monkeypatch):
    monkeypatch.setattr(AttemptLock.close, "__defaults__", (0.1,))
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    begun, go_on = threading.Event(), threading.Event()
    raised = []

    def rows():
        yield grouped(0, [1], [1])
        begun.set()
        go_on.wait(60)
        yield grouped(0, [2], [2])

    def late():
        with pytest.raises(TransientError, match="its query has stopped") as error:
            list(server.run(RunBatch(counting, 0, 1, 0), rows()))
        raised.append(error.value)

    thread = threading.Thread(target=late)
    thread.start()
    assert begun.wait(60)
    assert server.drain(counting.key, 10, counting.generation) == [(0, 0, 1)]
    tables = list(server._resources.budget._accounts)
    go_on.set()
    thread.join(60)
    assert len(raised) == 1
    assert len(server._resources.budget._accounts) < len(tables)
    assert durable(counting).newest() == 1


def test_output_of_a_batch_ends_when_the_next_batch_begins(counting, servers):
    server = servers()
    many = list(range(70_000))
    answer = server.run(RunBatch(counting, 0, 0, 0), iter([grouped(0, many, many)]))
    next(answer)
    run(server, counting, 1, grouped(0, [1], [1]))
    with pytest.raises(TransientError, match="overtaken"):
        list(answer)


def test_two_readers_of_one_batch_may_be_read_in_step(counting, servers):
    server = servers()
    many = list(range(70_000))
    one = server.run(RunBatch(counting, 0, 0, 0), iter([grouped(0, many, many)]))
    first = next(one)
    two = server.run(RunBatch(counting, 0, 0, 1), iter([grouped(0, many, many)]))
    assert next(two) == first
    assert sum(b.num_rows for b in one) == sum(b.num_rows for b in two) == 70_000 - first.num_rows


def test_a_dead_slots_sealed_delta_is_adopted(counting, servers, monkeypatch):
    from millpond.checkpoint.committer import Committer

    first = servers()
    run(first, counting, 0, grouped(0, [1], [1]))
    first.drain(counting.key, 10)
    monkeypatch.setattr(Committer, "submit", lambda self, sealed, adopted=False: None)
    monkeypatch.setattr(Committer, "wait_durable", lambda self, *where: None)
    run(first, counting, 1, grouped(0, [1], [1]))
    monkeypatch.undo()
    assert (0, 0) in durable(counting).missing(2)
    for query in first._queries.values():
        query.release()  # its locks go as if it had died
    assert run(servers(), counting, 2, grouped(0, [1], [1]))[0] == {1: (3, 3)}


def test_a_version_that_nobody_has_is_refused_in_time(counting, servers):
    counting = msgspec.structs.replace(counting, settings=msgspec.structs.replace(counting.settings, open_timeout=0.1))
    with pytest.raises(TransientError, match="not durable") as caught:
        run(servers(), counting, 5, grouped(0, [1], [1]))
    assert (caught.value.query, caught.value.operator, caught.value.partition, caught.value.version) == (
        "query-1",
        "0",
        0,
        5,
    )


def test_an_older_generation_is_refused_and_its_partitions_are_let_go(counting, servers):
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    server.drain(counting.key, 10)
    newer = msgspec.structs.replace(counting, generation=2)
    begin(newer, (0,))
    assert run(server, newer, 0, grouped(0, [1], [9]))[0] == {1: (1, 9)}
    with pytest.raises(FencedError):
        run(server, counting, 1, grouped(0, [1], [1]))
    other = servers()
    with pytest.raises(FencedError):
        run(other, counting, 1, grouped(0, [1], [1]))


def _plan(task, batch, time):
    path = Path(task.offsets)
    path.mkdir(exist_ok=True)
    (path / str(batch)).write_text("v1\n" + json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": time}) + "\n{}\n")


def test_an_attempt_without_a_batch_id_finds_it_in_the_offset_log(counting, servers):
    server = servers()
    _plan(counting, 0, TIME - 1)
    run(server, counting, 0, grouped(0, [1], [1], time=TIME - 1))
    _plan(counting, 1, TIME)
    assert run(server, counting, None, grouped(0, [1], [1]))[0] == {1: (2, 2)}
    assert run(server, counting, None, grouped(0, [1], [1]))[0] == {1: (2, 2)}
    for _ in range(2):
        with pytest.raises(TransientError, match="not that of batch 1"):
            run(server, counting, None, grouped(0, [1], [7], time=TIME - 1))
    _plan(counting, 2, TIME + 1)
    with pytest.raises(TransientError, match="not that of batch 2"):
        run(server, counting, None, grouped(0, [1], [7], time=TIME))
    assert run(server, counting, 2, grouped(0, [1], [1], time=TIME + 1))[0] == {1: (3, 3)}


def test_a_store_that_fails_is_named(counting, servers, folder):
    counting = msgspec.structs.replace(
        counting, settings=msgspec.structs.replace(counting.settings, commit_mode="sync", commit_timeout=0.5)
    )
    server = servers()
    run(server, counting, 0, grouped(0, [1], [1]))
    commits = folder / "state" / "millpond" / "commits"
    commits.rename(folder / "elsewhere")
    commits.write_text("in the way")
    with pytest.raises(MillpondError, match=r"commits/.*") as caught:
        run(server, counting, 1, grouped(0, [1], [1]))
    assert caught.value.partition == 0
    commits.unlink()
    (folder / "elsewhere").rename(commits)


def test_a_thread_that_kept_the_id_of_an_earlier_batch_is_told(counting, servers):
    """Taken for batch 0, the rows of batch 1 would be applied in their place, or answered with what batch 0 gave."""
    server = servers()
    for batch in range(2):
        _plan(counting, batch, TIME + batch)
    run(server, counting, 0, grouped(0, [1], [1]))

    def stale(*rows):
        attempt = RunBatch(counting, 0, 0, 1, verify_batch=True)
        return list(server.run(attempt, iter([grouped(0, *rows, time=TIME + 1)])))

    for rows in (([1, 2], [5, 5]), ([1], [1])):
        with pytest.raises(TransientError, match="not that of batch 0"):
            stale(*rows)
    now = RunBatch(counting, 0, 1, 2, verify_batch=True)
    assert table_of(server.run(now, iter([grouped(0, [1, 2], [5, 5], time=TIME + 1)]))) == {1: (2, 6), 2: (1, 5)}
    with pytest.raises(TransientError, match="overtaken"):
        stale([1, 2], [5, 5])
    assert run(server, counting, 2, grouped(0, [1], [0]))[0] == {1: (3, 6)}

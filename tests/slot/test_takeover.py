"""Real slots with a real operator and a real store: killed, stopped, ended, and taken over."""

import os
import signal
import subprocess
import sys
import threading

import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyspark import TaskContext

from millpond.checkpoint.recovery import Recovery
from millpond.errors import MillpondError, TransientError
from millpond.files.locations.opening import join_url, open_filesystem
from millpond.slot.process.client import drain, query_status
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.worker.slot_stage import SlotStage
from tests.support.waiting import wait_until

from .conftest import FakeContext, begin, grouped, hasty, table_of, with_tests_on_path


@pytest.fixture
def ask(monkeypatch):
    """Runs a batch of partition 0 through a pipe."""

    def run(task, batch, batches):
        context = FakeContext(batch)
        monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: context))
        return table_of(SlotStage(task)(iter([batches] if isinstance(batches, pa.RecordBatch) else batches)))

    return run


def slot(task):
    return SlotDirectory.of(task).recorded_process("slot-0")


def durable(task, version):
    files = open_filesystem(join_url(task.location, "millpond"))
    return (0, 0) not in Recovery(files, operators=1).missing(version)


def test_a_slot_compiles_nothing_before_it_answers(counting, ask):
    ask(counting, 0, grouped(0, [1], [1]))  # whatever has to be compiled is compiled now
    assert not (SlotDirectory.of(counting).path / "log").read_text(), "the template has no threads, nobody complains"
    for process in SlotDirectory.of(counting).running().values():
        process.kill()
    ask(counting, 1, grouped(0, [1], [1]))
    # In processor time: how long that takes is for whatever else the machine does.
    times = [psutil.Process(process.pid).cpu_times() for process in SlotDirectory.of(counting).running().values()]
    assert sum(each.user + each.system for each in times) < 4


def test_a_killed_slot_is_taken_over_with_what_it_had_sealed(counting, ask):
    truth = {}
    for batch in range(6):
        truth[1] = (batch + 1, sum(range(batch + 1)))
        assert ask(counting, batch, grouped(0, [1], [batch])) == truth
        if batch % 2:
            # At once: its last commit may be durable, on its way, or only sealed.
            slot(counting).kill()
    assert drain(counting, 10) in ({}, {(0, 0): 6})


def test_a_commit_that_never_left_a_killed_slot_is_adopted(counting, ask, folder):
    # The store takes nothing until the slot is dead.
    held = folder / "held"
    slow = msgspec.structs.replace(counting, location=f"faults+{counting.location}?hold={held}")
    held.touch()
    ask(slow, 0, grouped(0, [1], [5]))
    slot(slow).kill()
    held.unlink()
    assert not durable(counting, 1)
    assert ask(slow, 1, grouped(0, [1], [6])) == {1: (2, 11)}


def test_a_stopped_slot_is_killed_and_cannot_commit_any_more(counting, ask):
    ask(counting, 0, grouped(0, [1], [1]))
    counting = hasty(counting)
    stopped = slot(counting)
    os.kill(stopped.pid, signal.SIGSTOP)
    assert ask(counting, 1, grouped(0, [1], [1])) == {1: (2, 2)}
    assert not stopped.alive()
    assert slot(counting) != stopped


def test_sigterm_leaves_everything_durable(counting, ask):
    slow = msgspec.structs.replace(counting, location=f"faults+{counting.location}?latency_ms=200")
    ask(slow, 0, grouped(0, [1], [1]))
    ended = slot(slow)
    os.kill(ended.pid, signal.SIGTERM)
    wait_until(lambda: not ended.alive())
    assert durable(counting, 1)
    assert ask(slow, 1, grouped(0, [1], [1])) == {1: (2, 2)}


def test_drain_leaves_everything_durable_and_nothing_held(counting, ask):
    slow = msgspec.structs.replace(counting, location=f"faults+{counting.location}?latency_ms=200")
    ask(slow, 0, grouped(0, [1], [1]))
    directory, silence = SlotDirectory.of(slow), slow.settings.silence_timeout
    assert query_status(directory, slow.key, silence).answered == [(0, 0, 0)]
    assert drain(slow, 10) == {(0, 0): 1}
    assert durable(counting, 1)
    assert query_status(directory, slow.key, silence).answered == []
    newer = msgspec.structs.replace(slow, generation=2)
    begin(msgspec.structs.replace(counting, generation=2), (1,))
    assert ask(newer, 1, grouped(0, [1], [1])) == {1: (2, 2)}
    with pytest.raises(MillpondError, match="Generation 2"):
        ask(slow, 1, grouped(0, [1], [1]))


_DRIVER = """
import pickle, sys
import millpond.worker.slot_stage as p
import msgspec
from pyspark import TaskContext
from tests.slot.conftest import FakeContext, grouped, own_jvm
TaskContext.get = staticmethod(lambda: FakeContext(0))
task = msgspec.structs.replace(pickle.load(sys.stdin.buffer), jvm=own_jvm())
rows = list(p.SlotStage(task)(iter([grouped(0, [1], [1])])))
print("answered", flush=True)
import signal
signal.pause()
"""


def test_slots_of_a_killed_driver_finish_their_commits_and_go(counting):
    import pickle

    slow = msgspec.structs.replace(counting, location=f"faults+{counting.location}?latency_ms=200")
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=with_tests_on_path()
    )
    driver.stdin.write(pickle.dumps(slow))
    driver.stdin.close()
    assert driver.stdout.readline() == b"answered\n"
    directory = SlotDirectory.of(slow)
    running = directory.running()
    assert set(running) == {"template", "slot-0"}
    driver.kill()
    driver.wait()
    wait_until(lambda: not any(p.alive() for p in running.values()))
    wait_until(lambda: not directory.path.exists())
    assert durable(counting, 1)


def test_a_killed_worker_leaves_nothing_behind(counting, ask):
    """The worker dies in the middle of its input; the next attempt gives what it should."""
    ask(counting, 0, grouped(0, [1], [1]))

    def dying():
        yield grouped(0, [1, 2], [100, 100])
        yield grouped(0, [1, 2], [100, 100])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(counting, 1, dying())
    assert ask(counting, 1, grouped(0, [1], [2])) == {1: (2, 3)}


def test_a_slot_killed_while_rows_flow_fails_the_attempt_and_the_next_one_succeeds(counting, ask):
    ask(counting, 0, grouped(0, [1], [1]))
    victim = slot(counting)
    keys = np.arange(20_000)
    piece = grouped(0, keys, keys)

    def batches():
        for number in range(400):
            if number == 100:
                threading.Thread(target=victim.kill).start()
            yield piece

    with pytest.raises(TransientError, match="died") as caught:
        ask(counting, 1, batches())
    assert str(victim.pid) in str(caught.value)
    assert ask(counting, 1, grouped(0, [1], [2])) == {1: (2, 3)}


def test_a_state_file_that_was_altered_is_named(counting, ask, folder):
    ask(counting, 0, grouped(0, [1], [1]))
    drain(counting, 10)
    (commit,) = (folder / "state" / "millpond" / "commits").glob("*-000000000000001-*")
    data = bytearray(commit.read_bytes())
    data[-40] ^= 1
    commit.write_bytes(bytes(data))
    with pytest.raises(MillpondError) as caught:
        ask(counting, 1, grouped(0, [1], [1]))
    assert commit.name in str(caught.value)
    assert caught.value.partition == 0

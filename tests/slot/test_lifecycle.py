import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest
from pyspark import TaskContext

from millpond.errors import FencedError, MillpondError, SettingError, StateDamagedError, TransientError
from millpond.query.running.runs import release
from millpond.slot.process.client import SlotFinder, drain, query_status, start_slots
from millpond.slot.process.connection import Connection, PeerGone, accept
from millpond.slot.process.identity import Process, identify
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.messages import Done, Drained, Hello, RunBatch, Welcome
from millpond.slot.process.server import Slot
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slot_stage import SlotStage
from tests.support.interleave import Interleaved, schedules
from tests.support.waiting import wait_until

from .conftest import FakeContext, hasty, rows, with_tests_on_path


def _run(task: OperatorTask, *batches, batch=0):
    return list(SlotStage(task)(iter(batches)))


@pytest.fixture(autouse=True)
def context(monkeypatch):
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: FakeContext(3)))


def test_rows_go_through_a_slot_that_is_started_on_demand(task):
    batch = rows(1)
    assert _run(task, batch, batch) == [batch, batch]
    started = SlotDirectory.of(task).running()
    assert set(started) == {"template", "slot-1"}
    assert _run(task, batch) == [batch]
    assert SlotDirectory.of(task).running() == started
    assert query_status(SlotDirectory.of(task), task.key, 15.0).answered == [(0, 1, 3)]
    assert drain(task, 5.0) == {(0, 1): 4}


def test_slots_are_started_ahead_of_their_first_rows(task):
    start_slots(task).join(60)
    running = SlotDirectory.of(task).running()
    assert set(running) == {"template", "slot-0", "slot-1"}
    assert len(_run(task, rows(0))) == 1
    assert SlotDirectory.of(task).running() == running


def test_the_user_is_told_once_that_kernels_are_compiled(task, caplog):
    directory = SlotDirectory.of(task)
    directory.register(identify())
    directory.compiling.touch()
    for _ in range(2):
        start_slots(task).join(60)
    assert [record.message for record in caplog.records if "compiles" in record.message] == [
        "Millpond compiles what this query needs, once on this machine: its first batches take longer"
    ]


def test_slots_that_cannot_start_ahead_keep_nobody_waiting(task):
    hurried = msgspec.structs.replace(task.settings, start_timeout=0.2, silence_timeout=0.2)
    broken = msgspec.structs.replace(task, template="tests.slot.nowhere", settings=hurried)
    start_slots(broken).join(60)
    assert SlotDirectory.of(broken).running() == {}


def test_a_pipe_without_any_row_does_nothing(task):
    assert _run(task) == []
    assert _run(task, rows(0).slice(0, 0)) == []
    assert not SlotDirectory.of(task).path.exists()


def test_many_pipes_at_once_start_one_template_and_one_process_per_slot(task):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: _run(task, rows(p % 4)), range(16)))
    assert all(len(answer) == 1 for answer in answers)
    running = SlotDirectory.of(task).running()
    assert set(running) == {"template", "slot-0", "slot-1"}
    ours = _session(running["template"].pid)
    assert sorted(ours) == sorted(p.pid for p in running.values())


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found


@pytest.mark.parametrize(
    ("command", "kind", "text"),
    [("fail", StateDamagedError, "made to fail"), ("crash", MillpondError, "ZeroDivisionError")],
)
def test_the_slots_error_is_raised_in_the_pipe_with_its_place(task, command, kind, text):
    many = [rows(2, name=command, count=50_000)] * 40
    with pytest.raises(kind, match=text) as caught:
        _run(task, *many)
    assert (caught.value.query, caught.value.operator, caught.value.partition) == ("query-1", "0", 2)
    assert len(_run(task, rows(2))) == 1


def test_the_error_of_a_crashed_slot_shows_where_it_crashed(task):
    with pytest.raises(TransientError, match=r"(?s)died.*log on host .*\. It ends:.*Segmentation fault.*echo\.py"):
        _run(task, rows(0, name="segfault"))


def test_the_error_of_a_killed_slot_shows_the_signal(task):
    with pytest.raises(TransientError, match=r"(?s)died.*slot-0 \(process \d+\) died of signal 9 \(Killed\)") as caught:
        _run(task, rows(0, name="die"))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_failure_of_a_slot_comes_with_the_end_of_its_log(task):
    """Other errors say what the user has to do: the log adds nothing to them."""
    with pytest.raises(
        TransientError, match=r"(?s)operator 0, partition 0, version 3.*It ends:\n.* slot-0: "
    ) as caught:
        _run(task, rows(0, name="busy"))
    lines = caught.value.action.partition("It ends:\n")[2].splitlines()
    assert len(lines) == 40
    assert lines[-1].endswith("slot-0: try 99 failed")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(StateDamagedError) as damaged:
        _run(task, rows(0, name="fail"))
    assert not damaged.value.action


def test_a_template_that_cannot_start_says_why(task):
    task = msgspec.structs.replace(
        task,
        template="tests.slot.no_such_module",
        settings=msgspec.structs.replace(task.settings, start_timeout=60.0),
    )
    begin = time.monotonic()
    with pytest.raises(TransientError, match=r"(?s)exit code 1.*No module named tests\.slot\.no_such_module"):
        _run(task, rows(0))
    assert time.monotonic() - begin < 60  # some starts, and not starts until the timeout


def test_a_template_that_loads_slowly_is_waited_for(task):
    """On a machine's first run it compiles the kernels."""
    hurried = msgspec.structs.replace(task.settings, start_timeout=0.5, silence_timeout=0.5)
    task = msgspec.structs.replace(task, template="tests.slot.slow_echo", settings=hurried)
    assert len(_run(task, rows(0))) == 1


def test_a_dead_slot_is_replaced(task):
    with pytest.raises(TransientError, match="died"):
        _run(task, rows(0, name="die"))
    before = SlotDirectory.of(task).recorded_process("slot-0")
    assert len(_run(task, rows(0))) == 1
    after = SlotDirectory.of(task).recorded_process("slot-0")
    assert after != before
    assert not before.alive()


def test_a_slot_stopped_in_the_middle_is_killed_before_it_is_replaced(task):
    task = hasty(task)
    with pytest.raises(TransientError, match=r"hung and was killed.*partition 0"):
        _run(task, rows(0, name="stop"))
    assert len(_run(task, rows(0))) == 1


def test_a_slot_stopped_between_batches_is_replaced_within_the_attempt(task):
    task = hasty(task)
    _run(task, rows(0))
    stopped = SlotDirectory.of(task).recorded_process("slot-0")
    os.kill(stopped.pid, signal.SIGSTOP)
    assert len(_run(task, rows(0))) == 1
    assert not stopped.alive()


def test_a_slot_that_works_long_is_not_taken_for_hung(task):
    task = hasty(task)
    assert len(_run(task, rows(0, name="wait"))) == 1


def test_what_holds_a_slot_up_is_told_to_whoever_waits(task, caplog):
    assert len(_run(task, rows(0, name="wait"))) == 1
    place = f"query {task.query}, operator 0, partition 0"
    assert caplog.messages == [f"batch 3 waits ({place}): the store of {task.key} is full"]


@pytest.mark.parametrize(("failed", "times"), [(2.0, 1), (0.0, 0)])
def test_keys_that_could_not_be_looked_up_are_told_once(task, caplog, failed, times):
    """The executor's log has a line on them: the slot, which knows the reason, writes elsewhere."""
    looked_up = msgspec.structs.replace(task, query=f"fails {failed}", operator=1)
    connection = Mock(receive=lambda: (None, Done(3, {"failed_keys": failed})))
    for partition in range(2):
        run = RunBatch(looked_up, partition, 3, 0)
        assert not list(SlotStage(looked_up)._converse(connection, run, iter([rows(0)])))
    said = "batch 3: 2 keys could not be looked up, and their rows came out with nulls"
    assert [one.startswith(said) for one in caplog.messages] == [True] * times


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_template_is_replaced_and_slots_live_on(task, how):
    task = msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, start_timeout=4.0))
    _run(task, rows(0))
    running = SlotDirectory.of(task).running()
    os.kill(running["template"].pid, how)
    assert len(_run(task, rows(0))) == 1
    assert len(_run(task, rows(1))) == 1
    after = SlotDirectory.of(task).running()
    assert after["slot-0"] == running["slot-0"]
    assert after["template"] != running["template"]


def test_a_consumer_that_stops_early_harms_nothing(task):
    for _ in range(3):
        output = SlotStage(task)(iter([rows(0, count=100_000)] * 20))
        next(output)
        output.close()  # type: ignore[attr-defined]  # a generator, as Spark sees it
    assert len(_run(task, rows(0))) == 1


def test_two_executors_share_slots_until_the_last_one_goes(task, folder):
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)]
    try:
        for sleeper in sleepers:
            executor = identify(sleeper.pid)
            own = msgspec.structs.replace(task, jvm=(executor.pid, executor.start))
            connection, process = SlotFinder(own).find(0)
            connection.close()
        sleepers[0].kill()
        sleepers[0].wait()
        directory = SlotDirectory.of(task)
        wait_until(lambda: len(list((directory.path / "owners").iterdir())) == 1)
        assert process.alive()
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    wait_until(lambda: not directory.path.exists())
    assert not process.alive()
    assert (directory.path.parent / "closed-0").exists()


_DRIVER = """
import subprocess, sys
sys.stdin.readline()
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def _worker(task: OperatorTask) -> str:
    return f"""
import os, pickle
import millpond.worker.slot_stage as p
import msgspec
from millpond.slot.process.identity import identify
from pyspark import TaskContext
from tests.slot.conftest import FakeContext, rows
TaskContext.get = staticmethod(lambda: FakeContext(0))
driver = identify(os.getppid())
task = msgspec.structs.replace(pickle.loads({pickle.dumps(task)!r}), jvm=(driver.pid, driver.start))
print(sum(b.num_rows for b in p.SlotStage(task)(iter([rows(0), rows(0)]))), flush=True)
import time; time.sleep(600)
"""


@pytest.mark.parametrize("stop_a_slot", [False, True])
def test_nothing_is_left_when_the_driver_is_killed(task, stop_a_slot):
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, _worker(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_tests_on_path(),
        text=True,
    )
    driver.stdin.write("go\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "22\n"
    directory = SlotDirectory.of(task)
    running = directory.running()
    worker = int(Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()[0])
    if stop_a_slot:
        os.kill(running["slot-0"].pid, signal.SIGSTOP)
    driver.kill()
    driver.wait()
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not any(p.alive() for p in running.values()))
    wait_until(lambda: not directory.path.exists())


def test_a_slot_ends_on_sigterm_and_a_new_one_takes_over(task):
    _run(task, rows(0))
    slot = SlotDirectory.of(task).recorded_process("slot-0")
    os.kill(slot.pid, signal.SIGTERM)
    wait_until(lambda: not slot.alive())
    assert (SlotDirectory.of(task).path.parent / "closed-0").exists()
    assert len(_run(task, rows(0))) == 1


def test_what_dead_applications_left_is_removed(task, folder):
    other = SlotDirectory.named(str(folder), "app-0")
    left_by_the_dead(other)
    other.listen("slot-0").close()
    other.record_process("slot-0", Process(1, 1))
    _run(task, rows(0))
    wait_until(lambda: not other.path.exists())
    assert SlotDirectory.of(task).path.exists()


def test_the_last_to_leave_waits_for_one_who_only_looks(task, folder):
    """An application that sweeps what others have left holds the lock for a moment: nothing may stay because of it."""
    left = SlotDirectory.named(str(folder), "app-0")
    left_by_the_dead(left)
    with left.locked():
        assert not left.sweep()
        last = threading.Thread(target=left.sweep, args=(60,))
        last.start()
        time.sleep(0.1)
        assert left.path.exists()
    last.join(60)
    assert not left.path.exists()


def test_a_directory_that_is_not_private_is_refused(task, folder):
    path = SlotDirectory.of(task).path
    path.mkdir(parents=True)
    path.parent.chmod(0o777)
    with pytest.raises(SettingError, match="not private"):
        _run(task, rows(0))


def left_by_the_dead(directory: SlotDirectory) -> None:
    """Make the directory as an application leaves it whose JVM was killed."""
    directory.register(identify())
    (directory.path / "owners").joinpath(f"{identify().pid}-{identify().start}").rename(directory.path / "owners/1-1")


@pytest.mark.parametrize("before", ["nothing", "left by the dead"])
def test_a_directory_that_is_entered_while_it_is_swept_stays(folder, monkeypatch, before):
    """Another application looks for what the dead have left, at whatever step of one that begins."""
    world = Interleaved(monkeypatch)
    for number, schedule in enumerate(schedules(26, 400)):
        here = SlotDirectory.named(str(folder), f"app-{number}")
        if before != "nothing":
            left_by_the_dead(here)
            here.record_process("slot-0", Process(1, 1))
        world.run(schedule, [lambda here=here: here.register(identify()), here.sweep])
        assert here.needed(), schedule
        with here.locked():
            assert (here.path / "owners").is_dir(), schedule


def test_a_temporary_directory_that_cannot_be_written_is_named(task, folder):
    """As one that is full, or read-only (which root may write)."""
    (folder / "file").touch()
    task = msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, directory=f"{folder}/file"))
    with pytest.raises(SettingError, match=r"Not a directory.*file/millpond-.*TMPDIR"):
        _run(task, rows(0))


def test_a_slot_that_dies_when_it_is_asked_is_told_of(task, monkeypatch):
    _run(task, rows(0))
    monkeypatch.setattr(Connection, "expect", lambda *_: (_ for _ in ()).throw(PeerGone("the connection was closed")))
    with pytest.raises(TransientError, match=r"A slot does not answer \(the connection was closed\)"):
        drain(task, 5.0)


@pytest.mark.parametrize(("other", "released"), [(Drained([]), True), (TransientError("The store is slow."), False)])
def test_a_fenced_slot_does_not_hide_that_another_has_released_nothing(task, monkeypatch, other, released):
    start_slots(task).join(60)
    answers = iter([FencedError("A newer run has taken over."), other])

    def expect(*_):
        answer = next(answers)
        if isinstance(answer, MillpondError):
            raise answer
        return answer

    monkeypatch.setattr(Connection, "expect", expect)
    assert release(task, 5.0) == released
    assert next(answers, None) is None


def test_paths_longer_than_a_socket_address_work(task, folder):
    deep = folder / ("d" * 120)
    deep.mkdir()
    task = msgspec.structs.replace(task, settings=msgspec.structs.replace(task.settings, directory=str(deep)))
    try:
        assert len(_run(task, rows(0))) == 1
    finally:
        for process in SlotDirectory.of(task).running().values():
            process.kill()


def test_too_many_open_files_end_no_slot():
    def accept_after(error):
        return accept(SimpleNamespace(accept=Mock(side_effect=error)))

    assert accept_after(OSError(errno.EMFILE, "too many open files")) is None
    assert accept_after(ConnectionAbortedError(errno.ECONNABORTED, "gone")) is None
    with pytest.raises(OSError, match="bad file"):
        accept_after(OSError(errno.EBADF, "bad file descriptor"))


def test_too_many_threads_end_no_slot(monkeypatch):
    """A connection waits until the process has fewer."""
    ours, theirs = socket.socketpair()
    slot = Slot(Mock(), SimpleNamespace(accept=lambda: (theirs, "")), Mock())
    start, tries = threading.Thread.start, []

    def start_at_the_second_try(thread):
        tries.append(thread)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_at_the_second_try)
    connection = Connection(ours)
    try:
        slot._accept()
        slot._start_serving()
        slot._start_serving()
        connection.send(Hello())
        assert isinstance(connection.receive()[1], Welcome)
    finally:
        connection.close()
        tries[-1].join(60)
    assert len(tries) == 2

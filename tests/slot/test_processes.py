import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import millpond.slot.process.identity as identity
from millpond.errors import TransientError
from millpond.slot.process.identity import Process, executor_host, namespace, owner
from tests.support.waiting import wait_until


def _start(code: str) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    return child


def test_a_process_is_its_id_and_its_start():
    me = identity.identify()
    assert me.pid == os.getpid()
    assert me.alive()
    assert not Process(me.pid, me.start - 1).alive()
    with pytest.raises(ProcessLookupError):
        identity.identify(1 << 22)


def test_a_killed_process_is_dead_before_it_is_reaped():
    child = _start("import signal; print('up', flush=True); signal.pause()")
    process = identity.identify(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(process.stopped)
    assert process.alive()
    assert process.kill()
    assert not process.alive()
    assert not process.stopped()
    assert child.wait() == -signal.SIGKILL
    assert process.kill()


def test_a_process_whose_first_thread_has_ended_is_alive_while_another_runs():
    code = """
import ctypes, sys, threading
done = threading.Event()
def other():
    print("up", flush=True)
    sys.stdin.read()
threading.Thread(target=other).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"up\n"
        process = identity.identify(child.pid)
        status = f"/proc/{child.pid}/stat"
        with open(status) as file:
            wait_until(lambda: not file.seek(0) and file.read().split()[2] == "Z")
        assert process.alive()
        assert process.kill()
        assert not process.alive()
    finally:
        child.kill()
        child.wait()


def test_the_host_is_part_of_the_namespace():
    assert str(os.uname().nodename) in namespace()


@pytest.fixture
def tree(monkeypatch):
    """Set which processes are above this one: names by process id, each a child of the next."""
    monkeypatch.setattr(os, "getppid", lambda: 9)

    def above(names, commands=()):
        parents = dict(pairwise([*names, 0]))
        stats = {pid: identity._Stat(name, "S", parents[pid], 1, 1000 + pid) for pid, name in names.items()}
        monkeypatch.setattr(identity, "_stat", stats.get)
        monkeypatch.setattr(Path, "read_bytes", lambda path: dict(commands)[str(path)])

    return above


EXECUTOR = b"java\0org.apache.spark.executor.CoarseGrainedExecutorBackend\0--app-id\0app-1"
STANDALONE_WORKER = b"java\0org.apache.spark.deploy.worker.Worker\0spark://host:7077"


def test_the_host_is_that_of_the_executor(monkeypatch):
    commands = {"/proc/7/cmdline": EXECUTOR + b"\0--hostname\x0010.0.0.7\0--cores\x004\0"}
    monkeypatch.setattr(Path, "read_bytes", lambda path: commands[str(path)])
    assert executor_host(Process(7, 1007)) == "10.0.0.7"
    commands["/proc/7/cmdline"] = b"java\0org.apache.spark.deploy.SparkSubmit\0--hostname"
    assert executor_host(Process(7, 1007)) == ""


@pytest.mark.parametrize(
    ("names", "commands", "owned_by"),
    [
        ({9: "python3", 7: "java", 1: "systemd"}, {}, 7),
        ({9: "java", 1: "tini"}, {}, 9),
        ({9: "python3", 1: "java"}, {"/proc/1/cmdline": EXECUTOR}, 1),  # a container that runs an executor alone
    ],
)
def test_the_owner_is_the_jvm_above(tree, names, commands, owned_by):
    tree(names, commands)
    assert owner() == Process(owned_by, 1000 + owned_by)


@pytest.mark.parametrize(
    ("names", "commands"),
    [
        ({9: "python3", 1: "systemd"}, {}),
        ({1: "init"}, {}),  # the parent is gone, and who took its place is not known yet
        ({9: "python3", 1: "java"}, {"/proc/1/cmdline": STANDALONE_WORKER}),  # it adopts what its executors leave
    ],
)
def test_an_orphan_has_no_owner(tree, names, commands):
    tree(names, commands)
    with pytest.raises(TransientError, match="No JVM is above"):
        owner()


def test_the_jvm_that_the_driver_names_is_the_owner():
    assert owner((7, 1007)) == Process(7, 1007)

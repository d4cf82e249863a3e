import os
import signal
import subprocess
import sys

import pytest

from millpond.slot.process.identity import Process, identify, namespace, owner

from .conftest import wait_until


def _start(code: str) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    return child


def test_a_process_is_its_id_and_its_start():
    me = identify()
    assert me.pid == os.getpid()
    assert me.alive()
    assert not Process(me.pid, me.start - 1).alive()
    with pytest.raises(ProcessLookupError):
        identify(1 << 22)


def test_a_killed_process_is_dead_before_it_is_reaped():
    child = _start("import signal; print('up', flush=True); signal.pause()")
    process = identify(child.pid)
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
        process = identify(child.pid)
        status = f"/proc/{child.pid}/stat"
        with open(status) as file:
            wait_until(lambda: not file.seek(0) and file.read().split()[2] == "Z")
        assert process.alive()
        assert process.kill()
        assert not process.alive()
    finally:
        child.kill()
        child.wait()


def test_without_a_jvm_the_owner_is_the_parent():
    assert owner() == identify(os.getppid())
    assert str(os.uname().nodename) in namespace()

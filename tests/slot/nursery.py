"""Makes applications for `test_kills`: a process that passes for a JVM, and below it a Python worker as Spark forks it.

Everything is imported once, and forked; reads (task, known) pickles from standard input, and prints the JVM and worker.
"""

import os
import pickle
import signal
import sys
from pathlib import Path

import msgspec
from pyspark import TaskContext

from millpond.tasks.operator_task import OperatorTask
from millpond.worker.slot_stage import SlotStage
from tests.slot.conftest import FakeContext, own_jvm, rows


def be_called(name: str) -> None:
    Path("/proc/self/comm").write_text(name)


def run_jvm(task: OperatorTask, known: bool) -> None:
    be_called("java")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if known:
        task = msgspec.structs.replace(task, jvm=own_jvm())
    worker = os.fork()
    if worker == 0:
        be_called("python")
        run_worker(task)
    print(os.getpid(), worker, flush=True)
    signal.pause()


def run_worker(task: OperatorTask) -> None:
    try:
        list(SlotStage(task)(iter([rows(0), rows(0)])))
    finally:
        os._exit(0)


if __name__ == "__main__":
    TaskContext.get = staticmethod(lambda: FakeContext(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        try:
            task, known = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        if os.fork() == 0:
            run_jvm(task, known)

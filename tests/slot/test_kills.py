"""A JVM that is killed while its first Python worker starts slots: whatever the moment, nothing lives on.

`MILLPOND_KILLS` says how many; `MILLPOND_KILLED_TEMPLATE` may name the real template, which takes longer to start.
"""

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest

from millpond.slot.process.identity import NO_THREADS, Process, identify
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.tasks.operator_task import OperatorTask

from .conftest import with_tests_on_path

KILLS = int(os.environ.get("MILLPOND_KILLS", "8"))
TEMPLATE = os.environ.get("MILLPOND_KILLED_TEMPLATE", "tests.slot.echo")


class Nursery:
    """Starts applications that consist of a JVM, as far as `owner` can tell, and one worker."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.slot.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=with_tests_on_path() | NO_THREADS,
        )
        self.lock = threading.Lock()

    def start(self, task: OperatorTask, known: bool) -> list[Process]:
        """JVM and worker of a new application; `known`: whether the driver names the JVM."""
        with self.lock:
            pickle.dump((task, known), self.process.stdin)
            self.process.stdin.flush()
            return [Process(int(pid), identify(int(pid)).start) for pid in self.process.stdout.readline().split()]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.process.kill()
    nursery.process.communicate()


def kill_once(nursery: Nursery, task: OperatorTask, number: int) -> None:
    rng = random.Random(number)
    folder = Path(tempfile.mkdtemp(prefix="mp"))
    settings = msgspec.structs.replace(task.settings, directory=str(folder))
    task = msgspec.structs.replace(task, settings=settings, template=TEMPLATE, jvm=None)
    # Half of the kills hit the few milliseconds in which the worker looks for its JVM and starts the template.
    pause = rng.uniform(0, 0.02) if rng.random() < 0.5 else rng.uniform(0, 2.0)
    jvm, worker = nursery.start(task, known=rng.random() < 0.5)
    time.sleep(pause)
    os.kill(jvm.pid, signal.SIGKILL)
    deadline, left = time.monotonic() + 90, []
    while worker.alive() or (left := processes_of(folder)):
        if time.monotonic() > deadline:
            worker.kill()
            for process in left:
                process.kill()
            pytest.fail(f"kill {number}, after {pause:.3f} s: {len(left)} processes were left")
        time.sleep(0.1)
    # The next application on the host removes the folder of one that had no process left to do it.
    SlotDirectory.named(str(folder), "the next").sweep_siblings()
    assert [path.name for path in folder.glob("millpond-*/*") if not path.name.startswith("closed-")] == []
    shutil.rmtree(folder)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Templates and slots: their command line names their directory."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(str(folder) in part for part in process.info["cmdline"] or ())]


@pytest.mark.timeout(120 + 10 * KILLS)
def test_nothing_lives_on_when_the_jvm_is_killed(nursery: Nursery, task: OperatorTask) -> None:
    first = int(os.environ.get("MILLPOND_SEED", "0"))
    with ThreadPoolExecutor(4) as applications:
        list(applications.map(lambda number: kill_once(nursery, task, number), range(first, first + KILLS)))

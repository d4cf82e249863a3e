"""Process identity: a process id plus its start time, since ids alone are reused."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from millpond.errors import TransientError

NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment that keeps NumPy and Arrow from starting threads on import: a process that forks must have none."""


class Process(msgspec.Struct, frozen=True):
    """One process of this host, uniquely identified.

    Attributes:
        pid: its process id.
        start: its start time, in clock ticks since the machine booted.
    """

    pid: int
    start: int

    def alive(self) -> bool:
        """Return whether any of its threads runs: the first may be a zombie while others still hold locks and files."""
        stat = _stat(self.pid)
        return stat is not None and stat.start == self.start and (stat.state not in "ZX" or stat.threads > 1)

    def stopped(self) -> bool:
        """Return whether it is suspended (SIGSTOP)."""
        stat = _stat(self.pid)
        return stat is not None and stat.start == self.start and stat.state in "Tt"

    def kill(self, timeout: float = 5.0) -> bool:
        """Kill the process, even if suspended, and wait until it is gone; False if it survives `timeout` seconds."""
        if not self.alive():
            return True
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return _wait(lambda: not self.alive(), timeout)

    def wait_reaped(self, timeout: float) -> bool:
        """Wait until its parent has collected its exit status; False if that takes longer than `timeout` seconds."""
        return _wait(lambda: (stat := _stat(self.pid)) is None or stat.start != self.start, timeout)


def _wait(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class _Stat(msgspec.Struct, frozen=True):
    name: str
    state: str
    parent: int
    threads: int
    start: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may itself contain spaces and parentheses.
    name, _, rest = text[text.index("(") + 1 :].rpartition(")")
    fields = rest.split()
    return _Stat(name=name, state=fields[0], parent=int(fields[1]), threads=int(fields[17]), start=int(fields[19]))


def identify(pid: int | None = None) -> Process:
    """Identify the process that has this id now (default: this process).

    Raises:
        ProcessLookupError: no such process.
    """
    pid = os.getpid() if pid is None else pid
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid, stat.start)


def descendants() -> list[Process]:
    """List all descendants of this process, including those that have ended and are not reaped."""
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    stats = {pid: stat for pid in pids if pid != own and (stat := _stat(pid)) is not None}
    children: dict[int, list[int]] = defaultdict(list)
    for pid, stat in stats.items():
        children[stat.parent].append(pid)
    found: list[Process] = []
    parents = [own]
    while parents:
        pids = children[parents.pop()]
        found += [Process(pid, stats[pid].start) for pid in pids]
        parents += pids
    return found


def owner(jvm: tuple[int, int] | None = None) -> Process:
    """Find the JVM that runs this Spark task; the slots end with it.

    Args:
        jvm: its process id and start time, where the driver knows them (`OperatorTask.jvm`).

    Raises:
        TransientError: this process has no JVM ancestor: the JVM was killed, and this process will soon end, too.
    """
    if jvm is not None:
        return Process(*jvm)
    pid = os.getppid()
    while pid > 0:
        stat = _stat(pid)
        if stat is None:
            break
        if stat.name == "java" and (pid > 1 or _is_executor(pid)):
            return Process(pid, stat.start)
        pid = stat.parent
    raise TransientError(
        f"No JVM is above the Python worker (process {os.getpid()}): its executor was killed, so it starts no slots.",
        action="If the executor still runs, its process has to be called java, and see the worker as its descendant.",
    )


def _is_executor(pid: int) -> bool:
    """Return whether a JVM is a Spark executor. Process 1 adopts orphans, so any other JVM there proves nothing."""
    try:
        return b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def executor_host(jvm: Process) -> str:
    """Return the host of a Spark executor, as Spark names it; empty for other JVMs, as under a local master."""
    try:
        arguments = Path(f"/proc/{jvm.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return arguments[arguments.index("--hostname") + 1]
    except (OSError, ValueError, IndexError):
        return ""


def namespace() -> str:
    """Return the scope in which process ids are comparable: the host and its process namespace."""
    return f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}"

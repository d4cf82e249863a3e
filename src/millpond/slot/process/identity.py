"""Identity of processes: a process id alone is reused, a process id with its start time is not."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

from millpond.errors import TransientError

NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""NumPy and Arrow start threads when they are imported unless told otherwise, and what forks must have none."""


class Process(msgspec.Struct, frozen=True):
    """One process of this host, for all time.

    Attributes:
        pid: its process id.
        start: when it started, in clock ticks since the machine booted.
    """

    pid: int
    start: int

    def alive(self) -> bool:
        """Whether any of its threads still runs: the first may be a zombie while others hold locks and files."""
        stat = _stat(self.pid)
        return stat is not None and stat.start == self.start and (stat.state not in "ZX" or stat.threads > 1)

    def stopped(self) -> bool:
        """Whether it is suspended (SIGSTOP)."""
        stat = _stat(self.pid)
        return stat is not None and stat.start == self.start and stat.state in "Tt"

    def kill(self, timeout: float = 5.0) -> bool:
        """Kill it (also when it is stopped) and wait until it is gone; False if it would not go."""
        if not self.alive():
            return True
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        deadline = time.monotonic() + timeout
        while self.alive():
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
    # The name stands in parentheses and may itself hold spaces and parentheses.
    name, _, rest = text[text.index("(") + 1 :].rpartition(")")
    fields = rest.split()
    return _Stat(name=name, state=fields[0], parent=int(fields[1]), threads=int(fields[17]), start=int(fields[19]))


def identify(pid: int | None = None) -> Process:
    """The process that now has this id (default: this process).

    Raises:
        ProcessLookupError: no such process.
    """
    pid = os.getpid() if pid is None else pid
    stat = _stat(pid)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid, stat.start)


def owner(jvm: tuple[int, int] | None = None) -> Process:
    """Find the JVM that runs this Spark task; the slots end with it.

    Args:
        jvm: its process id and start, where the driver knows them (`PipeTask.jvm`).

    Raises:
        TransientError: no JVM is above this process: it was killed, and this process will soon end, too.
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
    """Whether a JVM is one of Spark's executors. Process 1 adopts orphans, so another JVM there is no proof."""
    try:
        return b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def namespace() -> str:
    """What makes process ids comparable: the host and its process namespace."""
    return f"{os.uname().nodename}/{os.readlink('/proc/self/ns/pid')}"

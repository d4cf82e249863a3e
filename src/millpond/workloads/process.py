"""Process trees that are started, sampled and killed as a whole.

The caller becomes the *subreaper* of its descendants (prctl(2)). Millpond's slots detach themselves, because they
outlive Spark's workers; as orphans they become children of the caller. So they stay in the tree for sampling and
killing.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PSS = re.compile(rb"^(Pss|Pss_Anon):\s+(\d+) kB", re.MULTILINE)


class Sample(msgspec.Struct, frozen=True):
    """Usage of the tree at one moment: CPU seconds since its start, memory in bytes (0 if only CPU was sampled)."""

    time: float
    cpu: float
    memory: int = 0
    anonymous: int = 0


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process (no-op outside Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it ends for any reason (no-op outside Linux).

    Args:
        parent: the parent's process id. The kernel sends no signal if the parent has already ended.

    Raises:
        SystemExit: the parent has already ended.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(f"Process {parent}, which started this one, has ended.")


def proportional_memory(pid: int) -> tuple[int, int]:
    """Return a process's PSS in bytes, in which shared pages are divided among processes: total, and anonymous."""
    try:
        fields = dict(_PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes()))
    except OSError:
        return 0, 0
    return int(fields.get(b"Pss", 0)) * 1024, int(fields.get(b"Pss_Anon", 0)) * 1024


class ProcessTree:
    """A command and all its descendants, detached ones included.

    Args:
        command, env, cwd: as for `subprocess.Popen`.
        log: file for standard output and standard error.
        cgroup: `cgroup.procs` file that the command enters before it runs, if any.
        interval: seconds between CPU samples; memory is read at every fourth, because reading it costs more.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        cgroup: Path | None = None,
        interval: float = 0.5,
    ) -> None:
        become_subreaper()
        self._before = {p.pid for p in psutil.Process().children(recursive=True)}
        self._seen: dict[int, float] = {}
        self._interval = interval
        self._stop = threading.Event()
        self.samples: list[Sample] = []
        if cgroup is not None:
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup), *command]
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command),
                env=dict(env or os.environ),
                cwd=cwd,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self._thread.start()

    def members(self) -> list[psutil.Process]:
        """Return the live processes, and reap orphans that have ended: as subreaper, this process has to."""
        alive = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.pid in self._before:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
                elif process.pid != self.process.pid:
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
        return alive

    def running(self) -> bool:
        """Return whether the command itself still runs."""
        return self.process.poll() is None

    def sample(self, *, memory: bool) -> Sample:
        """Measure the tree once. Processes that have ended count with their last measured CPU time."""
        total = anonymous = 0
        for member in self.members():
            with suppress(psutil.Error):
                times = member.cpu_times()
                self._seen[member.pid] = times.user + times.system
                if memory:
                    pss, anon = proportional_memory(member.pid)
                    total += pss
                    anonymous += anon
        return Sample(time.time(), sum(self._seen.values()), total, anonymous)

    def _watch(self) -> None:
        turn = 0
        while not self._stop.wait(self._interval):
            self.samples.append(self.sample(memory=turn % 4 == 0))
            turn += 1

    def cpu_between(self, start: float, end: float) -> float:
        """Return the CPU seconds used between two wall-clock times, interpolated between samples."""
        return self._cpu_at(end) - self._cpu_at(start)

    def _cpu_at(self, moment: float) -> float:
        before = Sample(0.0, 0.0)
        for sample in self.samples:
            if sample.time >= moment:
                if before.time == 0.0:
                    return sample.cpu
                share = (moment - before.time) / (sample.time - before.time)
                return before.cpu + share * (sample.cpu - before.cpu)
            before = sample
        return before.cpu

    def kill(self) -> None:
        """Send SIGKILL to all members, and wait up to 30 s until all have ended."""
        deadline = time.monotonic() + 30
        while (members := self.members()) and time.monotonic() < deadline:
            for member in members:
                with suppress(psutil.Error):
                    member.send_signal(signal.SIGKILL)
            psutil.wait_procs(members, timeout=2)
        self.close()

    def close(self, linger: float = 0.0) -> None:
        """Stop sampling, after waiting up to `linger` seconds for detached members to end."""
        deadline = time.monotonic() + linger
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._stop.set()
        self._thread.join()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.1)


def tree_bytes(folder: Path) -> int:
    """Return the allocated bytes of all files below a folder; hard links count once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except FileNotFoundError:
                continue
            if (identity := (status.st_dev, status.st_ino)) not in seen:
                seen.add(identity)
                total += status.st_blocks * 512
    return total

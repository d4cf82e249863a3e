"""Process trees whose CPU time and memory are sampled."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from benchmarks import ROOT
from millpond.demo import processes

_PSS = re.compile(rb"^(Pss|Pss_Anon):\s+(\d+) kB", re.MULTILINE)


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM, so that each `finally` ends the processes that it started.

    The earlier handler is restored afterwards, because tests call command lines in pytest's own process.
    """
    earlier = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


def python_environment() -> dict[str, str]:
    """Return environment variables for a Python process that imports this source tree."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Sample(msgspec.Struct, frozen=True):
    """Usage of the tree at one moment: CPU seconds since its start, memory in bytes (0 if only CPU was sampled)."""

    time: float
    cpu: float
    memory: int = 0
    anonymous: int = 0


def proportional_memory(pid: int) -> tuple[int, int]:
    """Return a process's PSS in bytes, in which shared pages are divided among processes: total, and anonymous."""
    try:
        fields = dict(_PSS.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes()))
    except OSError:
        return 0, 0
    return int(fields.get(b"Pss", 0)) * 1024, int(fields.get(b"Pss_Anon", 0)) * 1024


class ProcessTree(processes.ProcessTree):
    """A command and all its descendants, detached ones included, with samples of their usage.

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
        if cgroup is not None:
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup), *command]
        super().__init__(command, log=log, env=env, cwd=cwd)
        self._seen: dict[int, float] = {}
        self._interval = interval
        self._stop = threading.Event()
        self.samples: list[Sample] = []
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self._thread.start()

    def sample(self, *, memory: bool) -> Sample:
        """Measure the tree once. Processes that have ended count with their last measured CPU time."""
        total = anonymous = 0
        for member in self.members():
            with suppress(psutil.Error):
                times = psutil.Process(member.pid).cpu_times()
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

    def mean_memory(self, start: float, end: float) -> int:
        """Return the mean of the memory samples between two wall-clock times, in bytes; without any, of all samples."""
        sampled = [sample for sample in self.samples if sample.memory]
        between = [sample.memory for sample in sampled if start <= sample.time <= end]
        values = between or [sample.memory for sample in sampled]
        return round(sum(values) / len(values)) if values else 0

    def close(self, linger: float = 0.0) -> None:
        """Stop sampling, after waiting up to `linger` seconds for detached members to end."""
        super().close(linger)
        self._stop.set()
        self._thread.join()

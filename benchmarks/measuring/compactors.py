"""Compactors of a measured run: `millpond compactor` in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.workloads.config import RunConfig


class Compactors:
    """Processes of `millpond compactor` beside a query; there are none unless the engine is Millpond.

    Args:
        config: of the run. environment: environment variables of the processes.

    Attributes:
        cpu: pairs of a time, in seconds since the epoch, and the CPU seconds that all of them had used by then.
    """

    def __init__(self, config: RunConfig, environment: Mapping[str, str]) -> None:
        self._work = Path(config.work)
        self._count = config.compactors if config.engine == "millpond" else 0
        self._environment = environment
        self._processes: list[subprocess.Popen[bytes]] = []
        self.cpu: list[tuple[float, float]] = []

    def step(self) -> None:
        """Start the processes once the query has begun; from then on, sample their CPU time."""
        if self._processes:
            self.cpu.append((time.time(), sum(map(_cpu_seconds, self._processes))))
        # A compactor reads from the checkpoint where the state lies, so there has to be one.
        elif self._count and (self._work / "checkpoint" / "offsets").exists():
            self._start()

    def _start(self) -> None:
        command = [sys.executable, "-c", "from millpond.cli import main; main()", "compactor"]
        command.append(str(self._work / "checkpoint"))
        with (self._work / "compactors.log").open("ab") as log:
            self._processes = [
                subprocess.Popen(command, env=self._environment, stdout=log, stderr=log) for _ in range(self._count)
            ]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds that a process has used; 0 if it has ended."""
    with suppress(psutil.Error):
        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)
    return 0.0

"""Measure one run from outside its process."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from tests.servers.seaweedfs import client_environment

from benchmarks.measuring.process import ProcessTree
from benchmarks.measuring.result import Machine, without_paths
from benchmarks.misa.result import Batch, Observed, Result, kept_up, summarize
from benchmarks.misa.settings import Settings
from benchmarks.misa.stream_files import files

_LOG_LINES = 25
"""A failed run's error shows this number of last lines of its log."""
_ENDING = 60.0
"""Seconds for which slots may finish their commits after a run."""


def measure(settings: Settings) -> Result:
    """Run a query on an engine, in a process tree of its own, and measure it.

    Returns:
        The figures, or the reason why there are none (`refused`, `error`).
    """
    files(Path(settings.events), settings.query, settings.event_rate, settings.seconds, settings.seed)
    result = Result(settings=settings, machine=Machine.here())
    with tempfile.TemporaryDirectory(prefix="misa-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        (work / "settings.json").write_bytes(msgspec.json.encode(settings))
        paths = [str(work / "settings.json"), str(work / "observed.json")]
        command = [sys.executable, "-m", "benchmarks.misa.run", *paths]
        tree = ProcessTree(command, log=work / "log", env=_environment(settings, folder))
        try:
            while tree.running():
                time.sleep(0.2)
            tree.close(linger=_ENDING)
        finally:
            tree.kill()
        if tree.process.returncode:
            lines = (work / "log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
            reason = f"the engine's process ended with status {tree.process.returncode}: {lines[-1] if lines else ''}"
            result.error = without_paths("\n".join([reason, *lines]))
            return result
        observed = msgspec.json.decode((work / "observed.json").read_bytes(), type=Observed)
    fill(result, observed, tree)
    return result


def _environment(settings: Settings, folder: str) -> dict[str, str]:
    return {**os.environ, "TMPDIR": folder, **(client_environment(settings.s3) if settings.s3 else {})}


def fill(result: Result, observed: Observed, tree: ProcessTree) -> None:
    """Fill a result from the report of the engine's process and the usage of its process tree."""
    result.version = observed.version
    if observed.refused is not None:
        result.refused = without_paths(observed.refused)
        return
    measured = observed.batches[result.settings.warmup :]
    if not measured and kept_up(result.settings, observed.batches) is False:
        result.kept_up = False  # at a rate that is too high for the engine, which is no error
        return
    if not measured:
        result.error = (
            f"only {len(observed.batches)} batches ended, and {result.settings.warmup} are left out;"
            " choose a lower rate, or fewer batches to leave out"
        )
        return
    start, end = measured[0].start, measured[-1].end
    peak = max((sample.memory for sample in tree.samples if start <= sample.time <= end), default=0)
    batches = [_used(batch, tree) for batch in measured]
    summarize(result, batches, tree.cpu_between(start, end), peak)


def _used(batch: Batch, tree: ProcessTree) -> Batch:
    """Add the CPU and memory that the process tree used."""
    memory = [sample.memory for sample in tree.samples if sample.memory and sample.time <= batch.end]
    cpu = round(tree.cpu_between(batch.start, batch.end), 3)
    return msgspec.structs.replace(batch, cpu_seconds=cpu, memory_bytes=memory[-1] if memory else 0)

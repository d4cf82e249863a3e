"""Measuring rows: each command in a process tree of its own, each row saved as it ends."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import msgspec

from benchmarks.papers.rows.figures import READERS, Figures
from benchmarks.papers.rows.row import Command, Row
from benchmarks.papers.saved import ROOT, Results, Saved, current_commit, same_run, versions, without_paths
from benchmarks.result import Machine
from millpond.demo.processes import ProcessTree

QUICK_SECONDS = 1_200.0
"""How long a quick run may take in all."""
LONGEST = 10_800.0
"""Seconds after which a command has hung; the longest takes half of that."""
_LINES = 12
"""Of the log of a command that failed."""


class RowFailed(Exception):
    """A command gave no figures; the message ends with the last lines of its log."""


class Deadline:
    """When a run has to be over.

    Args:
        seconds: from now; None = never.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self._end is None else self._end - time.monotonic()


Measure = Callable[[Command, list[str], Deadline], list[Figures]]
"""Runs one command, given as the words after `python -m`."""


def measure(command: Command, line: list[str], deadline: Deadline) -> list[Figures]:
    """Run a command and read its figures.

    Raises:
        RowFailed: it gave none, or was not over in time.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-papers-") as name:
        folder = Path(name)
        written, log = folder / "figures.json", folder / "log"
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYSPARK_PYTHON": sys.executable,
        }
        tree = ProcessTree([sys.executable, "-m", *line, "--json", str(written)], log=log, env=environment, cwd=folder)
        started = time.monotonic()
        try:
            while tree.running() and deadline.left() > 0 and time.monotonic() < started + LONGEST:
                time.sleep(0.1)
            late = tree.running()
        finally:
            tree.kill()
        if late:
            raise RowFailed("stopped, because its time was over")
        if not written.exists():
            last = log.read_text(errors="replace").splitlines()[-_LINES:]
            reason = last[-1] if last else f"it ended with status {tree.process.returncode}"
            raise RowFailed("\n".join([f"no figures: {reason}", *last]))
        return list(READERS[command.module](command, written.read_bytes()))


def run(
    rows: Sequence[Row],
    results: Results,
    *,
    quick: bool,
    again: bool = False,
    measure: Measure = measure,
    say: Callable[[str], None] = print,
) -> list[Saved]:
    """Measure row after row, and save each as it ends. A row that fails does not end the run.

    Args:
        rows: which.
        results: where they are saved; what is saved there of this commit and these settings is not measured again.
        quick: with the arguments of a quick run, within `QUICK_SECONDS`; rows without such arguments are left out.
        again: measure what is saved as well.
        measure: runs one command.
        say: is given a line at each step.

    Returns:
        The results of this run; not those that were there before.
    """
    commit = current_commit()
    deadline = Deadline(QUICK_SECONDS if quick else None)
    found = []
    for row in rows:
        if not row.settings(quick=quick):
            say(f"{row.name}: not in a quick run")
        elif not again and same_run(results.get(row), row, commit, quick=quick):
            say(f"{row.name}: saved already")
        elif deadline.left() <= 0:
            say(f"{row.name}: not measured, {QUICK_SECONDS / 60:.0f} minutes are over")
        else:
            say(f"{row.name} …")
            found.append(_row(row, commit, deadline, quick=quick, measure=measure))
            results.put(found[-1])
            say(f"  {found[-1].error or 'measured'} ({found[-1].seconds:.0f} s)")
    return found


def _row(row: Row, commit: str, deadline: Deadline, *, quick: bool, measure: Measure) -> Saved:
    saved = Saved(
        row=row.name,
        commit=commit,
        quick=quick,
        settings=row.settings(quick=quick),
        machine=Machine.here(),
        versions=versions(),
        day=date.today().isoformat(),
        absent=row.absent(),
    )
    started = time.monotonic()
    for command in row.commands:
        line = command.line(quick=quick)
        if line is None:
            continue
        try:
            found = measure(command, line, deadline)
        except Exception as error:  # whatever it is, the next row is measured
            found = [Figures(engine=command.engine or line[0], place=command.place, error=str(error))]
        saved.figures += [
            one if one.error is None else msgspec.structs.replace(one, error=without_paths(one.error)) for one in found
        ]
    saved.error = "\n".join(f"{one.engine}: {one.error}" for one in saved.figures if one.error is not None) or None
    saved.seconds = round(time.monotonic() - started, 1)
    return saved

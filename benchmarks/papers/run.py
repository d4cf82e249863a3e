"""Measure rows: each command in a process tree of its own, each row saved as it ends."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from itertools import zip_longest
from pathlib import Path

import msgspec

from benchmarks.measuring.process import python_environment
from benchmarks.measuring.result import Machine, without_paths
from benchmarks.misa import __main__ as misa
from benchmarks.papers.figures import READERS, Figures
from benchmarks.papers.row import Command, Row
from benchmarks.papers.saved import Results, Saved, current_commit, same_run, versions
from millpond.demo.processes import ProcessTree

QUICK_SECONDS = 1_200.0
"""Time for all rows of a quick run."""
LONGEST = 10_800.0
"""A command without a time limit of its own has hung after this number of seconds. The longest command takes half."""
_LINES = 12
"""A failed command's error shows this number of last lines of its log."""


class RowFailed(Exception):
    """A command gave no figures. The message ends with the last lines of its log."""


class OutOfTime(Exception):
    """The time for the whole run was over before a command had ended.

    Args:
        figures: of those runs of the command that had ended.
    """

    def __init__(self, figures: list[Figures]) -> None:
        super().__init__(figures)
        self.figures = figures


class TimeLimit:
    """Time that is left for the whole run.

    Args:
        seconds: from now on; None = no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self._end is None else self._end - time.monotonic()


Measure = Callable[[Command, list[str], TimeLimit], list[Figures]]
"""Runs one command, given as the words after `python -m`."""


def longest(line: Sequence[str]) -> float:
    """Return the seconds after which a command has hung.

    Args:
        line: the words after `python -m`. Where a benchmark runs by the clock, they decide how long it takes.
    """
    module, *arguments = line
    if module != "benchmarks.misa":
        return LONGEST
    return sum(settings.most_seconds for settings in misa.runs(misa.parser().parse_args(arguments)))


def measure(command: Command, line: list[str], limit: TimeLimit) -> list[Figures]:
    """Run a command and read its figures.

    Returns:
        The figures. A command that hung or broke off gives the figures that it had written, and an error.

    Raises:
        RowFailed: the command gave no figures.
        OutOfTime: `limit` was over before the command had ended.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-papers-") as name:
        folder = Path(name)
        written, log = folder / "figures.json", folder / "log"
        command_line = [sys.executable, "-m", *line, "--json", str(written)]
        tree = ProcessTree(command_line, log=log, env=python_environment(), cwd=folder)
        hung = TimeLimit(longest(line))
        try:
            while tree.running() and min(limit.left(), hung.left()) > 0:
                time.sleep(0.1)
            late = tree.running()
        finally:
            tree.kill()
        figures = list(READERS[command.module](command, written.read_bytes())) if written.exists() else []
        if late and limit.left() <= 0:
            raise OutOfTime(figures)
        last = log.read_text(errors="replace").splitlines()[-_LINES:]
        status = tree.process.returncode
        if not late and not figures:
            raise RowFailed("\n".join([f"no figures: {last[-1] if last else f'it ended with status {status}'}", *last]))
        if late:
            reason = f"stopped, because it had not ended after {longest(line):,.0f} seconds"
        elif status and all(run.error is None for run in figures):
            reason = f"it ended with status {status} before all its runs had ended"
        else:
            return figures
        error = "\n".join([reason, *last])
        return [*figures, Figures(engine=command.engine or line[0], place=command.place, error=error)]


def by_turns(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each paper, then the second of each, and so on: a short run measures all papers."""
    papers = [[row for row in rows if row.paper == paper] for paper in dict.fromkeys(row.paper for row in rows)]
    return [row for turn in zip_longest(*papers) for row in turn if row is not None]


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
        rows: to measure, in this order.
        results: saves them. A row that is saved there with this commit and these settings is not measured again.
        quick: measure with the arguments of a quick run, within `QUICK_SECONDS`, the papers in turn. Rows without such
            arguments are left out.
        again: measure rows that are saved, too.
        measure: runs one command.
        say: called with a line at each step.

    Returns:
        The results of this run, without those that were saved before.
    """
    commit = current_commit()
    if quick:
        rows = by_turns(rows)
    limit = TimeLimit(QUICK_SECONDS if quick else None)
    measured = []
    for row in rows:
        if not row.settings(quick=quick):
            say(f"{row.name}: not in a quick run")
        elif not again and same_run(results.get(row), row, commit, quick=quick):
            say(f"{row.name}: saved already")
        elif limit.left() <= 0:
            say(f"{row.name}: not measured, {QUICK_SECONDS / 60:.0f} minutes are over")
        else:
            say(f"{row.name} …")
            saved = _row(row, commit, limit, quick=quick, measure=measure)
            measured.append(saved)
            results.put(saved)
            state = "no time left for all of it" if saved.unfinished else "measured"
            say(f"  {saved.error or state} ({saved.seconds:.0f} s)")
    return measured


def _row(row: Row, commit: str, limit: TimeLimit, *, quick: bool, measure: Measure) -> Saved:
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
        if limit.left() <= 0:
            saved.unfinished = True
            break
        try:
            measured = measure(command, line, limit)
        except OutOfTime as over:
            measured, saved.unfinished = over.figures, True
        except Exception as error:  # whatever it is, the next row is measured
            measured = [Figures(engine=command.engine or line[0], place=command.place, error=str(error))]
        saved.figures += [_without_paths(figures) for figures in measured]
    errors = [f"{figures.engine}: {figures.error}" for figures in saved.figures if figures.error is not None]
    saved.error = "\n".join(errors) or None
    saved.seconds = round(time.monotonic() - started, 1)
    return saved


def _without_paths(figures: Figures) -> Figures:
    texts = {"error": figures.error, "refused": figures.refused}
    return msgspec.structs.replace(figures, **{name: text and without_paths(text) for name, text in texts.items()})

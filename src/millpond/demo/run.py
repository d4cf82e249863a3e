"""The demo: run both engines one after the other, kill and restart them, and compare their results."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rich.console import Console

from millpond.demo import page
from millpond.demo.charts import picture, style
from millpond.demo.engine import Plan
from millpond.demo.figures import Report, compare
from millpond.demo.jobs import CLICKS, LEAST_BATCHES, Job, Size, find
from millpond.demo.machine import describe_machine, java_version, problem_of
from millpond.demo.side import ENGINE, EngineEnded, Side
from millpond.demo.view import View, summary

TIMEOUT_SECONDS = 180.0
"""An engine without a finished batch for this time has hung."""
MOST_CORES = 4
INTERRUPTED = 130
# Sockets lie below an engine's temporary folder, and a socket path may have at most 107 bytes.
_LONGEST = 42
_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGTERM and a closed terminal end the demo as Ctrl-C does."""


def run_demo(
    query: str = CLICKS,
    *,
    folder: Path | None = None,
    picture_path: Path | None = None,
    size: Size | None = None,
    command: Sequence[str] = ENGINE,
) -> int:
    """Run the demo.

    Args:
        query: `clicks`, or the name of a NEXMark query.
        folder: the folder for the report; `millpond-demo` in the current folder by default.
        picture_path: an SVG file to draw the result into, if any.
        size, command: the size of the job, and the command that starts an engine, for tests.

    Returns:
        The exit status: 0 if all rows are equal, before and after the kill; 130 if it was interrupted; else 1.

    Raises:
        UsageError: the query does not exist, or its results cannot be compared.
        SettingError: matplotlib, which draws the report, is not installed.
    """
    style()  # fails early without matplotlib
    job = find(query, size.rows_per_batch if size else 0)
    size = size or job.size
    console = Console(highlight=False)
    work = Path(tempfile.mkdtemp(prefix="mp-demo-"))
    short = work if len(os.fsencode(work)) <= _LONGEST else Path(tempfile.mkdtemp(prefix="mp-demo-", dir="/tmp"))
    sides: list[Side] = []
    handlers = {number: signal.signal(number, _interrupt) for number in _CAUGHT}
    try:
        if problem := problem_of(java := java_version(), work):
            console.print(problem)
            return 1
        machine, cores = f"Java {java} · {describe_machine()}", min(os.cpu_count() or 1, MOST_CORES)
        console.print(machine)
        for engine in ("spark", "millpond"):
            temporary = str(short / f"tmp-{engine[0]}")
            plan = Plan(engine, str(work / engine), job.name, size.rows_per_batch, 0, cores, temporary)
            sides.append(Side(plan, command))
        report = _run(console, sides, job, size, machine)
        console.print(summary(report))
        written = page.write(folder or Path("millpond-demo"), page.render(report))
        if picture_path is not None:
            picture_path.parent.mkdir(parents=True, exist_ok=True)
            picture_path.write_text(picture(report), encoding="utf-8")
            console.print(f"picture: {os.path.abspath(picture_path)}", soft_wrap=True)
        console.print(f"report: {os.path.abspath(written)}", soft_wrap=True)
        return 0 if report.equal else 1
    except EngineEnded as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: both engines are being ended")
        return INTERRUPTED
    finally:
        _ignore_signals()
        for side in sides:
            side.kill()
        for temporary_folder in {work, short}:
            shutil.rmtree(temporary_folder, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in _CAUGHT:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # a closed terminal sends several signals, and none may interrupt the cleanup
    raise KeyboardInterrupt


def _run(console: Console, sides: list[Side], job: Job, size: Size, machine: str) -> Report:
    before, total = size.before_kill, size.before_kill + size.after_kill
    with View(console, sides, job, total) as view:
        for side in sides:
            side.start()
            _follow(side, view, before, size.seconds_before_kill if side is sides[0] else None)
            if side is sides[0]:
                before, total = side.run.done, side.run.done + size.after_kill
                view.total = total
            side.run.counted = before
            # The next batch is already running: the kill comes in mid-stream.
            processes = side.kill()
            view.say(f"{side.run.name}: {side.run.done} batches, then SIGKILL for all of its {processes} processes")
            side.start(total)
            _follow(side, view, total)
            side.close()
            view.say(f"{side.run.name}: restarted, all {total} batches done")
        view.say("comparing every row of both")
        spark, millpond = sides
        pairs = [(spark.rows_of(batch), millpond.rows_of(batch)) for batch in range(total)]
        return Report(
            job=job,
            rows_per_batch=size.rows_per_batch,
            spark=spark.run,
            millpond=millpond.run,
            before=compare(pairs[:before]),
            after=compare(pairs[before:]),
            machine=machine,
            versions=millpond.about["versions"],
            explained=millpond.about["explained"],
        )


def _follow(side: Side, view: View, batches: int, seconds: float | None = None) -> None:
    """Show an engine until it has done its batches, or `seconds` are over since the start of its first batch.

    Raises:
        EngineEnded: the engine has ended before, or has hung.
    """
    run, done, deadline = side.run, side.run.done, time.monotonic() + TIMEOUT_SECONDS
    while run.done < batches:
        time.sleep(0.1)
        side.look()
        view.show()
        worked = time.time() - run.batches[0].start if run.batches else 0.0
        if seconds is not None and worked > seconds and run.done >= LEAST_BATCHES:
            return
        if run.done > done:
            done, deadline = run.done, time.monotonic() + TIMEOUT_SECONDS
        elif side.status == "done" and run.done < batches:
            raise EngineEnded(f"{run.name} ended after {run.done} of {batches} batches")
        elif time.monotonic() > deadline:
            raise EngineEnded(f"{run.name} has done no batch for {TIMEOUT_SECONDS:.0f} s")

"""The demo: run both engines one after the other, kill and restart them, and compare their results."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from millpond.demo.engines.comparison import Comparison, compare
from millpond.demo.engines.engine import SETTINGS, Plan
from millpond.demo.engines.job import CLICKS, LEAST_BATCHES, Job, Size, find
from millpond.demo.engines.machine import Machine, look
from millpond.demo.engines.side import ENGINE, EngineEnded, Side
from millpond.demo.report import page, picture
from millpond.demo.report.chart import style
from millpond.demo.report.report import Report
from millpond.demo.view import View, summary
from millpond.workloads.process import become_subreaper

# An engine without a finished batch for this time has hung.
TIMEOUT_SECONDS = 180.0
MOST_CORES = 4
INTERRUPTED = 130
_PREFIX = "mp-demo-"
# Sockets lie below an engine's temporary folder, and a socket path may have at most 107 bytes.
_LONGEST = 42


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
        size: the size of the job; the job's own size by default.
        command: the command that starts an engine.

    Returns:
        The exit status: 0 if all rows are equal, before and after the kill; 130 if it was interrupted; else 1.

    Raises:
        UsageError: the query does not exist, or its results cannot be compared.
        SettingError: matplotlib, which draws the report, is not installed.
    """
    style()
    job = find(query, size.rows_per_batch if size else 0)
    console = Console(highlight=False)
    work = Path(tempfile.mkdtemp(prefix=_PREFIX))
    short = work if len(os.fsencode(work)) <= _LONGEST else Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    sides: list[Side] = []
    with _interruptible():
        try:
            machine = look(work)
            console.print(machine.problem or machine.line())
            if machine.problem:
                return 1
            become_subreaper()
            chosen = size or job.size
            cores = min(machine.cores, MOST_CORES)
            for engine in ("spark", "millpond"):
                engine_folder = str(work / engine)
                plan = Plan(
                    engine, engine_folder, job.name, chosen.rows_per_batch, 0, cores, str(short / f"tmp-{engine[0]}")
                )
                sides.append(Side(plan, command))
            report = _run(console, sides, job, chosen, machine)
            _tell(console, report, folder or Path("millpond-demo"), picture_path)
            return 0 if report.equal else 1
        except EngineEnded as error:
            console.print(str(error), style="red", markup=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted: both engines are being ended")
            return INTERRUPTED
        finally:
            _clean(sides, {work, short})


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the demo as Ctrl-C does, and ignore signals during the cleanup."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for signal_number in caught:
            signal.signal(signal_number, signal.SIG_IGN)
        raise KeyboardInterrupt

    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signal_number: signal.signal(signal_number, interrupt) for signal_number in caught}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _clean(sides: list[Side], folders: set[Path]) -> None:
    for side in sides:
        side.kill()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _run(console: Console, sides: list[Side], job: Job, size: Size, machine: Machine) -> Report:
    before, total = size.before_kill, size.before_kill + size.after_kill
    with View(console, sides, job, total) as view:
        for side in sides:
            side.start()
            _follow(side, view, before, size.seconds_before_kill if side is sides[0] else None)
            if side is sides[0]:
                before, total = side.done, side.done + size.after_kill
                view.total = total
            side.run.counted = before
            # The next batch is already running: the kill comes in mid-stream.
            processes = side.kill()
            view.say(f"{side.name}: {side.done} batches, then SIGKILL for all of its {processes} processes")
            side.start(total)
            _follow(side, view, total)
            side.close()
            view.say(f"{side.name}: restarted, all {total} batches done")
        view.say("comparing every row of both")
        batches = range(before), range(before, total)
        compared = [_compare(sides, chosen) for chosen in batches]
    spark, millpond = sides
    return Report(
        query=job.name,
        title=job.title,
        about=job.about,
        unit=job.unit,
        source=job.source,
        mode=job.mode,
        rows_per_batch=size.rows_per_batch,
        killed_after=before,
        cores=spark.plan.cores,
        spark=spark.run,
        millpond=millpond.run,
        before=compared[0],
        after=compared[1],
        machine=machine,
        versions=millpond.about.versions,
        explained=millpond.about.explained,
        settings={"spark.master": f"local[{spark.plan.cores},4]", **SETTINGS},
        finished=time.strftime("%Y-%m-%d %H:%M %Z"),
    )


def _follow(side: Side, view: View, batches: int, seconds: float | None = None) -> None:
    """Show an engine until it has done its batches, or a time is over.

    Args:
        side: the engine.
        view: the output.
        batches: the number of batches.
        seconds: the time since the start of the first batch; None: no limit.

    Raises:
        EngineEnded: the engine has ended before, or has hung.
    """
    done, deadline = side.done, time.monotonic() + TIMEOUT_SECONDS
    while side.done < batches:
        time.sleep(0.1)
        side.look()
        view.show()
        worked = time.time() - side.run.batches[0].start if side.run.batches else 0.0
        if seconds is not None and worked > seconds and side.done >= LEAST_BATCHES:
            return
        if side.done > done:
            done, deadline = side.done, time.monotonic() + TIMEOUT_SECONDS
        elif side.status == "done" and side.done < batches:
            raise EngineEnded(f"{side.name} ended after {side.done} of {batches} batches")
        elif time.monotonic() > deadline:
            raise EngineEnded(f"{side.name} has done no batch for {TIMEOUT_SECONDS:.0f} s")


def _compare(sides: list[Side], batches: Sequence[int]) -> Comparison:
    left, right = sides
    return compare([(left.rows_of(b), right.rows_of(b)) for b in batches])


def _tell(console: Console, report: Report, folder: Path, picture_path: Path | None) -> None:
    console.print(summary(report))
    written = page.write(folder, page.render(report))
    if picture_path is not None:
        picture_path.parent.mkdir(parents=True, exist_ok=True)
        picture_path.write_text(picture.render(report), encoding="utf-8")
        console.print(f"picture: {os.path.abspath(picture_path)}", soft_wrap=True)
    console.print(f"report: {os.path.abspath(written)}", soft_wrap=True)

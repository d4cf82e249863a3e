"""`millpond demo`: NEXMark q17 on Spark's RocksDB and on Millpond, compared row by row, killed and restarted."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console

from millpond.demo.comparison import Comparison, compare
from millpond.demo.machine import look
from millpond.demo.plot import draw
from millpond.demo.side import EngineEnded, Side
from millpond.demo.view import View, rate, summary
from millpond.workloads.process import become_subreaper

ROWS_PER_BATCH = 400_000
BEFORE_KILL, AFTER_KILL = 20, 3
# A slow machine does fewer batches instead of taking longer; both engines always do the same.
SECONDS_BEFORE_KILL, LEAST_BATCHES = 12.0, 5
# An engine that does no batch for so long has hung.
PATIENCE_SECONDS = 180.0


def run_demo(
    folder: Path | None = None,
    *,
    rows_per_batch: int = ROWS_PER_BATCH,
    before_kill: int = BEFORE_KILL,
    after_kill: int = AFTER_KILL,
) -> int:
    """Run the demo; return the exit status: 0 if every row was equal, before and after the kill.

    Args:
        folder: where the plot goes; `millpond-demo` below the current folder by default.
        rows_per_batch: events of a batch.
        before_kill, after_kill: batches before the kill and after it.
    """
    console = Console()
    work = Path(tempfile.mkdtemp(prefix="millpond-demo-"))
    try:
        machine = look(work)
        console.print(machine.problem or machine.line())
        if machine.problem:
            return 1
        cores = min(machine.cores, 4)
        sides = [Side(engine, work / engine, rows_per_batch, cores) for engine in ("spark", "millpond")]
        return _run(console, sides, folder or Path("millpond-demo"), before_kill, after_kill)
    except EngineEnded as error:
        console.print(f"[red]{error}")
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(console: Console, sides: list[Side], folder: Path, before: int, after: int) -> int:
    become_subreaper()
    try:
        with View(console, sides, "NEXMark q17, one engine after the other") as view:
            for side in sides:
                side.start()
                _follow(side, view, before, SECONDS_BEFORE_KILL if side is sides[0] else None)
                before = side.done
                # The next batch is on its way: this is the middle of the stream.
                processes = side.kill()
                view.show()
                console.print(f"{side.name}: {side.done} batches, then SIGKILL for all of its {processes} processes")
        first, total = _compare(sides, min(side.done for side in sides)), before + after
        console.print(f"before the kill, {first.line()}")
        with View(console, sides, "Restarted from what was durable") as view:
            for side in sides:
                side.start(total)
                _follow(side, view, total)
                side.close()
        last = _compare(sides, total)
        console.print(f"after kill and restart, {last.line()}")
    finally:
        for side in sides:
            side.close()
    console.print(summary(sides))
    return _report(console, sides, folder, [first, last])


def _follow(side: Side, view: View, batches: int, seconds: float | None = None) -> None:
    """Show the engine at work until it has done so many batches, or has worked for so long."""
    done, deadline = side.done, time.monotonic() + PATIENCE_SECONDS
    while side.done < batches:
        time.sleep(0.2)
        side.look()
        view.show()
        worked = time.time() - side.batches[0].start if side.batches else 0.0
        if seconds is not None and worked > seconds and side.done >= LEAST_BATCHES:
            return
        if side.done > done:
            done, deadline = side.done, time.monotonic() + PATIENCE_SECONDS
        elif time.monotonic() > deadline:
            raise EngineEnded(f"{side.name} has done no batch for {PATIENCE_SECONDS:.0f} s")


def _compare(sides: list[Side], batches: int) -> Comparison:
    left, right = sides
    return compare([(left.rows_of(b), right.rows_of(b)) for b in range(batches)])


def _report(console: Console, sides: list[Side], folder: Path, comparisons: list[Comparison]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    left, right = (rate(side) for side in sides)
    lines = [comparison.line() for comparison in comparisons]
    if left and right:
        lines.append(f"Millpond did {right / left:.1f} times the rows per second of Spark's RocksDB")
        console.print(lines[-1])
    written = draw(sides, folder, lines)
    for path in written:
        console.print(f"plot: {os.path.abspath(path)}")
    if not written:
        console.print("no plot: install matplotlib (pip install 'millpond[report]')")
    return 0 if not any(c.difference or not c.left for c in comparisons) else 1

"""The charts of the demo's figures."""

from __future__ import annotations

from collections.abc import Callable

from millpond.demo.engines.figures import Run, rounded, shown
from millpond.demo.engines.job import LEFT_OUT
from millpond.demo.report.chart import Chart, Mark, Series
from millpond.demo.report.report import Report


def short(value: float) -> str:
    """Format a count for an axis: 400 k, 2.5 M."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def duration(milliseconds: float) -> str:
    """Format a batch time for an axis."""
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms" if milliseconds else "0"


def _broken(run: Run) -> tuple[int, ...]:
    """Return the position at which a kill interrupts the line of a run."""
    before = len(run.before_kill())
    return (before,) if 0 < before < len(run.batches) else ()


def rates(report: Report) -> Chart:
    """Return a chart of rows per second by batch; equal x means equal rows."""
    series = [
        Series(
            *(run.engine, run.name, f"{rounded(run.rate())} rows/s"),
            [(b.batch + 1.0, b.rows / b.ms * 1000) for b in run.batches],
            _broken(run),
        )
        for run in reversed(report.runs)
    ]
    return _by_batch(report, f"{report.unit.capitalize()} per second", series, short)


def batch_times(report: Report) -> Chart:
    """Return a chart of batch times."""
    series = [
        Series(
            *(run.engine, run.name, shown(run.median_ms(), " ms")),
            [(b.batch + 1.0, b.ms) for b in run.batches],
            _broken(run),
        )
        for run in report.runs
    ]
    return _by_batch(report, "Batch time", series, duration)


def _by_batch(report: Report, title: str, series: list[Series], label: Callable[[float], str]) -> Chart:
    # Usually, both engines were killed after the same batch; one of them may have finished another batch meanwhile.
    kills = {run.before_kill()[-1].batch + 1 for run in report.runs if run.kills and run.before_kill()}
    return Chart(
        title,
        series,
        f"batch, {report.rows_per_batch:,} {report.unit} each",
        "shaded: left out of the figures",
        lambda x: f"{x:.0f}",
        label,
        tuple(Mark(batch + 0.5, "" if number else "SIGKILL, restart") for number, batch in enumerate(sorted(kills))),
        left_out=LEFT_OUT + 0.5,
        x_least=1.0,
    )


def timeline(report: Report) -> Chart:
    """Return a chart of processed rows over time, with starts, kill and restart."""
    series, marks = [], []
    for run in reversed(report.runs):
        points = run.timeline()
        series.append(Series(run.engine, run.name, shown(run.seconds(), " s"), points, dots=False))
        first_batch = next(iter(run.after_kill()), None)
        if run.kills and points and first_batch is not None:
            killed = run.kills[0] - run.starts[0]
            level = max((y for x, y in points if x <= killed), default=0.0)
            marks.append(Mark(killed, "SIGKILL", level, first_batch.end - run.starts[0]))
    return Chart(
        f"{report.unit.capitalize()} done over time",
        series,
        "seconds since the engine was started",
        "bar: from the kill to the end of the next batch",
        lambda x: f"{x:.0f}",
        short,
        tuple(marks),
    )

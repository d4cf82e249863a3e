"""The demo's charts with matplotlib, in the style of all charts of Millpond."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from millpond.demo.figures import Figures, Measurement, Report, rounded, times
from millpond.demo.jobs import LEFT_OUT
from millpond.errors import SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"millpond": "#1668dc", "spark": "#d9580d", "flink-rocksdb": "#1a7f4b", "flink-forst": "#8250df"}
"""The colour of each engine."""
KILL, INK, QUIET, LINE = "#c2255c", "#18212f", "#5b6675", "#e3e7ed"
_STYLE: dict[str, Any] = {
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.color": LINE,
    "legend.frameon": False,
    "svg.fonttype": "none",  # keep texts as text, which can be read and searched
    "text.color": INK,
}


def style(**more: Any) -> AbstractContextManager[None]:
    """Return a context with the style of all charts, in which figures are drawn and saved.

    Args:
        more: further settings of matplotlib.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError as error:
        raise SettingError("Charts need matplotlib.", action="pip install 'millpond[report]'") from error
    return rc_context({**_STYLE, **more})


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element for an HTML page; `name` keeps its ids apart from those of other charts."""
    out = io.StringIO()
    with style(**{"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    return text[text.index("<svg") :]


def charts(report: Report) -> list[str]:
    """Return the charts of the page as SVG: rows per second and time by batch, and rows over time."""
    drawn = []
    for draw in (_rates, _batch_times, _timeline):
        with style():
            figure = new_figure(11, 3.6)
            draw(figure.subplots(), report)
        drawn.append(as_svg(figure, draw.__name__))
    return drawn


def picture(report: Report) -> str:
    """Return the result as an SVG picture: the curves of both engines, and the ratio."""
    theirs, ours = report.runs
    lines = (
        (0.60, INK, "the rows per second"),
        (0.55, INK, "of Spark's RocksDB"),
        (0.46, QUIET, f"Millpond {_rate(ours)}"),
        (0.41, QUIET, f"Spark {_rate(theirs)}"),
        (0.32, QUIET, "From restart to a batch's end:"),
        (0.27, QUIET, f"Millpond {ours.shown('restart_seconds')}"),
        (0.22, QUIET, f"Spark {theirs.shown('restart_seconds')}"),
        (0.13, "#1a7f4b" if report.equal else "#c92a2a", report.verdict.partition(" (")[0]),
    )
    with style():
        figure = new_figure(10, 4.2)
        curves, side = figure.subplots(1, 2, width_ratios=(3, 1))
        _rates(curves, report)
        side.set_axis_off()
        side.text(0, 0.7, f"{times(report.ratio())}×", color=COLOURS["millpond"], size=48, weight="bold")
        for height, colour, line in lines:
            side.text(0, height, line, color=colour)
        figure.suptitle(report.job.title, x=0.01, ha="left", weight="bold")
    return as_svg(figure, "picture")


def _rate(run: Measurement) -> str:
    return f"{rounded(run.figures()['rows_per_second'])} rows/s"


def _rates(axis: Axes, report: Report) -> None:
    _by_batch(axis, report, lambda b: b.rows / b.ms * 1000, _rate)
    axis.set_title(f"{report.job.unit.capitalize()} per second")


def _batch_times(axis: Axes, report: Report) -> None:
    _by_batch(axis, report, lambda b: b.ms, lambda run: run.shown("batch_ms"))
    axis.set_title("Batch time (ms)")


def _by_batch(axis: Axes, report: Report, y: Callable[[Figures], float], legend: Callable[[Measurement], str]) -> None:
    """Draw a line for each engine; equal x means equal rows."""
    for run in reversed(report.runs):
        before, label = len(run.before_kill()), f"{run.name}: {legend(run)}"
        for batches in (run.batches[:before], run.batches[before:]):  # the kill interrupts the line
            x = [b.batch + 1 for b in batches]
            axis.plot(x, [y(b) for b in batches], color=COLOURS[run.engine], marker="o", label=label)
            label = ""
    killed = report.spark.counted + 0.5
    axis.axvspan(1, LEFT_OUT + 0.5, color=LINE, alpha=0.45)
    axis.axvline(killed, color=KILL, linestyle="--")
    axis.annotate("SIGKILL, restart", (killed, axis.get_ylim()[1]), (6, -14), textcoords="offset points", color=KILL)
    _finish(axis, f"batch, {report.rows_per_batch:,} {report.job.unit} each (shaded: left out of the figures)", 1)


def _timeline(axis: Axes, report: Report) -> None:
    for run in reversed(report.runs):
        label = f"{run.name}: {run.shown('seconds')}"
        axis.plot(*zip(*run.timeline(), strict=True), color=COLOURS[run.engine], label=label)
        if first := run.first_after_kill():
            killed, level = run.kills[0] - run.starts[0], run.counted * report.rows_per_batch
            axis.plot([killed, first.end - run.starts[0]], [level, level], color=KILL, linewidth=6, alpha=0.3)
            axis.annotate("SIGKILL", (killed, level), (6, -14), textcoords="offset points", color=KILL)
    axis.set_title(f"{report.job.unit.capitalize()} done over time")
    _finish(axis, "seconds since the engine was started (bar: from the kill to the end of the next batch)", 0)


def _finish(axis: Axes, label: str, left: float) -> None:
    axis.set_xlim(left=left)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(label)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)

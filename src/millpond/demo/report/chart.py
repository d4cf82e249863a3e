"""Line charts of the demo with matplotlib, in the style of all charts of Millpond."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

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
    "axes.labelcolor": QUIET,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.family": "sans-serif",
    "grid.color": LINE,
    "legend.frameon": False,
    "lines.linewidth": 2.2,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # keep texts as text, which can be read and searched
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}


class Series(msgspec.Struct, frozen=True):
    """One engine's line.

    Attributes:
        engine: `spark` or `millpond`, which determines the colour.
        name, value: the texts of the legend.
        points: (x, y), ascending by x.
        breaks: positions in `points` before which the line is interrupted.
        dots: whether each point is marked.
    """

    engine: str
    name: str
    value: str
    points: list[tuple[float, float]]
    breaks: tuple[int, ...] = ()
    dots: bool = True


class Mark(msgspec.Struct, frozen=True):
    """An event at `x`, of the whole chart or, with `y`, of one line; `until` is the x of its end."""

    x: float
    label: str
    y: float | None = None
    until: float | None = None


class Chart(msgspec.Struct, frozen=True):
    """A line chart.

    Attributes:
        title: the title above the chart.
        series: its lines.
        x_title, note: the texts below the x axis.
        x_label, y_label: formatters of the values at the axes.
        marks: events in the chart.
        left_out: x before which points are not counted; the background is shaded there.
        x_least: the begin of the x axis.
    """

    title: str
    series: list[Series]
    x_title: str
    note: str
    x_label: Callable[[float], str]
    y_label: Callable[[float], str]
    marks: tuple[Mark, ...] = ()
    left_out: float | None = None
    x_least: float = 0.0


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


def draw(axis: Axes, chart: Chart) -> None:
    """Draw a chart on an axis."""
    for series in chart.series:
        colour, label = COLOURS[series.engine], f"{series.name} {series.value}"
        for start, stop in pairwise([0, *series.breaks, len(series.points)]):
            x, y = zip(*series.points[start:stop], strict=True) if stop > start else ((), ())
            axis.plot(x, y, color=colour, marker="o" if series.dots else "", label="" if start else label)
    if chart.left_out is not None:
        axis.axvspan(chart.x_least, chart.left_out, color=LINE, alpha=0.45)
    for mark in chart.marks:
        if mark.y is None:
            axis.axvline(mark.x, color=KILL, linestyle="--", linewidth=1.5)
            place = (mark.x, axis.get_ylim()[1])
        else:
            axis.plot([mark.x, mark.until or mark.x], [mark.y, mark.y], color=KILL, linewidth=6, alpha=0.3)
            axis.plot([mark.x], [mark.y], color=KILL, marker="x", markersize=9, linestyle="")
            place = (mark.x, mark.y)
        axis.annotate(mark.label, place, (6, -14), textcoords="offset points", color=KILL, weight="bold")
    axis.set_xlim(left=chart.x_least)
    axis.set_ylim(bottom=0)
    axis.set_title(chart.title)
    axis.set_xlabel(f"{chart.x_title} ({chart.note})")
    axis.xaxis.set_major_formatter(lambda value, _: chart.x_label(value))
    axis.yaxis.set_major_formatter(lambda value, _: chart.y_label(value))
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(chart.series))


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element for an HTML page; `name` keeps its ids apart from those of other charts."""
    out = io.StringIO()
    with style(**{"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    return text[text.index("<svg") :]


def svg(chart: Chart, width: float, height: float) -> str:
    """Return a chart of a size in inches as an `<svg>` element."""
    with style():
        figure = new_figure(width, height)
        draw(figure.subplots(), chart)
    return as_svg(figure, chart.title)

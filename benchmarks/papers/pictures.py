"""A picture for each measured row: its headlines' metrics by place, and its durations as distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.measuring.report import bar_groups
from benchmarks.papers.figures import CHECKPOINTS, METRICS, Figures
from benchmarks.papers.outcome import NAMES
from benchmarks.papers.row import Row
from benchmarks.papers.saved import Saved
from millpond.demo.charts import COLOURS, as_svg, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_METRICS = 3
"""A picture shows at most this number of metrics."""
_OTHERS = ("#8250df", "#1a7f4b", "#b8860b", "#c2255c", "#5b6675")
"""Colours of the engines and variants that have no colour of their own."""
_WIDE = 20.0
"""From this ratio of the longest duration to the shortest on, their axis is logarithmic."""
_STYLES = ("-", "--", ":", "-.")


def picture(row: Row, saved: Saved) -> str:
    """Return the row's picture as an `<svg>` element; empty if there are no figures."""
    measured = [figures for figures in saved.figures if figures.values]
    metrics = [metric for metric in _metrics(row) if any(metric in figures.values for figures in measured)]
    series = [figures for figures in measured if len(figures.series) > 1]
    if not metrics:
        return ""
    with style(**{"axes.axisbelow": True}):
        figure = new_figure(4.5 * (len(metrics) + bool(series)), 3.8)
        axes = np.atleast_1d(figure.subplots(1, len(metrics) + bool(series)))
        colours = _colours(measured)
        for axis, metric in zip(axes, metrics, strict=False):
            draw = _lines if row.lines else _bars
            draw(axis, [figures for figures in measured if metric in figures.values], metric, colours)
            axis.set_title(_label(metric), size=10)
            axis.set_ylim(bottom=0)
        if series:
            _distributions(axes[-1], row, series, colours)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), fontsize=8)
    return as_svg(figure, row.name)


def _metrics(row: Row) -> list[str]:
    return list(dict.fromkeys(headline.metric for headline in row.headlines))[:_MOST_METRICS]


def _label(metric: str) -> str:
    name, unit = METRICS[metric].name, METRICS[metric].unit
    return f"{name} ({unit})" if unit else name


def _colours(measured: list[Figures]) -> dict[str, str]:
    engines = list(dict.fromkeys(figures.engine for figures in measured))
    known = {**COLOURS, "prefetching": COLOURS["millpond"], "spark-shipped": COLOURS["spark"]}
    others = [engine for engine in engines if engine not in known]
    return {**known, **{engine: _OTHERS[number % len(_OTHERS)] for number, engine in enumerate(others)}}


def _grouped(measured: list[Figures], metric: str) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the places, and each engine's values by place."""
    values: dict[str, dict[str, float]] = {}
    for figures in measured:
        values.setdefault(figures.engine, {})[figures.place] = figures.values[metric]
    return list(dict.fromkeys(figures.place for figures in measured)), values


def _bars(axis: Axes, measured: list[Figures], metric: str, colours: dict[str, str]) -> None:
    places, engines = _grouped(measured, metric)
    for engine, positions, width in bar_groups(engines, len(places)):
        heights = [engines[engine].get(place, 0.0) for place in places]
        drawn = axis.bar(positions, heights, width, label=NAMES.get(engine, engine), color=colours[engine])
        digits = METRICS[metric].digits
        axis.bar_label(drawn, [f"{height:,.{digits}f}" for height in heights], fontsize=7)
    axis.set_xticks(range(len(places)), places, fontsize=8)


def _lines(axis: Axes, measured: list[Figures], metric: str, colours: dict[str, str]) -> None:
    places, engines = _grouped(measured, metric)
    for engine, values in engines.items():
        known = [place for place in places if place in values]
        positions, heights = [places.index(place) for place in known], [values[place] for place in known]
        axis.plot(positions, heights, marker="o", label=NAMES.get(engine, engine), color=colours[engine])
    axis.set_xticks(range(len(places)), places, fontsize=8)


def _distributions(axis: Axes, row: Row, measured: list[Figures], colours: dict[str, str]) -> None:
    places = list(dict.fromkeys(figures.place for figures in measured))
    for figures in measured:
        shares = np.arange(1, len(figures.series) + 1) / len(figures.series)
        line = _STYLES[places.index(figures.place) % len(_STYLES)]
        axis.step(np.sort(figures.series), shares, line, where="post", color=colours[figures.engine])
    most, least = (bound(ms for figures in measured for ms in figures.series) for bound in (max, min))
    if most > _WIDE * max(least, 1.0):
        axis.set_xscale("log")
    axis.set_xlabel("ms")
    checkpoints = any(command.arguments.startswith(CHECKPOINTS) for command in row.commands)
    axis.set_title(f"share of {'checkpoints' if checkpoints else 'batches'}", size=10)

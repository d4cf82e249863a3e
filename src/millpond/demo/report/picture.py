"""The demo's result as a picture, an SVG file: two curves and the ratio."""

from __future__ import annotations

from millpond.demo.engines.figures import rounded, times
from millpond.demo.report.chart import COLOURS, INK, QUIET, as_svg, draw, new_figure, style
from millpond.demo.report.curves import rates
from millpond.demo.report.report import Report


def render(report: Report) -> str:
    """Return the picture as SVG."""
    spark, millpond = report.runs
    verdict = f"✓ {report.compared:,} result rows equal" if report.equal else "✗ rows differ"
    lines = (
        (0.60, INK, "the rows per second"),
        (0.55, INK, "of Spark's RocksDB"),
        (0.46, QUIET, f"Millpond {rounded(millpond.rate())} rows/s"),
        (0.41, QUIET, f"Spark {rounded(spark.rate())} rows/s"),
        (0.32, QUIET, "From restart to a batch's end:"),
        (0.27, QUIET, f"Millpond {_seconds(millpond.back_seconds())}"),
        (0.22, QUIET, f"Spark {_seconds(spark.back_seconds())}"),
        (0.13, "#1a7f4b" if report.equal else "#c92a2a", verdict),
    )
    with style():
        figure = new_figure(10, 4.2)
        curves, side = figure.subplots(1, 2, width_ratios=(3, 1))
        draw(curves, rates(report))
        side.set_axis_off()
        side.text(0, 0.7, f"{times(report.ratio)}×", color=COLOURS["millpond"], size=48, weight="bold")
        for height, colour, line in lines:
            side.text(0, height, line, color=colour)
        figure.suptitle(report.title, x=0.01, ha="left", weight="bold")
    return as_svg(figure, "picture")


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"

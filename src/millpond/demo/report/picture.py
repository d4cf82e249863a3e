"""The demo's result in one picture, an SVG file that stands for itself: two curves and the ratio."""

from __future__ import annotations

from html import escape

from millpond.demo.engines.figures import rounded, times
from millpond.demo.report.chart import FACE, STYLE, colours, draw
from millpond.demo.report.curves import rates
from millpond.demo.report.report import Report

_WIDTH, _HEIGHT, _SIDE = 960, 400, 250
_STYLE = f"text {{ font: 13px {FACE}; fill: var(--quiet) }}"
_STYLE += """
.title { fill: var(--ink); font-size: 18px; font-weight: 600 }
.ratio { fill: var(--millpond); font-size: 68px; font-weight: 700 }
.strong { fill: var(--ink); font-size: 15px; font-weight: 600 }
.good { fill: var(--good); font-weight: 600 } .bad { fill: var(--bad); font-weight: 600 }
"""


def render(report: Report) -> str:
    """The picture as SVG."""
    spark, millpond = report.runs
    at = _WIDTH - _SIDE + 8
    verdict = f"✓ {report.compared:,} result rows equal" if report.equal else "✗ rows differ"
    lines = [
        (118, "strong", "the rows per second"),
        (138, "strong", "of Spark's RocksDB"),
        (176, "", f"Millpond {rounded(millpond.rate())} rows/s"),
        (196, "", f"Spark {rounded(spark.rate())} rows/s"),
        (230, "", "From restart to a batch's end:"),
        (250, "", f"Millpond {_seconds(millpond.back_seconds())}"),
        (270, "", f"Spark {_seconds(spark.back_seconds())}"),
        (304, "good" if report.equal else "bad", verdict),
    ]
    side = "".join(f'<text class="{kind}" x="{at}" y="{y + 34}">{escape(line)}</text>' for y, kind, line in lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' role="img" aria-label="{escape(f"Millpond: {times(report.ratio)} times", quote=True)}">'
        f"<style>{colours('svg')}{_STYLE}{STYLE}</style>"
        f'<rect x=".5" y=".5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="10"'
        ' style="fill:var(--card);stroke:var(--line)"/>'
        f'<text class="title" x="24" y="38">{escape(report.title)}</text>'
        f"{draw(rates(report), _WIDTH - _SIDE - 44, _HEIGHT - 70, x=22, y=58, bare=True)}"
        f'<text class="ratio" x="{at - 4}" y="122">{times(report.ratio)}×</text>{side}</svg>\n'
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"

"""Line charts as SVG, drawn by hand: no library, nothing fetched, colours from the style sheet around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from itertools import pairwise

import msgspec

# Average width of a figure, as a share of the font's size.
_FIGURE = 0.58
_FONT = 13

FACE = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
STYLE = f".chart text {{ font: {_FONT}px {FACE}; fill: var(--quiet) }}"
STYLE += """
.chart .head { font-weight: 600; font-size: 15px; fill: var(--ink) }
.chart .grid { stroke: var(--line); stroke-width: 1 }
.chart .axis { stroke: var(--quiet); stroke-width: 1 }
.chart .kill { stroke: var(--kill); stroke-width: 1.5; stroke-dasharray: 4 4; fill: none }
.chart .cross { stroke: var(--kill); stroke-width: 2.5; fill: none }
.chart .gap { stroke: var(--kill); stroke-width: 6; opacity: .3; fill: none }
.chart .killed { fill: var(--kill); font-weight: 600 }
.chart .left { fill: var(--line); opacity: .45 }
.chart polyline { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke-linecap: round }
.chart .spark { stroke: var(--spark) } .chart .millpond { stroke: var(--millpond) }
.chart circle.spark { fill: var(--spark) } .chart circle.millpond { fill: var(--millpond) }
.chart circle { stroke-width: 0 }
.chart .name { fill: var(--ink) }
.chart .name .value { font-weight: 600 }
"""
_LIGHT = "--paper:#ffffff;--card:#ffffff;--ink:#18212f;--quiet:#5b6675;--line:#e3e7ed;--code:#f5f7fa"
_LIGHT += ";--millpond:#1668dc;--spark:#d9580d;--kill:#c2255c;--good:#1a7f4b;--bad:#c92a2a"
_DARK = "--paper:#0f141b;--card:#171e28;--ink:#e8edf4;--quiet:#97a3b3;--line:#2a3441;--code:#10161e"
_DARK += ";--millpond:#5aa2ff;--spark:#ff9351;--kill:#ff6b9d;--good:#4cc38a;--bad:#ff7b7b"


def colours(where: str) -> str:
    """The colours as a style sheet for the elements that a selector names: light, and dark where that is preferred."""
    return f"{where} {{ {_LIGHT} }} @media (prefers-color-scheme: dark) {{ {where} {{ {_DARK} }} }}"


class Series(msgspec.Struct, frozen=True):
    """One engine's line.

    Attributes:
        engine: `spark` or `millpond`: its colour.
        name, value: what the legend says.
        points: (x, y), ascending by x.
        breaks: places in `points` before which the line is interrupted.
        dots: whether each point is marked.
    """

    engine: str
    name: str
    value: str
    points: list[tuple[float, float]]
    breaks: tuple[int, ...] = ()
    dots: bool = True


class Mark(msgspec.Struct, frozen=True):
    """Something that happened: at `x` to the whole chart, or, with `y`, to one line; `until` is when it was over."""

    x: float
    label: str
    y: float | None = None
    until: float | None = None


class Chart(msgspec.Struct, frozen=True):
    """What to draw.

    Attributes:
        title: above the chart; `x_title` below its axis, `note` behind it, or below it where there is no room.
        x_label, y_label: how the figures at the axes are written.
        left_out: x before which points do not count; the ground is shaded there.
        whole: whether ticks of x are whole numbers only.
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
    whole: bool = False


def ticks(top: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers from 0 to at least `top`, about `count` steps of them."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    step = max(1.0, math.ceil(step)) if whole else step
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def text_width(text: str, size: float = _FONT) -> float:
    """About how wide a text is."""
    return len(text) * size * _FIGURE


def draw(chart: Chart, width: int, height: int, *, x: int = 0, y: int = 0, bare: bool = False) -> str:
    """The chart as an `<svg>` of its own size.

    Args:
        x, y: where it stands in the SVG around it, if it is `bare`, which leaves it without its own size in a page.
    """
    plot = _Plot(chart, width, height)
    inside = [*plot.header(), *plot.axes(), *plot.marks(), *plot.lines()]
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"' if bare else f'width="{width}" height="{height}"'
    label = escape(f"{chart.title}: " + ", ".join(f"{s.name} {s.value}" for s in chart.series), quote=True)
    return (
        f'<svg class="chart" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" {place}>'
        + "".join(inside)
        + "</svg>"
    )


class _Plot:
    """A chart at a size."""

    def __init__(self, chart: Chart, width: int, height: int) -> None:
        self.chart, self.width, self.height = chart, width, height
        points = [point for series in chart.series for point in series.points]
        highest = max((py for _, py in points), default=1.0)
        self.y_ticks = ticks(highest, 4)
        last = max([px for px, _ in points] + [m.until or m.x for m in chart.marks], default=1.0)
        self.x_last = max(last, chart.x_least + 1e-9)
        steps = max(3, int(width / (45 if chart.whole else 90)))
        span = self.x_last - chart.x_least
        self.x_ticks = [t for t in ticks(span, steps, chart.whole) if t <= span * 1.001]
        labels = [chart.y_label(t) for t in self.y_ticks]
        self.left = max(text_width(label) for label in labels) + 14
        # Names stand beside the title, or below it where there is no room.
        names = sum(self._name_width(s) for s in chart.series)
        self.stacked = text_width(chart.title, 15) + 40 + names > width
        self.many = self.stacked and names > width
        self.top = 38 + (22 * len(chart.series) if self.many else 24 if self.stacked else 0) + 14
        whole = f"{chart.x_title} ({chart.note})"
        self.under = [whole] if text_width(whole) < width - self.left else [chart.x_title, chart.note]
        self.bottom = height - 26 - 18 * len(self.under)
        self.right = width - 14

    @staticmethod
    def _name_width(series: Series) -> float:
        return text_width(f"{series.name} {series.value}") + 44

    def x(self, value: float) -> float:
        share = (value - self.chart.x_least) / (self.x_last - self.chart.x_least)
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - value / self.y_ticks[-1] * (self.bottom - self.top)

    def header(self) -> list[str]:
        found = [f'<text class="head" x="2" y="18">{escape(self.chart.title)}</text>']
        at_x, at_y = self.width - sum(self._name_width(s) for s in self.chart.series), 18.0
        if self.stacked:
            at_x, at_y = 4.0, 42.0
        for series in self.chart.series:
            found.append(
                f'<circle class="{series.engine}" cx="{at_x + 5:.1f}" cy="{at_y - 4.5:.1f}" r="5"/>'
                f'<text class="name" x="{at_x + 16:.1f}" y="{at_y:.1f}">{escape(series.name)}'
                f' <tspan class="value">{escape(series.value)}</tspan></text>'
            )
            if self.many:
                at_y += 22
            else:
                at_x += self._name_width(series)
        return found

    def axes(self) -> list[str]:
        found = []
        if self.chart.left_out is not None:
            end = self.x(self.chart.left_out)
            found.append(
                f'<rect class="left" x="{self.left:.1f}" y="{self.top:.1f}" width="{max(0.0, end - self.left):.1f}"'
                f' height="{self.bottom - self.top:.1f}"><title>left out of the figures</title></rect>'
            )
        for tick in self.y_ticks:
            at = self.y(tick)
            kind = "axis" if tick == 0 else "grid"
            found.append(f'<line class="{kind}" x1="{self.left:.1f}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            label = escape(self.chart.y_label(tick))
            found.append(f'<text x="{self.left - 8:.1f}" y="{at + 4.5:.1f}" text-anchor="end">{label}</text>')
        for tick in self.x_ticks:
            value = self.chart.x_least + tick
            label = escape(self.chart.x_label(value))
            found.append(f'<text x="{self.x(value):.1f}" y="{self.bottom + 18}" text-anchor="middle">{label}</text>')
        middle = (self.left + self.right) / 2
        for number, line in enumerate(reversed(self.under)):
            at = self.height - 8 - 18 * number
            found.append(f'<text x="{middle:.1f}" y="{at}" text-anchor="middle">{escape(line)}</text>')
        return found

    def marks(self) -> list[str]:
        found = []
        for mark in self.chart.marks:
            at = self.x(mark.x)
            if mark.y is None:
                found.append(f'<line class="kill" x1="{at:.1f}" x2="{at:.1f}" y1="{self.top}" y2="{self.bottom}"/>')
                room = at + 8 + text_width(mark.label) < self.right
                side = f'x="{at + 7:.1f}"' if room else f'x="{at - 7:.1f}" text-anchor="end"'
                found.append(f'<text class="killed" {side} y="{self.top - 3:.1f}">{escape(mark.label)}</text>')
        return found

    def lines(self) -> list[str]:
        found = []
        for series in self.chart.series:
            edges = [0, *series.breaks, len(series.points)]
            for start, stop in pairwise(edges):
                piece = " ".join(f"{self.x(px):.1f},{self.y(py):.1f}" for px, py in series.points[start:stop])
                found.append(f'<polyline class="{series.engine}" points="{piece}"/>')
            for px, py in series.points if series.dots else ():
                told = escape(f"{series.name}: {self.chart.y_label(py)} at {self.chart.x_label(px)}")
                found.append(
                    f'<circle class="{series.engine}" cx="{self.x(px):.1f}" cy="{self.y(py):.1f}" r="3.5">'
                    f"<title>{told}</title></circle>"
                )
        return found + [self._point(mark) for mark in self.chart.marks if mark.y is not None]

    def _point(self, mark: Mark) -> str:
        """A cross where one line was killed; over a bar until it was back."""
        assert mark.y is not None
        at, level, arm = self.x(mark.x), self.y(mark.y), 5
        end = self.x(mark.until) if mark.until is not None else at
        cross = f"M{at - arm:.1f} {level - arm:.1f}l{2 * arm} {2 * arm}m0 {-2 * arm}l{-2 * arm} {2 * arm}"
        below = level + 20 < self.bottom
        side = f'x="{at + 4:.1f}"' if end + text_width(mark.label) < self.right else f'x="{end:.1f}" text-anchor="end"'
        return (
            f'<path class="gap" d="M{at:.1f} {level:.1f}H{end:.1f}"/>'
            f'<path class="cross" d="{cross}"/>'
            f'<text class="killed" {side} y="{level + (20 if below else -10):.1f}">{escape(mark.label)}</text>'
        )

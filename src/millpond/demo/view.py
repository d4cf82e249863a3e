"""The demo's live view: both engines side by side, and its summary."""

from __future__ import annotations

import statistics
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from millpond.demo.engine import Figures
from millpond.demo.side import Side

_BARS = "▁▂▃▄▅▆▇█"


def steady(side: Side) -> list[Figures]:
    """The batches that count: not the first three, when the JVM is cold, nor those after a kill."""
    return [b for b in side.batches if b.batch >= 3 and not (side.kills and b.start > side.kills[0])]


def rate(side: Side, last: int = 0) -> float | None:
    """Rows per second over the steady batches, or over the last few of all."""
    chosen = side.batches[-last:] if last else steady(side)
    milliseconds = sum(b.ms for b in chosen)
    return sum(b.rows for b in chosen) / milliseconds * 1000 if milliseconds else None


def median(values: list[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def shown(value: float | None, unit: str = "", digits: int = 0) -> str:
    """A figure, or a dash."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def spark_line(values: list[float], width: int = 24) -> str:
    """The last values as small bars."""
    recent = values[-width:]
    top = max(recent, default=0) or 1
    return "".join(_BARS[min(7, int(v / top * 7.99))] for v in recent)


def live_table(sides: list[Side], title: str) -> Table:
    """Both engines now."""
    table = Table(title=title, title_justify="left", min_width=72)
    table.add_column("")
    for side in sides:
        table.add_column(side.name, justify="right", min_width=26)
    last = [side.batches[-1] if side.batches else None for side in sides]
    lines: list[tuple[str, list[str]]] = [
        ("", [side.status for side in sides]),
        ("batches", [str(side.done) for side in sides]),
        ("rows/s", [shown(rate(side, last=5)) for side in sides]),
        ("batch time", [shown(b.ms if b else None, " ms") for b in last]),
        ("", [spark_line([b.ms for b in side.batches]) for side in sides]),
        ("state on disk", [shown(side.state_bytes / 1e6, " MB", 1) for side in sides]),
        ("keys", [shown(side.keys) for side in sides]),
        ("commit wait", [shown(b.commit_ms if b else None, " ms") for b in last]),
        ("found in memory", [shown(b.hits * 100, " %", 1) if b and b.hits is not None else "–" for b in last]),
    ]
    for name, cells in lines:
        table.add_row(name, *cells)
    return table


class View:
    """The live table in a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, sides: list[Side], title: str) -> None:
        self._console, self._sides, self._title = console, sides, title
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._printed: dict[str, str] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(live_table(self._sides, self._title))
            return
        for side in self._sides:
            line = f"{side.name}: {side.status}, {side.done // 5 * 5} batches"
            if side.done and side.done % 5 == 0 and self._printed.get(side.engine) != line:
                self._printed[side.engine] = line
                self._console.print(f"{line}, {shown(rate(side))} rows/s, {side.keys:,} keys")


def summary(sides: list[Side]) -> Table:
    """Both runs, whole."""
    table = Table(title="NEXMark q17", title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(side.name, justify="right")
    table.add_row("rows/s", *(shown(rate(s)) for s in sides))
    table.add_row("batch time, median", *(shown(median([b.ms for b in steady(s)]), " ms") for s in sides))
    table.add_row("batch time, longest", *(shown(max((b.ms for b in steady(s)), default=None), " ms") for s in sides))
    table.add_row("commit wait, median", *(shown(median([b.commit_ms for b in steady(s)]), " ms") for s in sides))
    table.add_row("first batch after the kill", *(shown(first_after_kill(s), " ms") for s in sides))
    table.add_row("from start to that batch's end", *(shown(back_after_kill(s), " s", 1) for s in sides))
    table.add_row("keys", *(shown(s.keys) for s in sides))
    table.add_row("state on disk", *(shown(s.state_bytes / 1e6, " MB", 1) for s in sides))
    return table


def first_after_kill(side: Side) -> float | None:
    """Milliseconds of the first batch after the restart."""
    return next((b.ms for b in side.batches if side.kills and b.start > side.kills[-1]), None)


def back_after_kill(side: Side) -> float | None:
    """Seconds from the restart to the end of the first batch after it."""
    after = next((b for b in side.batches if side.kills and b.start > side.kills[-1]), None)
    return None if after is None or side.restarted is None else after.start + after.ms / 1000 - side.restarted

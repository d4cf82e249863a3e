"""The demo in a terminal: both engines side by side while they run, and the result."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millpond.demo.engines.figures import rate, rounded, shown, times
from millpond.demo.engines.job import Job
from millpond.demo.engines.side import Side
from millpond.demo.report.report import Report

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"spark": "dark_orange", "millpond": "dodger_blue1"}
_STATUS = {"waiting": "dim", "killed": "bold red", "restarting": "bold magenta", "done": "bold green"}
_LEAST_WIDTH, _MOST_WIDTH = 76, 132
_WIDEST_COLUMN = 4
# Number of lines of a terminal from which blank lines are shown.
_ROOMY = 28
# Number of lines for a run without a terminal.
_LINES = 14


def columns(values: list[float | None], top: float, height: int, width: int) -> list[str]:
    """Return a chart of block characters as lines of text, the upper line first.

    Args:
        values: the values of the columns; None leaves a gap.
        top: the value that fills a column.
        height: the number of lines.
        width: the number of characters for each value; the last of several characters is blank.
    """
    lines = []
    for row in reversed(range(height)):
        line = ""
        for value in values:
            eighths = 0 if value is None or top <= 0 else max(1, round(value / top * height * 8))
            block = _BLOCKS[min(8, max(0, eighths - row * 8))]
            line += block * max(1, width - 1) + " " * (width > 1)
        lines.append(line)
    return lines


class View:
    """The live picture in a terminal; elsewhere a line for some of the batches."""

    def __init__(self, console: Console, sides: list[Side], job: Job, total: int) -> None:
        self._console, self._sides, self._job = console, sides, job
        self.total = total
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = 0.0
        self._told: dict[str, int] = {}
        self._said = ""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        else:
            self._console.print(f"{self._job.title}: {self._job.about}", soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            if kind is None:
                self._live.transient = False  # the last picture stays
                self._said = ""
                self._live.update(self.picture(), refresh=True)
            self._live.__exit__(kind, error, trace)

    def say(self, line: str) -> None:
        """Show a message about the last event."""
        self._said = line
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Show the current state, at most four times a second."""
        if self._live is None:
            self._lines()
        elif now or time.monotonic() - self._shown > 0.25:
            self._live.update(self.picture(), refresh=True)
            self._shown = time.monotonic()

    def _lines(self) -> None:
        every = max(1, self.total // _LINES)
        for side in self._sides:
            if side.done // every > self._told.get(side.name, 0):
                self._told[side.name] = side.done // every
                last = side.run.batches[-1]
                line = (
                    f"{side.name}: batch {side.done} of {self.total}, {rounded(rate([last]))} rows/s, {last.ms:,.0f} ms"
                )
                self._console.print(line, soft_wrap=True)

    def picture(self) -> RenderableType:
        """Draw both engines."""
        width = min(self._console.width, _MOST_WIDTH)
        beside = width >= _LEAST_WIDTH
        inner = (width - 6) // 2 - 4 if beside else width - 8
        tops = (
            max((b.rows / b.ms for s in self._sides for b in s.run.batches), default=1.0),
            max((b.ms for s in self._sides for b in s.run.batches[1:]), default=1.0),
        )
        # Without room for both engines, show the active one.
        working = [side for side in self._sides if side.run.starts][-1:] or self._sides[:1]
        panels = [self._panel(side, inner, tops) for side in (self._sides if beside else working)]
        body: RenderableType
        if beside:
            body = Table.grid(expand=True, padding=(0, 1))
            body.add_column(ratio=1)
            body.add_column(ratio=1)
            body.add_row(*panels)
        else:
            body = Group(*panels)
        about = Text(self._job.about, style="dim")
        message = Text(self._said or " ", style="italic", no_wrap=True, overflow="ellipsis")
        return Panel(
            Group(about, Text(), body, message),
            title=f"[bold]{self._job.title}",
            width=width,
            border_style="dim",
            padding=(0, 1),
        )

    def _panel(self, side: Side, width: int, tops: tuple[float, float]) -> Panel:
        run, colour = side.run, _COLOURS[side.run.engine]
        last = run.batches[-1] if run.batches else None
        per_batch = max(1, min(_WIDEST_COLUMN, width // (self.total + 1)))
        values: list[float | None] = [b.rows / b.ms for b in run.batches]
        batch_times: list[float | None] = [min(b.ms, tops[1]) for b in run.batches]
        if run.kills:
            cut = len(run.before_kill())
            values.insert(cut, None)
            batch_times.insert(cut, None)
        fit = max(1, width // per_batch)
        hidden = max(0, len(values) - fit)
        killed = len(run.before_kill()) - hidden if run.kills else None
        gap = [Text()] if self._console.height >= _ROOMY else []
        parts: list[RenderableType] = [
            _ends(Text(f"batch {side.done} of {self.total}"), _status(side)),
            _bar(self.total, side.done, width, colour),
            *gap,
            _ends(Text("rows/s"), Text(rounded(rate([last])) if last else "–", style=f"bold {colour}")),
            _chart(columns(values[hidden:], tops[0], 5, per_batch), killed, per_batch, colour),
            *gap,
            _ends(Text("batch time"), Text(shown(last.ms if last else None, " ms"), style=f"bold {colour}")),
            _chart(columns(batch_times[hidden:], tops[1], 3, per_batch), killed, per_batch, colour),
            *gap,
            _ends(Text("state on disk"), Text(shown(side.state_bytes / 1e6, " MB"))),
            _ends(Text("commits behind"), Text(shown(side.behind))),
            _ends(Text("back after SIGKILL"), Text(shown(run.back_seconds(), " s", 1))),
        ]
        return Panel(Group(*parts), title=f"[bold {colour}]{side.name}", border_style=colour, padding=(0, 1))


def _ends(left: Text, right: Text) -> Table:
    line = Table.grid(expand=True)
    line.add_column()
    line.add_column(justify="right")
    line.add_row(left, right)
    return line


def _bar(total: int, done: int, width: int, colour: str) -> Table:
    """Return a progress bar on its own line: a plain progress bar does not end with a newline."""
    line = Table.grid()
    line.add_row(ProgressBar(total, done, width=width, complete_style=colour, finished_style=colour))
    return line


def _status(side: Side) -> Text:
    name = {"killed": "✕ SIGKILL", "restarting": "↻ restarting", "done": "✓ done"}.get(side.status, side.status)
    return Text(name, style=_STATUS.get(side.status, "bold"))


def _chart(lines: list[str], killed: int | None, per_batch: int, colour: str) -> Text:
    """Return a chart as text, with the kill as a separate column."""
    chart = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        if killed is None or killed < 0:
            chart.append(line, style=colour)
        else:
            position = killed * per_batch
            chart.append(line[:position], style=colour)
            chart.append("✕" if number == len(lines) - 1 else "╎", style="bold red")
            chart.append(line[position + 1 :], style=colour)
        chart.append("\n" if number < len(lines) - 1 else "")
    return chart


def summary(report: Report) -> RenderableType:
    """Return the figures of both runs, the verdict and the ratio."""
    table = Table(box=box.SIMPLE_HEAD, title=report.title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column(report.spark.name, justify="right", style=_COLOURS["spark"])
    table.add_column(report.millpond.name, justify="right", style=_COLOURS["millpond"])
    for line in report.table():
        table.add_row(*line)
    verdict = Text(report.verdict(), style="green" if report.equal else "bold red", overflow="fold")
    headline = Text(f"Millpond did {times(report.ratio)} times the rows per second of Spark's RocksDB", style="bold")
    return Group(table, Text(report.counted(), style="dim"), Text(), verdict, headline)

"""The demo in a terminal: both engines side by side while they run, and the result."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from millpond.demo.figures import Report, rate, rounded, shown, times
from millpond.demo.jobs import Job
from millpond.demo.side import Side

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"spark": "dark_orange", "millpond": "dodger_blue1"}
_STATUS = {"killed": "✕ SIGKILL", "restarting": "↻ restarting", "done": "✓ done"}
_LEAST_WIDTH, _MOST_WIDTH, _WIDEST_COLUMN, _TITLES = 76, 132, 4, 18


def columns(values: list[float | None], top: float, height: int, width: int) -> list[str]:
    """Return a chart of block characters as lines of text, the upper line first.

    Args:
        values: the values of the columns; None leaves a gap.
        top: the value that fills a column.
        height: the number of lines.
        width: the number of characters for each value; the last of several characters is blank.
    """
    eighths = [0 if value is None or top <= 0 else max(1, round(value / top * height * 8)) for value in values]
    rows = [[_BLOCKS[min(8, max(0, count - row * 8))] for count in eighths] for row in reversed(range(height))]
    return ["".join(block * max(1, width - 1) + " " * (width > 1) for block in blocks) for blocks in rows]


class View:
    """The live picture in a terminal; elsewhere a line for each batch."""

    def __init__(self, console: Console, sides: list[Side], job: Job, total: int) -> None:
        self._console, self._sides, self._job = console, sides, job
        self.total = total
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown, self._printed, self._message = 0.0, {side.run.name: 0 for side in sides}, ""

    def __enter__(self) -> Self:
        if self._live is None:
            self._console.print(f"{self._job.title}: {self._job.about}", soft_wrap=True)
        else:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            if kind is None:
                self._live.transient = False  # the last picture stays
                self.say("")
            self._live.__exit__(kind, error, trace)

    def say(self, message: str) -> None:
        """Show a message about the last event."""
        self._message, self._shown = message, 0.0
        if self._live is None:
            self._console.print(message, soft_wrap=True)
        self.show()

    def show(self) -> None:
        """Show the current state, at most four times a second."""
        if self._live is not None and time.monotonic() - self._shown > 0.25:
            self._live.update(self.picture(), refresh=True)
            self._shown = time.monotonic()
        for run in (side.run for side in self._sides if self._live is None):
            for batch in run.batches[self._printed[run.name] :]:
                line = f"batch {batch.batch + 1} of {self.total}, {rounded(rate([batch]))} rows/s, {batch.ms:,.0f} ms"
                self._console.print(f"{run.name}: {line}", soft_wrap=True)
            self._printed[run.name] = len(run.batches)

    def picture(self) -> RenderableType:
        """Draw both engines; without room for both, the active one."""
        width, sides = min(self._console.width, _MOST_WIDTH), self._sides
        if width < _LEAST_WIDTH:
            sides = [side for side in sides if side.run.starts][-1:] or sides[:1]
        title = f"[bold not italic]{self._job.title}[/]\n{self._job.about}"
        table = Table(box=box.ROUNDED, title=title, caption=self._message, width=width)
        table.add_column("", width=_TITLES)
        for side in sides:
            table.add_column(side.run.name, style=_COLOURS[side.run.engine], ratio=1, no_wrap=True)
        cells = [self._cells(side, (width - _TITLES - 5) // len(sides) - 3) for side in sides]
        for title in cells[0]:
            table.add_row(title, *(column[title] for column in cells))
        return table

    def _cells(self, side: Side, width: int) -> dict[str, str | Text]:
        """Return an engine's column of the picture, by title."""
        run, last = side.run, side.run.batches[-1:]
        batches = [batch for each in self._sides for batch in each.run.batches]
        fastest = max((b.rows / b.ms for b in batches), default=1.0)
        longest = max((b.ms for b in batches if b.batch), default=1.0)  # the first batch is much longer

        def chart(figure: str, values: list[float | None], top: float, height: int) -> Text:
            wide = max(1, min(_WIDEST_COLUMN, width // (self.total + 1)))
            if run.kills:
                values.insert(len(run.before_kill()), None)
            newest, text = values[-(width // wide) :], Text(figure)
            for row, blocks in enumerate(columns(newest, top, height, wide)):
                place = newest.index(None) * wide if None in newest else len(blocks)
                mark = ("✕" if row == height - 1 else "╎") if None in newest else ""
                text.append(f"\n{blocks[:place]}").append(mark, style="bold red").append(blocks[place + 1 :])
            return text

        rates: list[float | None] = [b.rows / b.ms for b in run.batches]
        lengths: list[float | None] = [min(b.ms, longest) for b in run.batches]
        return {
            "": f"batch {run.done} of {self.total}, {_STATUS.get(side.status, side.status)}",
            "rows/s": chart(rounded(rate(last)), rates, fastest, 5),
            "batch time": chart(shown(last[0].ms if last else None, " ms"), lengths, longest, 3),
            "state on disk": shown(side.state_bytes / 1e6, " MB"),
            "commits behind": shown(side.behind),
            "back after SIGKILL": run.shown("restart_seconds"),
        }


def summary(report: Report) -> RenderableType:
    """Return the figures of both runs, the verdict and the ratio."""
    table = Table("", box=box.SIMPLE_HEAD, title=report.job.title, title_justify="left", title_style="bold")
    for run in report.runs:
        table.add_column(run.name, justify="right", style=_COLOURS[run.engine])
    for line in report.table():
        table.add_row(*line)
    verdict = Text(report.verdict, style="green" if report.equal else "bold red", overflow="fold")
    headline = Text(f"Millpond did {times(report.ratio())} times the rows per second of Spark's RocksDB", style="bold")
    return Group(table, Text(report.counted, style="dim"), Text(), verdict, headline)

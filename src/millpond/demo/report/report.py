"""The demo's result as plain data, from which page and picture are drawn; the page contains it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millpond.demo.engines.comparison import Comparison
from millpond.demo.engines.figures import Run, ratio, shown
from millpond.demo.engines.job import LEFT_OUT
from millpond.demo.engines.machine import Machine


class Report(msgspec.Struct, frozen=True):
    """The result of one demo.

    Attributes:
        query, title, about, unit, source, mode: see `Job` (`query` is its name).
        rows_per_batch: the number of events in a batch.
        killed_after: the number of batches before the kill.
        cores: the number of cores of each engine.
        spark, millpond: the run of each engine.
        before: the comparison of the batches before the kill.
        after: the comparison of the batches after the kill.
        machine: the machine.
        versions, explained: see `About`, of Millpond's engine.
        settings: the settings of both sessions.
        finished: the local time of the end, as text.
    """

    query: str
    title: str
    about: str
    unit: str
    source: str
    mode: str
    rows_per_batch: int
    killed_after: int
    cores: int
    spark: Run
    millpond: Run
    before: Comparison
    after: Comparison
    machine: Machine
    versions: str
    explained: str
    settings: dict[str, str]
    finished: str

    @property
    def runs(self) -> list[Run]:
        """Both runs, Spark's first."""
        return [self.spark, self.millpond]

    @property
    def ratio(self) -> float | None:
        """The ratio of Millpond's rows per second to Spark's."""
        return ratio(self.spark, self.millpond)

    @property
    def equal(self) -> bool:
        """Whether all rows are equal, before the kill and after it."""
        return self.before.equal and self.after.equal

    @property
    def compared(self) -> int:
        """Number of compared rows."""
        return self.before.left + self.after.left

    def verdict(self) -> str:
        """Return the result of the comparison in one line."""
        for comparison in (self.before, self.after):
            if not comparison.equal:
                return comparison.line()
        return (
            f"all {self.compared:,} result rows equal ({self.before.left:,} before the kill, {self.after.left:,} after)"
        )

    def table(self) -> list[tuple[str, str, str]]:
        """Return rows of (figure, Spark's value, Millpond's value)."""
        return [(name, of(self.spark), of(self.millpond)) for name, of in _LINES]

    def counted(self) -> str:
        """Return a sentence about the counted batches."""
        return (
            f"Figures are over batches {LEFT_OUT + 1} to {self.killed_after}, of {self.rows_per_batch:,} {self.unit}"
            f" each, before the kill; the first {LEFT_OUT} are left out."
        )


_LINES: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("rows/s", lambda run: shown(run.rate())),
    ("batch time, median", lambda run: shown(run.median_ms(), " ms")),
    ("batch time, longest", lambda run: shown(run.longest_ms(), " ms")),
    ("wait for the commit, median", lambda run: shown(run.commit_ms(), " ms")),
    ("first batch after the kill", lambda run: shown(run.first_after_kill_ms(), " ms")),
    ("from restart to the end of that batch", lambda run: shown(run.back_seconds(), " s", 1)),
    ("all batches, with both starts", lambda run: shown(run.seconds(), " s", 1)),
    ("state on disk, at most", lambda run: shown(run.state_bytes / 1e6, " MB")),
)

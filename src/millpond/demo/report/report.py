"""All that the demo measured and found, as plain data: page and picture are drawn from it, and the page holds it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millpond.demo.engines.comparison import Comparison
from millpond.demo.engines.figures import Run, ratio, shown
from millpond.demo.engines.job import LEFT_OUT
from millpond.demo.engines.machine import Machine


class Report(msgspec.Struct, frozen=True):
    """One demo.

    Attributes:
        query, title, about, unit, source: the job's.
        mode: its output mode.
        rows_per_batch: events of a batch.
        killed_after: batches before the kill.
        cores: how many each engine had.
        spark, millpond: what each engine did.
        before, after: the rows of both compared, of the batches before the kill and after it.
        versions, explained: what Millpond's engine said of itself.
        settings: of both sessions.
        finished: local time, for people.
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
        """Both, Spark's first."""
        return [self.spark, self.millpond]

    @property
    def ratio(self) -> float | None:
        """How many times Spark's rows per second Millpond did."""
        return ratio(self.spark, self.millpond)

    @property
    def equal(self) -> bool:
        """Whether every row was equal, before the kill and after it."""
        return self.before.equal and self.after.equal

    @property
    def compared(self) -> int:
        """Rows that were compared."""
        return self.before.left + self.after.left

    def verdict(self) -> str:
        """What became of the comparison, in a line."""
        for comparison in (self.before, self.after):
            if not comparison.equal:
                return comparison.line()
        return (
            f"all {self.compared:,} result rows equal ({self.before.left:,} before the kill, {self.after.left:,} after)"
        )

    def table(self) -> list[tuple[str, str, str]]:
        """The figures: what, Spark's, Millpond's."""
        return [(name, of(self.spark), of(self.millpond)) for name, of in _LINES]

    def counted(self) -> str:
        """Which batches the figures are over."""
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

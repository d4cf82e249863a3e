"""The figures of the demo: of one batch, of an engine's run, and of the whole result."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.demo.jobs import LEFT_OUT, Job

TITLES = {
    "rows_per_second": ("rows/s", "", 0),
    "batch_ms": ("batch time, median", " ms", 0),
    "longest_ms": ("batch time, longest", " ms", 0),
    "commit_wait_ms": ("wait for the commit, median", " ms", 0),
    "first_ms": ("first batch after the kill", " ms", 0),
    "restart_seconds": ("from restart to the end of that batch", " s", 1),
    "seconds": ("all batches, with both starts", " s", 1),
    "state_mb": ("state on disk, at most", " MB", 0),
}
"""Figure of a run → its title, its unit and its number of decimals."""


class Figures(msgspec.Struct, frozen=True):
    """The figures of one batch: its number, its start in seconds since the epoch, its time and its input rows.

    `commit_wait_ms` is its wait for durable state (Spark: state commit, per partition; Millpond: the commit of the
    batch before).
    """

    batch: int
    start: float
    ms: float
    rows: int
    commit_wait_ms: float

    @property
    def end(self) -> float:
        """The end of the batch, in seconds since the epoch."""
        return self.start + self.ms / 1000


class Measurement(msgspec.Struct):
    """Measurement of one engine's run: its batches, and when its process was started and killed (since the epoch).

    `state_bytes` is the largest size of its state on disk; batches from the number `counted` on are not counted.
    """

    engine: str
    batches: list[Figures] = msgspec.field(default_factory=list)
    starts: list[float] = msgspec.field(default_factory=list)
    kills: list[float] = msgspec.field(default_factory=list)
    state_bytes: int = 0
    counted: int = 0

    @property
    def name(self) -> str:
        """The display name of the engine."""
        return {"spark": "Spark (RocksDB)", "millpond": "Millpond"}[self.engine]

    @property
    def done(self) -> int:
        """Number of finished batches, counted from the very first."""
        return self.batches[-1].batch + 1 if self.batches else 0

    def before_kill(self) -> list[Figures]:
        """Return the batches before the kill."""
        return [b for b in self.batches if not self.kills or b.start < self.kills[0]]

    def first_after_kill(self) -> Figures | None:
        """Return the first batch after the kill."""
        return next((b for b in self.batches if self.kills and b.start >= self.kills[-1]), None)

    def steady(self) -> list[Figures]:
        """Return the counted batches: those before the kill without the first few, the same for both engines."""
        return [b for b in self.before_kill() if LEFT_OUT <= b.batch < self.counted]

    def figures(self) -> dict[str, float | None]:
        """Return the figures of `TITLES` as far as they are known; those of batches are over the counted ones."""
        steady, first = self.steady(), self.first_after_kill()
        return {
            "rows_per_second": rate(steady),
            "batch_ms": statistics.median(b.ms for b in steady) if steady else None,
            "longest_ms": max((b.ms for b in steady), default=None),
            "commit_wait_ms": statistics.median(b.commit_wait_ms for b in steady) if steady else None,
            "first_ms": first.ms if first else None,
            "restart_seconds": first.end - self.starts[-1] if first else None,
            "seconds": self.batches[-1].end - self.starts[0] if self.batches else None,
            "state_mb": self.state_bytes / 1e6,
        }

    def shown(self, figure: str) -> str:
        """Format a figure of `TITLES` with its unit."""
        _, unit, digits = TITLES[figure]
        return shown(self.figures()[figure], unit, digits)

    def timeline(self) -> list[tuple[float, float]]:
        """Return the processed rows over time: points (seconds since the first start, rows), flat after a kill."""
        points, rows = [(0.0, 0.0)], 0.0
        for batch in self.batches:
            if batch in (self.batches[0], self.first_after_kill()):
                points.append((batch.start - self.starts[0], rows))
            rows = float((batch.batch + 1) * batch.rows)
            points.append((batch.end - self.starts[0], rows))
        return points


class Comparison(msgspec.Struct, frozen=True):
    """The number of rows of each side, and the first difference, if any."""

    left: int = 0
    right: int = 0
    difference: str = ""

    @property
    def equal(self) -> bool:
        """Whether there are rows, and all of them are equal."""
        return bool(self.left) and not self.difference

    def line(self) -> str:
        """Return the result in one line."""
        if self.difference:
            return f"rows differ: {self.difference}"
        return f"rows equal: {self.left:,} = {self.right:,}" if self.left else "no rows to compare"


class Report(msgspec.Struct, frozen=True):
    """The result of one demo: both runs, and the comparisons of the batches before and after the kill.

    `machine` and `versions` are lines of text; `explained` says where Millpond ran the query's operators.
    """

    job: Job
    rows_per_batch: int
    spark: Measurement
    millpond: Measurement
    before: Comparison
    after: Comparison
    machine: str
    versions: str
    explained: str

    @property
    def runs(self) -> tuple[Measurement, Measurement]:
        """Both runs, Spark's first."""
        return self.spark, self.millpond

    @property
    def equal(self) -> bool:
        """Whether all rows are equal, before the kill and after it."""
        return self.before.equal and self.after.equal

    @property
    def verdict(self) -> str:
        """The result of the comparison in one line."""
        if not self.equal:
            return (self.after if self.before.equal else self.before).line()
        compared = self.before.left + self.after.left
        return f"all {compared:,} result rows equal ({self.before.left:,} before the kill, {self.after.left:,} after)"

    @property
    def counted(self) -> str:
        """A sentence about the counted batches."""
        return (
            f"Figures are over batches {LEFT_OUT + 1} to {self.spark.counted}, of {self.rows_per_batch:,}"
            f" {self.job.unit} each, before the kill; the first {LEFT_OUT} are left out."
        )

    def ratio(self) -> float | None:
        """Return the ratio of Millpond's rows per second to Spark's."""
        theirs, ours = (run.figures()["rows_per_second"] for run in self.runs)
        return ours / theirs if ours and theirs else None

    def table(self) -> list[tuple[str, str, str]]:
        """Return rows of (figure, Spark's value, Millpond's value)."""
        return [(title, self.spark.shown(name), self.millpond.shown(name)) for name, (title, _, _) in TITLES.items()]


def compare(pairs: list[tuple[Path, Path]]) -> Comparison:
    """Compare pairs of folders of batches: every column of every row, without missing or additional rows."""
    left = right = 0
    difference = ""
    for mine, other in pairs:
        a, b = _rows(mine), _rows(other)
        left, right = left + len(a), right + len(b)
        difference = difference or _difference(a, b, mine.name)
    return Comparison(left, right, difference)


def _rows(folder: Path) -> pa.Table:
    """Return the rows of one batch, sorted by all columns. A missing folder has no rows."""
    table = pq.read_table(folder) if folder.exists() else pa.table({})
    names = sorted(table.column_names)
    return table.select(names).sort_by([(name, "ascending") for name in names]) if len(table) else table


def _difference(a: pa.Table, b: pa.Table, batch: str) -> str:
    """Describe the first difference of two tables; the nullability of columns is ignored."""
    columns, others = ([f"{field.name} {field.type}" for field in table.schema] for table in (a, b))
    if len(a) and len(b) and columns != others:
        return f"{batch}: columns {columns} and {others}"
    if len(a) == len(b) and (not len(a) or a.columns == b.columns):
        return ""
    pairs = zip(a.to_pylist(), b.to_pylist(), strict=False)
    differing = next((f"{mine} and {other}" for mine, other in pairs if mine != other), "")
    return f"{batch}: {differing or f'{len(a)} and {len(b)} rows'}"


def rate(batches: list[Figures]) -> float | None:
    """Return the rows per second of batches, over the sum of their times."""
    milliseconds = sum(b.ms for b in batches)
    return sum(b.rows for b in batches) / milliseconds * 1000 if milliseconds else None


def shown(value: float | None, unit: str = "", digits: int = 0) -> str:
    """Format a figure; None is a dash."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def rounded(value: float | None) -> str:
    """Format a rate with three significant digits, which is the precision of the measurement."""
    return f"{round(value, min(0, 3 - len(str(int(value))))):,.0f}" if value else "–"


def times(value: float | None) -> str:
    """Format a ratio: with one decimal below 20, without decimals above."""
    return shown(value, digits=0 if value and value >= 20 else 1)

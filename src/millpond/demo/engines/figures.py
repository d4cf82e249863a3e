"""The run of one engine and its figures, all of which are computed here."""

from __future__ import annotations

import statistics

import msgspec

from millpond.demo.engines.engine import Figures
from millpond.demo.engines.job import LEFT_OUT

NAMES = {"spark": "Spark (RocksDB)", "millpond": "Millpond"}


class Run(msgspec.Struct):
    """One engine's run; times are in seconds since the epoch.

    Attributes:
        engine: `spark` or `millpond`.
        batches: the figures of its batches, in the order of their execution.
        starts: the times at which its process was started.
        kills: the times at which its process was killed.
        state_bytes: the largest size of its state on disk.
        counted: batches from this number on are not counted.
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
        return NAMES[self.engine]

    @property
    def done(self) -> int:
        """Number of finished batches, counted from the very first."""
        return self.batches[-1].batch + 1 if self.batches else 0

    def before_kill(self) -> list[Figures]:
        """Return the batches before the first kill."""
        return [b for b in self.batches if not self.kills or b.start < self.kills[0]]

    def after_kill(self) -> list[Figures]:
        """Return the batches after the last kill."""
        return [b for b in self.batches if self.kills and b.start >= self.kills[-1]]

    def steady(self) -> list[Figures]:
        """Return the counted batches: those before the kill without the first few, the same for both engines."""
        return [b for b in self.before_kill() if LEFT_OUT <= b.batch < self.counted]

    def rate(self) -> float | None:
        """Return the rows per second over the counted batches."""
        return rate(self.steady())

    def median_ms(self) -> float | None:
        """Return the median batch time of the counted batches."""
        return statistics.median(b.ms for b in self.steady()) if self.steady() else None

    def longest_ms(self) -> float | None:
        """Return the longest batch time of the counted batches."""
        return max((b.ms for b in self.steady()), default=None)

    def commit_ms(self) -> float | None:
        """Return the median wait for durable state of the counted batches."""
        return statistics.median(b.commit_ms for b in self.steady()) if self.steady() else None

    def first_after_kill_ms(self) -> float | None:
        """Return the batch time of the first batch after the restart."""
        return next((b.ms for b in self.after_kill()), None)

    def back_seconds(self) -> float | None:
        """Return the seconds from the restart to the end of the first batch after it."""
        first = next(iter(self.after_kill()), None)
        return None if first is None or len(self.starts) < 2 else first.end - self.starts[-1]

    def seconds(self) -> float | None:
        """Return the seconds from the first start to the end of the last batch."""
        return self.batches[-1].end - self.starts[0] if self.batches and self.starts else None

    def timeline(self) -> list[tuple[float, float]]:
        """Return the processed rows over time: points (seconds since the first start, rows), flat after a kill."""
        if not self.starts:
            return []
        points, rows, origin = [(0.0, 0.0)], 0.0, self.starts[0]
        for number, batch in enumerate(self.batches):
            fresh = number == 0 or any(self.batches[number - 1].end <= kill <= batch.start for kill in self.kills)
            if fresh:
                points.append((batch.start - origin, rows))
            rows = float((batch.batch + 1) * batch.rows)
            points.append((batch.end - origin, rows))
        return points


def rate(batches: list[Figures]) -> float | None:
    """Return the rows per second of batches, over the sum of their times."""
    milliseconds = sum(b.ms for b in batches)
    return sum(b.rows for b in batches) / milliseconds * 1000 if milliseconds else None


def ratio(spark: Run, millpond: Run) -> float | None:
    """Return the ratio of Millpond's rows per second to Spark's."""
    theirs, ours = spark.rate(), millpond.rate()
    return ours / theirs if ours and theirs else None


def shown(value: float | None, unit: str = "", digits: int = 0) -> str:
    """Format a figure; None is a dash."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def rounded(value: float | None) -> str:
    """Format a rate with three significant digits, which is the precision of the measurement."""
    if not value:
        return "–"
    digits = 3 - len(str(int(value)))
    return f"{round(value, min(0, digits)):,.0f}"


def times(value: float | None) -> str:
    """Format a ratio: with one decimal below 20, without decimals above."""
    return "–" if value is None else f"{value:.1f}" if value < 20 else f"{value:.0f}"

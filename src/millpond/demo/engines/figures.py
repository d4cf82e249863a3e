"""What one engine did, and the figures that follow from it: the only place where the demo computes any."""

from __future__ import annotations

import statistics

import msgspec

from millpond.demo.engines.engine import Figures
from millpond.demo.engines.job import LEFT_OUT

NAMES = {"spark": "Spark (RocksDB)", "millpond": "Millpond"}


class Run(msgspec.Struct):
    """One engine's run; times are seconds since the epoch.

    Attributes:
        batches: in the order in which they were done.
        starts, kills: when its process was started, and killed.
        state_bytes: what its state took on disk, at most.
        counted: batches with this number or a higher one do not count.
    """

    engine: str
    batches: list[Figures] = msgspec.field(default_factory=list)
    starts: list[float] = msgspec.field(default_factory=list)
    kills: list[float] = msgspec.field(default_factory=list)
    state_bytes: int = 0
    counted: int = 0

    @property
    def name(self) -> str:
        """What people call the engine."""
        return NAMES[self.engine]

    @property
    def done(self) -> int:
        """Batches done, counted from the very first."""
        return self.batches[-1].batch + 1 if self.batches else 0

    def before_kill(self) -> list[Figures]:
        """The batches before the first kill."""
        return [b for b in self.batches if not self.kills or b.start < self.kills[0]]

    def after_kill(self) -> list[Figures]:
        """The batches after the last kill."""
        return [b for b in self.batches if self.kills and b.start >= self.kills[-1]]

    def steady(self) -> list[Figures]:
        """The batches that count: those before the kill but for the first few, the same of both engines."""
        return [b for b in self.before_kill() if LEFT_OUT <= b.batch < self.counted]

    def rate(self) -> float | None:
        """Rows per second over the batches that count."""
        return rate(self.steady())

    def median_ms(self) -> float | None:
        """Batch time, the median of those that count."""
        return statistics.median(b.ms for b in self.steady()) if self.steady() else None

    def longest_ms(self) -> float | None:
        """Batch time, the longest of those that count."""
        return max((b.ms for b in self.steady()), default=None)

    def commit_ms(self) -> float | None:
        """How long a batch waited for state to be durable, the median of those that count."""
        return statistics.median(b.commit_ms for b in self.steady()) if self.steady() else None

    def first_after_kill_ms(self) -> float | None:
        """Batch time of the first batch after the restart."""
        return next((b.ms for b in self.after_kill()), None)

    def back_seconds(self) -> float | None:
        """From the restart to the end of the first batch after it."""
        first = next(iter(self.after_kill()), None)
        return None if first is None or len(self.starts) < 2 else first.end - self.starts[-1]

    def seconds(self) -> float | None:
        """From the first start to the end of the last batch."""
        return self.batches[-1].end - self.starts[0] if self.batches and self.starts else None

    def timeline(self) -> list[tuple[float, float]]:
        """Rows done over time: points of (seconds since the first start, rows); flat from a kill to the next batch."""
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
    """Rows per second of these batches, of the time that they took."""
    milliseconds = sum(b.ms for b in batches)
    return sum(b.rows for b in batches) / milliseconds * 1000 if milliseconds else None


def ratio(spark: Run, millpond: Run) -> float | None:
    """How many times Spark's rows per second Millpond did."""
    theirs, ours = spark.rate(), millpond.rate()
    return ours / theirs if ours and theirs else None


def shown(value: float | None, unit: str = "", digits: int = 0) -> str:
    """A figure, or a dash."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def rounded(value: float | None) -> str:
    """A rate to three digits: nobody measures more."""
    if not value:
        return "–"
    digits = 3 - len(str(int(value)))
    return f"{round(value, min(0, digits)):,.0f}"


def times(value: float | None) -> str:
    """A ratio: one digit after the point below 20, none above."""
    return "–" if value is None else f"{value:.1f}" if value < 20 else f"{value:.0f}"

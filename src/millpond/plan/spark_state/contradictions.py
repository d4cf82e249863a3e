"""Contradictions between the rows of Spark's state and the query that takes them over.

Each check is an SQL condition that is true of rows that this query cannot have made. All checks of an operator are
evaluated in one pass over its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from millpond.humanize import counted, duration
from millpond.spec.operators import Windows

BEFORE, AFTER = "__before", "__after"
"""Columns with the starts of the windows before and after a row's window, in the same group."""


class Times(NamedTuple):
    """Spark's watermarks in milliseconds: of the last committed batch (`watermark`) and the next (`following`)."""

    watermark: int
    following: int


class Check(NamedTuple):
    """A condition that is true of another query's rows, and the text about such a row.

    Attributes:
        where: SQL of the condition.
        arguments: SQL of the arguments of `message`, from one row.
        message: makes the text.
    """

    where: str
    arguments: Sequence[str]
    message: Callable[..., str]


class Span(NamedTuple):
    """A column of windows: SQL of both bounds, and of both in microseconds since the epoch."""

    start: str
    end: str
    first: str
    stop: str

    @classmethod
    def of(cls, window: str, kind: str) -> Span:
        """Return the bounds of a struct of two times of a type."""
        start, end = f"{window}.start", f"{window}.end"
        return cls(start, end, micros(start, kind), micros(end, kind))

    @property
    def arguments(self) -> list[str]:
        """SQL of a message's arguments: the length in microseconds, and both bounds."""
        return [f"{self.stop} - {self.first}", f"string({self.start})", f"string({self.end})"]


def contradiction(state: DataFrame, checks: Sequence[Check]) -> str | None:
    """Return how the rows of a state contradict the query; None if no row does."""
    if not checks:
        return None
    # The minimum, so that the same row is named each time.
    minima = [
        F.expr(f"min(struct({', '.join(check.arguments)})) filter (where {check.where})").alias(f"c{number}")
        for number, check in enumerate(checks)
    ]
    row = state.agg(*minima).first()
    assert row is not None
    return next((check.message(*held) for check, held in zip(checks, row, strict=True) if held is not None), None)


def window_checks(windows: Windows, span: Span) -> list[Check]:
    """Check that windows have the query's size and starts."""
    ours = windows.description
    return [
        Check(
            f"{span.stop} - {span.first} != {windows.size}",
            span.arguments,
            lambda size, start, end: (
                f"the query has {ours}; its checkpoint has windows of {duration(size)} (from {start} to {end})"
            ),
        ),
        Check(
            f"pmod({span.first} - {windows.offset}, {windows.slide}) != 0",
            span.arguments,
            lambda _, start, end: (
                f"the query has {ours}, but no window begins at {start}; its checkpoint has one from {start} to {end}"
            ),
        ),
    ]


def with_neighbours(state: DataFrame, span: Span, groups: Sequence[str]) -> DataFrame:
    """Return the rows with the starts of the neighbouring windows (see `neighbour_checks`).

    Args:
        state: the rows.
        span: their windows.
        groups: the other grouping columns.
    """
    over = f"over (partition by {', '.join(groups) or '1'} order by {span.first})"
    return state.selectExpr("*", *(f"{f}({span.first}) {over} as {name}" for f, name in _NEIGHBOURS.items()))


_NEIGHBOURS = {"lag": BEFORE, "lead": AFTER}


def neighbour_checks(windows: Windows, span: Span, watermark: int | None) -> list[Check]:
    """Check that overlapping windows occur together: a row that is not in the next window is in the one before.

    Args:
        windows: the query's windows.
        span: their column.
        watermark: the watermark that closed windows, in milliseconds; None if none are closed.
    """
    if windows.size < 2 * windows.slide:
        return []
    alone = f"{BEFORE} is distinct from {span.first} - {windows.slide}"
    alone += f" and {AFTER} is distinct from {span.first} + {windows.slide}"
    if watermark is not None:
        alone += f" and {span.stop} - {windows.slide} > {watermark * 1000}"
    return [
        Check(
            alone,
            span.arguments,
            lambda size, start, end: (
                f"the query has {windows.description}; its checkpoint has windows of {duration(size)} that do not "
                f"overlap so (one from {start} to {end}, and none {duration(windows.slide)} before or after it)"
            ),
        )
    ]


def session_checks(gap: int, span: Span, rows: str | None) -> list[Check]:
    """Check that sessions are at least as long as the gap, and at most the gap times their number of rows.

    Args:
        gap: the gap in microseconds.
        span: the session column.
        rows: SQL of a session's number of rows, if the state has it.
    """
    ours = f"the query has sessions with a gap of {duration(gap)}"
    checks = [
        Check(
            f"{span.stop} - {span.first} < {gap}",
            span.arguments,
            lambda size, start, end: (
                f"{ours}; its checkpoint has sessions of {duration(size)}, gap included (from {start} to {end})"
            ),
        )
    ]
    if rows is not None:
        checks.append(
            Check(
                f"({span.stop} - {span.first} - 1) div {gap} >= {rows}",
                [*span.arguments, rows],
                lambda size, start, end, count: (
                    f"{ours}; its checkpoint has one of {counted(count, 'row')} and {duration(size)} (from {start} to "
                    f"{end})"
                ),
            )
        )
    return checks


def closed_checks(time: str, shown: str, what: str, watermark: int) -> list[Check]:
    """Check that state was removed by the batch whose watermark reached it.

    Args:
        time: SQL of the closing time, in microseconds.
        shown: the same, for people.
        what: the kind of state.
        watermark: the watermark of the last committed batch, in milliseconds.
    """
    return [
        Check(
            f"{time} <= {watermark * 1000}",
            [f"string({shown})", f"string(timestamp_millis({watermark}))"],
            lambda at, reached: (
                f"the query removes {what} that the watermark has passed; its checkpoint still has some of {at}, and "
                f"the watermark is at {reached} (another output mode, or no watermark, keeps them)"
            ),
        )
    ]


def delay_checks(expires: str, delay: int, following: int) -> list[Check]:
    """Check that keys expire at most one delay after the newest row, which is one delay after the watermark.

    Args:
        expires: SQL of a key's expiry time, in microseconds.
        delay, following: in milliseconds.
    """
    longest = following + 2 * delay + 1  # a watermark is truncated to milliseconds
    return [
        Check(
            f"{expires} > {longest * 1000}",
            [f"string(timestamp_micros({expires}))", f"string(timestamp_millis({following}))"],
            lambda at, reached: (
                f"the query keeps keys for {duration(delay * 1000)}, the delay of its watermark; its checkpoint keeps "
                f"some until {at}, with the watermark at {reached}, which takes a longer delay"
            ),
        )
    ]


def micros(sql: str, kind: str) -> str:
    """Return SQL for a time in microseconds since the epoch."""
    if kind == "timestamp":
        return f"unix_micros({sql})"
    return f"timestampdiff(MICROSECOND, timestamp_ntz'1970-01-01 00:00:00', {sql})"

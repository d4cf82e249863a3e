"""The description of a query: its function and how to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.nexmark.spark import WATERMARK, Streams, streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from benchmarks.nexmark.generator import NexmarkConfig

EVERY_MODE = ("append", "update", "complete")


@dataclass(frozen=True)
class Query:
    """A query. Call it with the streams.

    Attributes:
        name: `q17`, `q5-append`, …
        about: a one-line description.
        function: the query itself.
        event_time: whether it needs a watermark on `dateTime`.
        mode: the output mode in which it runs as a stream.
        native: the output modes in which Spark itself runs it as a stream; empty if Spark rejects it.
        keys: the columns that identify a result row, where `mode` is `update`.
        determined: the deterministic columns, if not all are: rows that tie in a window function's order differ in
            the others.
        stateless: whether rows are processed one by one.
    """

    name: str
    about: str
    function: Callable[[Streams], DataFrame]
    event_time: bool
    mode: str
    native: tuple[str, ...]
    keys: tuple[str, ...]
    determined: tuple[str, ...]
    stateless: bool

    def __call__(self, events: Streams) -> DataFrame:
        """Return the result over these events."""
        return self.function(events)

    def over(self, numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
        """Return the result over numbered events, with the watermark that the query needs."""
        return self(streams(numbered, config, WATERMARK if self.event_time else None))


def query(
    *,
    event_time: bool = False,
    mode: str = "append",
    native: tuple[str, ...] = (),
    keys: tuple[str, ...] = (),
    determined: tuple[str, ...] = (),
    stateless: bool = False,
) -> Callable[[Callable[[Streams], DataFrame]], Query]:
    """Make a query of the decorated function, with its name and the first line of its docstring."""

    def describe(function: Callable[[Streams], DataFrame]) -> Query:
        name, about = function.__name__.replace("_", "-"), (function.__doc__ or "").splitlines()[0]
        return Query(name, about, function, event_time, mode, native, keys, determined, stateless)

    return describe


def sql(events: Streams, text: str) -> DataFrame:
    """Run SQL over `{bids}`, `{auctions}` and `{persons}`."""
    spark = events.bids.sparkSession
    return spark.sql(text, bids=events.bids, auctions=events.auctions, persons=events.persons)

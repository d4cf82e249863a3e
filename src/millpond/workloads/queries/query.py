"""What a query is: a function from the streams to the result, and what one has to know to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.workloads.nexmark_spark import WATERMARK, Streams, streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millpond.workloads.nexmark import NexmarkConfig

EVERY_MODE = ("append", "update", "complete")
BIDS, AUCTIONS, PERSONS = "bids", "auctions", "persons"


@dataclass(frozen=True)
class Query:
    """One query. Call it with the streams.

    Attributes:
        name: `q17`, `q5-append`, …
        about: what it answers.
        function: the query itself.
        reads: the streams that it reads.
        event_time: whether it needs a watermark on `dateTime`.
        mode: the output mode in which it is meant to run as a stream.
        native: the output modes in which Spark itself runs it as a stream; none if it refuses it altogether.
        keys: the columns that tell the rows of an image apart, where `mode` is `update`.
        determined: the columns that the query determines, if there are others: rows that tie in the order of a window
            function differ in those.
        stateless: whether rows pass one by one.
    """

    name: str
    about: str
    function: Callable[[Streams], DataFrame]
    reads: tuple[str, ...]
    event_time: bool
    mode: str
    native: tuple[str, ...]
    keys: tuple[str, ...]
    determined: tuple[str, ...]
    stateless: bool

    def __call__(self, events: Streams) -> DataFrame:
        """The result over these events."""
        return self.function(events)

    def over(self, numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
        """The result over the events with these numbers, with the watermark that the query needs."""
        return self(streams(numbered, config, WATERMARK if self.event_time else None))


def query(
    *,
    reads: tuple[str, ...] = (BIDS,),
    event_time: bool = False,
    mode: str = "append",
    native: tuple[str, ...] = (),
    keys: tuple[str, ...] = (),
    determined: tuple[str, ...] = (),
    stateless: bool = False,
) -> Callable[[Callable[[Streams], DataFrame]], Query]:
    """Make a query of the function below: its name and its docstring are the query's."""

    def describe(function: Callable[[Streams], DataFrame]) -> Query:
        name, about = function.__name__.replace("_", "-"), (function.__doc__ or "").splitlines()[0]
        return Query(name, about, function, reads, event_time, mode, native, keys, determined, stateless)

    return describe


def sql(events: Streams, text: str) -> DataFrame:
    """A query over `{bids}`, `{auctions}` and `{persons}`."""
    spark = events.bids.sparkSession
    return spark.sql(text, bids=events.bids, auctions=events.auctions, persons=events.persons)

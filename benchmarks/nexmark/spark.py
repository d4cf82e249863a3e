"""The NEXMark stream as Spark DataFrames, with the rows of `generator.Nexmark`.

`rate-micro-batch` numbers the events, so batches have an exact size, and replayed batches have the same rows by
construction. For persons, auctions and bids, Spark's generated code computes only the columns that a query needs,
without Python. Whole events come from the NumPy generator through `mapInArrow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.nexmark.generator import CHUNK, Nexmark, NexmarkConfig
from benchmarks.nexmark.sql import AuctionColumns, BidColumns, PersonColumns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

EVENT_DDL = (
    "event_type int,"
    " person struct<id: bigint, name: string, emailAddress: string, creditCard: string, city: string, state: string,"
    " dateTime: timestamp, extra: string>,"
    " auction struct<id: bigint, itemName: string, description: string, initialBid: bigint, reserve: bigint,"
    " dateTime: timestamp, expires: timestamp, seller: bigint, category: bigint, extra: string>,"
    " bid struct<auction: bigint, bidder: bigint, price: bigint, channel: string, url: string, dateTime: timestamp,"
    " extra: string>"
)
WATERMARK = "4 seconds"
"""Delay of the watermark, for queries that need one."""


@dataclass(frozen=True)
class Streams:
    """Input of the queries: three DataFrames with flat columns, streaming or batch."""

    bids: DataFrame
    auctions: DataFrame
    persons: DataFrame


def numbers(spark: SparkSession, rows_per_batch: int, partitions: int) -> DataFrame:
    """Make the streaming source of event numbers, column `n`: batches of exactly `rows_per_batch`."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch)
    return source.option("numPartitions", partitions).load().selectExpr("value as n")


def numbers_between(spark: SparkSession, start: int, stop: int, partitions: int = 2) -> DataFrame:
    """Make the same numbers as a batch DataFrame, for comparison with a stream."""
    return spark.range(start, stop, 1, partitions).selectExpr("id as n")


def events(numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
    """Make whole events: `event_type` (0 person, 1 auction, 2 bid), and structs of which one is not null."""
    chosen = config or NexmarkConfig()

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        generator = Nexmark(chosen)
        for batch in batches:
            event_numbers = np.asarray(batch.column(0))
            for start in range(0, len(event_numbers), CHUNK):
                yield generator.numbered(event_numbers[start : start + CHUNK])

    return numbered.mapInArrow(make, EVENT_DDL)


def bids(numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
    """Make the bids among the events, flat: the rows of `events(…).where("event_type = 2").select("bid.*")`."""
    return _flat(numbered, BidColumns(config or NexmarkConfig()))


def auctions(numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
    """Make the auctions among the events, as flat columns."""
    return _flat(numbered, AuctionColumns(config or NexmarkConfig()))


def persons(numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
    """Make the persons among the events, as flat columns."""
    return _flat(numbered, PersonColumns(config or NexmarkConfig()))


def streams(numbered: DataFrame, config: NexmarkConfig | None = None, watermark: str | None = None) -> Streams:
    """Make the three kinds of events, with a watermark on `dateTime` if one is given."""
    frames = (make(numbered, config) for make in (bids, auctions, persons))
    return Streams(*(frames if watermark is None else (rows.withWatermark("dateTime", watermark) for rows in frames)))


def _flat(numbered: DataFrame, make: BidColumns | AuctionColumns | PersonColumns) -> DataFrame:
    return numbered.where(make.where).selectExpr(*(f"{sql} as {name}" for name, sql in make.all.items()))

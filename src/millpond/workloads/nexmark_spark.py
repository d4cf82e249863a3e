"""The NEXMark stream as a Spark DataFrame; the rows are those of `nexmark.Nexmark`.

`rate-micro-batch` numbers the events: batches have an exact size, and a replayed batch has the same rows by
construction. Of the bids, which all the queries here read, Spark's generated code makes just the columns that a query
needs, without a Python process; whole events come from the NumPy generator through `mapInArrow`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from millpond.workloads.draws import bits_sql, draw_sql, letters
from millpond.workloads.nexmark import (
    ACTIVE_PEOPLE,
    AUCTIONS,
    BID_BYTES,
    CHANNELS,
    CHUNK,
    EPOCH,
    FIRST_ID,
    HOT_AUCTION_RATIO,
    HOT_BIDDER_RATIO,
    HOT_CHANNELS,
    HOT_EVERY,
    ID_LEAD,
    IN_FLIGHT_AUCTIONS,
    PERSONS,
    TEXT,
    Draw,
    Nexmark,
    NexmarkConfig,
    price_tables,
)

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
_LAST_PERSON = f"(n div {EPOCH})"
_LAST_AUCTION = (
    f"(n div {EPOCH} * {AUCTIONS} + if(n % {EPOCH} < {PERSONS}, -1, least(n % {EPOCH} - {PERSONS}, {AUCTIONS - 1})))"
)


class BidColumns:
    """Spark SQL for the columns of the bid whose event number is column `n`.

    Nothing conditional hides a draw: only what is always evaluated does Spark compute once and share.
    """

    def __init__(self, config: NexmarkConfig) -> None:
        self._config = config
        self._text = f"X'{letters(TEXT, config.seed).hex()}'"

    def _draw(self, stream: int, number: str = "n") -> str:
        return draw_sql(number, self._config.seed, stream)

    def _cut(self, start: str, size: str) -> str:
        return f"cast(substring({self._text}, cast({start} + 1 as int), cast({size} as int)) as string)"

    @property
    def auction(self) -> str:
        """The auction that is bid on."""
        drawn = self._draw(Draw.BID_IDS)
        first = f"greatest({_LAST_AUCTION} - {IN_FLIGHT_AUCTIONS}, 0L)"
        bound = f"({_LAST_AUCTION} - {first} + {1 + ID_LEAD})"
        hot = f"{bits_sql(drawn, 0, 1)} % {HOT_AUCTION_RATIO} > 0"
        hot_auction = f"{_LAST_AUCTION} div {HOT_EVERY} * {HOT_EVERY}"
        return f"{FIRST_ID}L + if({hot}, {hot_auction}, {first} + {bits_sql(drawn, 3, 30)} % {bound})"

    @property
    def bidder(self) -> str:
        """Who bids."""
        drawn = self._draw(Draw.BID_IDS)
        active = f"least({_LAST_PERSON} + 1, {ACTIVE_PEOPLE}L)"
        any_bidder = f"{_LAST_PERSON} + 1 - {active} + {bits_sql(drawn, 33, 30)} % ({active} + {ID_LEAD})"
        hot = f"{bits_sql(drawn, 1, 2)} % {HOT_BIDDER_RATIO} > 0"
        return f"{FIRST_ID}L + if({hot}, {_LAST_PERSON} div {HOT_EVERY} * {HOT_EVERY} + 1, {any_bidder})"

    @property
    def price(self) -> str:
        """What is bid, in cents."""
        drawn = self._draw(Draw.PRICE)
        factors = []
        for table, shift in zip(price_tables(), (14, 7, 0), strict=True):
            values = ", ".join(f"{value!r}D" for value in table.tolist())
            factors.append(f"array({values})[cast({bits_sql(drawn, shift, 7)} as int)]")
        return f"cast(floor({' * '.join(factors)} * 100.0D + 0.5D) as bigint)"

    @property
    def _channel_number(self) -> str:
        return f"({bits_sql(self._draw(Draw.CHANNEL), 1, 31)} % {CHANNELS})"

    @property
    def _hot_channel(self) -> str:
        return f"{bits_sql(self._draw(Draw.CHANNEL), 0, 1)} > 0"

    @property
    def channel(self) -> str:
        """Where the bid came from."""
        names = ", ".join(f"'{name}'" for name in HOT_CHANNELS)
        hot = f"array({names})[cast({self._channel_number} % {len(HOT_CHANNELS)} as int)]"
        return f"if({self._hot_channel}, {hot}, concat('channel-', cast({self._channel_number} as string)))"

    @property
    def url(self) -> str:
        """The page of the channel."""
        hot = len(HOT_CHANNELS)
        site = f"if({self._hot_channel}, {self._channel_number} % {hot}, {self._channel_number} + {hot})"
        drawn = self._draw(Draw.URL, site)
        directories = ", '/', ".join(
            self._cut(bits_sql(drawn, 12 * i, 11), f"(3 + {bits_sql(drawn, 12 * i + 11, 1)})") for i in range(3)
        )
        channel_id = bits_sql(self._draw(Draw.URL_TAIL, site), 0, 31)
        tagged = f"{site} >= {hot} and {bits_sql(drawn, 40, 16)} % 10 > 0"
        tail = f"if({tagged}, concat('&channel_id=', cast({channel_id} as string)), '')"
        return f"concat('https://www.nexmark.com/', {directories}, '/item.htm?query=1', {tail})"

    @property
    def time(self) -> str:
        """When."""
        return f"timestamp_millis({self._config.base_time_ms}L + n * 1000 div {self._config.rate})"

    @property
    def extra(self) -> str:
        """Padding."""
        drawn = self._draw(Draw.EXTRA)
        missing = BID_BYTES - 32
        fifth = (missing + 2) // 5
        return self._cut(bits_sql(drawn, 0, 11), f"({missing - fifth} + {bits_sql(drawn, 11, 30)} % {2 * fifth})")


def numbers(spark: SparkSession, rows_per_batch: int, partitions: int) -> DataFrame:
    """The streaming source of event numbers, column `n`: batches of exactly `rows_per_batch`."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows_per_batch)
    return source.option("numPartitions", partitions).load().selectExpr("value as n")


def numbers_between(spark: SparkSession, start: int, stop: int, partitions: int = 2) -> DataFrame:
    """The same numbers as a batch DataFrame, to check a stream against."""
    return spark.range(start, stop, 1, partitions).selectExpr("id as n")


def events(numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
    """All events: `event_type` (0 person, 1 auction, 2 bid), `person`, `auction`, `bid`, of which one is not null."""
    chosen = config or NexmarkConfig()

    def make(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        generator = Nexmark(chosen)
        for batch in batches:
            found = np.asarray(batch.column(0))
            for at in range(0, len(found), CHUNK):
                yield generator.numbered(found[at : at + CHUNK])

    return numbered.mapInArrow(make, EVENT_DDL)


def bids(numbered: DataFrame, config: NexmarkConfig | None = None) -> DataFrame:
    """The bids among the events, as flat columns: the rows of `events(…).where("event_type = 2").select("bid.*")`."""
    make = BidColumns(config or NexmarkConfig())
    return numbered.where(f"n % {EPOCH} >= {PERSONS + AUCTIONS}").selectExpr(
        f"{make.auction} as auction",
        f"{make.bidder} as bidder",
        f"{make.price} as price",
        f"{make.channel} as channel",
        f"{make.url} as url",
        f"{make.time} as dateTime",
        f"{make.extra} as extra",
    )

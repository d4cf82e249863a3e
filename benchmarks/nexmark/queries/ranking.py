"""Top-N queries, and queries on their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.nexmark.queries.query import query, sql
from benchmarks.nexmark.spark import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_OPEN = "a.id = b.auction and b.dateTime between a.dateTime and a.expires"


@query(mode="update", keys=("id",), determined=("id", "seller"))
def q6(events: Streams) -> DataFrame:
    """Average price of a seller: of the last eleven auctions with a bid, ordered by their winning bids.

    Flink's result does not contain the auction (`id`), without which an update would not identify the row that it
    replaces. Winning bids of the same millisecond tie, so averages are not deterministic.
    """
    return sql(
        events,
        "select id, seller, cast(avg(price) over ("
        "  partition by seller order by dateTime rows between 10 preceding and current row) as bigint) as avg_price"
        " from (select *, row_number() over (partition by id, seller order by price desc) as rank_number from ("
        "  select a.id, a.seller, b.price, b.dateTime from {auctions} a, {bids} b"
        f"  where {_OPEN})) where rank_number <= 1",
    )


@query(mode="update", keys=("id",), determined=("id", "price", "bid_dateTime"))
def q9(events: Streams) -> DataFrame:
    """Winning bids: the first of the highest bids made while the auction was open."""
    return sql(
        events,
        "select id, itemName, description, initialBid, reserve, dateTime, expires, seller, category, extra, auction,"
        " bidder, price, bid_dateTime, bid_extra from (select a.*, b.auction, b.bidder, b.price,"
        "  b.dateTime as bid_dateTime, b.extra as bid_extra,"
        "  row_number() over (partition by a.id order by b.price desc, b.dateTime asc) as rank_number"
        f"  from {{auctions}} a, {{bids}} b where {_OPEN}) where rank_number <= 1",
    )


@query(mode="update", keys=("auction", "bidder"), determined=("auction", "bidder", "dateTime"))
def q18(events: Streams) -> DataFrame:
    """The last bid of each user on each auction."""
    return sql(
        events,
        "select auction, bidder, price, channel, url, dateTime, extra from (select *,"
        "  row_number() over (partition by bidder, auction order by dateTime desc) as rank_number from {bids})"
        " where rank_number <= 1",
    )


@query(mode="update", keys=("auction", "rank_number"), determined=("auction", "rank_number", "price"))
def q19(events: Streams) -> DataFrame:
    """The ten highest bids on each auction."""
    return sql(
        events,
        "select * from (select *, row_number() over (partition by auction order by price desc) as rank_number"
        "  from {bids}) where rank_number <= 10",
    )

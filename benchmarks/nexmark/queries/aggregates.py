"""Aggregates without windows: per day, and of maxima that still change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.nexmark.queries.query import query, sql
from benchmarks.nexmark.spark import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_DAY = "date_format(dateTime, 'yyyy-MM-dd')"
_RANKS = ("price < 10000", "price >= 10000 and price < 1000000", "price >= 1000000")


def _by_rank(count: str, noun: str) -> str:
    ranks = [f"{count} filter (where {rank}) as rank{i}_{noun}" for i, rank in enumerate(_RANKS, 1)]
    return ", ".join([f"{count} as total_{noun}", *ranks])


_BIDS_BY_RANK = _by_rank("count(*)", "bids")
_DISTINCT_BY_RANK = (
    f"{_by_rank('count(distinct bidder)', 'bidders')}, {_by_rank('count(distinct auction)', 'auctions')}"
)


@query(mode="update", keys=("category",))
def q4(events: Streams) -> DataFrame:
    """Average price of a category: of the highest bids made while their auctions were open."""
    return sql(
        events,
        "select category, cast(avg(final) as bigint) as final from ("
        " select max(b.price) as final, a.category from {auctions} a, {bids} b"
        " where a.id = b.auction and b.dateTime between a.dateTime and a.expires group by a.id, a.category"
        ") group by category",
    )


@query(mode="update", keys=("day",))
def q15(events: Streams) -> DataFrame:
    """Bidding statistics of a day: distinct bidders and auctions at three levels of price."""
    return sql(events, f"select {_DAY} as day, {_BIDS_BY_RANK}, {_DISTINCT_BY_RANK} from {{bids}} group by {_DAY}")


@query(mode="update", keys=("channel", "day"))
def q16(events: Streams) -> DataFrame:
    """Channel statistics of a day: the same per channel, and the last minute of the day with a bid."""
    return sql(
        events,
        f"select channel, {_DAY} as day, max(date_format(dateTime, 'HH:mm')) as minute, {_BIDS_BY_RANK},"
        f" {_DISTINCT_BY_RANK} from {{bids}} group by channel, {_DAY}",
    )


@query(mode="update", native=("update", "complete"), keys=("auction", "day"))
def q17(events: Streams) -> DataFrame:
    """Auction statistics of a day: number of bids, and their prices."""
    return sql(
        events,
        f"select auction, {_DAY} as day, {_BIDS_BY_RANK}, min(price) as min_price, max(price) as max_price,"
        f" cast(avg(price) as bigint) as avg_price, sum(price) as sum_price from {{bids}} group by auction, {_DAY}",
    )

"""NEXMark's queries as plain Spark: each a function from the bids to the result.

The meaning is that of the SQL which Flink's NEXMark runs. Three spellings differ: `avg` of a bigint is a bigint there
(so it is cast), a regular expression that finds nothing gives NULL there and `''` in Spark, and `count_char` is a
function of theirs. Event times are read in the session's time zone: set `spark.sql.session.timeZone` to UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Query = Callable[["DataFrame"], "DataFrame"]

_DAY = "date_format(dateTime, 'yyyy-MM-dd')"
_RANKS = ("price < 10000", "price >= 10000 and price < 1000000", "price >= 1000000")
_CHANNEL_ID = "nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '')"


def _bids_by_rank() -> str:
    ranks = [f"count(*) filter (where {rank}) as rank{i}_bids" for i, rank in enumerate(_RANKS, 1)]
    return ", ".join(["count(*) as total_bids", *ranks])


def _distinct_by_rank(column: str) -> str:
    ranks = [f"count(distinct {column}) filter (where {rank}) as rank{i}_{column}s" for i, rank in enumerate(_RANKS, 1)]
    return ", ".join([f"count(distinct {column}) as total_{column}s", *ranks])


def _sql(bids: DataFrame, query: str) -> DataFrame:
    return bids.sparkSession.sql(query, bids=bids)


def q0(bids: DataFrame) -> DataFrame:
    """Pass through."""
    return bids.select("auction", "bidder", "price", "dateTime", "extra")


def q1(bids: DataFrame) -> DataFrame:
    """Currency conversion: dollars to euros."""
    return bids.selectExpr("auction", "bidder", "cast(0.908 * price as decimal(23, 3)) as price", "dateTime", "extra")


def q2(bids: DataFrame) -> DataFrame:
    """Selection: the bids on every 123rd auction."""
    return bids.where("auction % 123 = 0").select("auction", "price")


def q14(bids: DataFrame) -> DataFrame:
    """Calculation: the kind of time of day, how often a letter occurs, prices within bounds."""
    return bids.where("0.908 * price > 1000000 and 0.908 * price < 50000000").selectExpr(
        "auction",
        "bidder",
        "cast(0.908 * price as decimal(23, 3)) as price",
        "case when hour(dateTime) >= 8 and hour(dateTime) <= 18 then 'dayTime'"
        " when hour(dateTime) <= 6 or hour(dateTime) >= 20 then 'nightTime' else 'otherTime' end as bidTimeType",
        "dateTime",
        "extra",
        "cast(length(extra) - length(replace(extra, 'c', '')) as bigint) as c_counts",
    )


def q15(bids: DataFrame) -> DataFrame:
    """Bidding statistics of a day: distinct bidders and auctions at three levels of price."""
    return _sql(
        bids,
        f"select {_DAY} as day, {_bids_by_rank()}, {_distinct_by_rank('bidder')}, {_distinct_by_rank('auction')}"
        f" from {{bids}} group by {_DAY}",
    )


def q16(bids: DataFrame) -> DataFrame:
    """Channel statistics of a day: the same per channel, and the last minute of the day with a bid."""
    return _sql(
        bids,
        f"select channel, {_DAY} as day, max(date_format(dateTime, 'HH:mm')) as minute, {_bids_by_rank()},"
        f" {_distinct_by_rank('bidder')}, {_distinct_by_rank('auction')} from {{bids}} group by channel, {_DAY}",
    )


def q17(bids: DataFrame) -> DataFrame:
    """Auction statistics of a day: how many bids, and their prices."""
    return _sql(
        bids,
        f"select auction, {_DAY} as day, {_bids_by_rank()}, min(price) as min_price, max(price) as max_price,"
        f" cast(avg(price) as bigint) as avg_price, sum(price) as sum_price from {{bids}} group by auction, {_DAY}",
    )


def q21(bids: DataFrame) -> DataFrame:
    """The channel's id: known ones by name, the others from the URL."""
    return bids.where(
        f"{_CHANNEL_ID} is not null or lower(channel) in ('apple', 'google', 'facebook', 'baidu')"
    ).selectExpr(
        *("auction", "bidder", "price", "channel"),
        "case lower(channel) when 'apple' then '0' when 'google' then '1' when 'facebook' then '2' when 'baidu'"
        f" then '3' else {_CHANNEL_ID} end as channel_id",
    )


def q22(bids: DataFrame) -> DataFrame:
    """The directories of the URL."""
    directories = [f"split(url, '/')[{place}] as dir{i}" for i, place in enumerate((3, 4, 5), 1)]
    return bids.selectExpr("auction", "bidder", "price", "channel", *directories)


QUERIES: dict[str, Query] = {
    "q0": q0,
    "q1": q1,
    "q2": q2,
    "q14": q14,
    "q15": q15,
    "q16": q16,
    "q17": q17,
    "q21": q21,
    "q22": q22,
}
STATELESS = frozenset({"q0", "q1", "q2", "q14", "q21", "q22"})

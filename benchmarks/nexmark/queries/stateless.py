"""Stateless queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.nexmark.queries.query import query
from benchmarks.nexmark.spark import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SIDE_KEYS = 10_000
_BOTH = ("append", "update")
_EUROS = "cast(0.908 * price as decimal(23, 3)) as price"
_CHANNEL_ID = "nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '')"


@query(native=_BOTH, stateless=True)
def q0(events: Streams) -> DataFrame:
    """Pass through."""
    return events.bids.select("auction", "bidder", "price", "dateTime", "extra")


@query(native=_BOTH, stateless=True)
def q1(events: Streams) -> DataFrame:
    """Currency conversion: dollars to euros."""
    return events.bids.selectExpr("auction", "bidder", _EUROS, "dateTime", "extra")


@query(native=_BOTH, stateless=True)
def q2(events: Streams) -> DataFrame:
    """Selection: the bids on every 123rd auction."""
    return events.bids.where("auction % 123 = 0").select("auction", "price")


@query(native=_BOTH, stateless=True)
def q10(events: Streams) -> DataFrame:
    """Log: bids with their day and minute, by which a file sink partitions them (`partitionBy("dt", "hm")`)."""
    day, minute = "date_format(dateTime, 'yyyy-MM-dd') as dt", "date_format(dateTime, 'HH:mm') as hm"
    return events.bids.selectExpr("auction", "bidder", "price", "dateTime", "extra", day, minute)


@query(native=_BOTH, stateless=True)
def q13(events: Streams) -> DataFrame:
    """Enrichment: bids joined with a table of 10,000 rows."""
    from pyspark.sql import functions as f

    side = events.bids.sparkSession.range(SIDE_KEYS).selectExpr("id as key", "concat('value-', id) as value")
    joined = events.bids.join(f.broadcast(side), f.expr(f"auction % {SIDE_KEYS} = key"))
    return joined.select("auction", "bidder", "price", "dateTime", "value")


@query(native=_BOTH, stateless=True)
def q14(events: Streams) -> DataFrame:
    """Calculation: time of day, occurrences of a letter, prices within bounds."""
    return events.bids.where("0.908 * price > 1000000 and 0.908 * price < 50000000").selectExpr(
        *("auction", "bidder", _EUROS),
        "case when hour(dateTime) >= 8 and hour(dateTime) <= 18 then 'dayTime'"
        " when hour(dateTime) <= 6 or hour(dateTime) >= 20 then 'nightTime' else 'otherTime' end as bidTimeType",
        *("dateTime", "extra"),
        "cast(length(extra) - length(replace(extra, 'c', '')) as bigint) as c_counts",
    )


@query(native=_BOTH, stateless=True)
def q21(events: Streams) -> DataFrame:
    """The channel's id: known ones by name, the others from the URL."""
    return events.bids.where(
        f"{_CHANNEL_ID} is not null or lower(channel) in ('apple', 'google', 'facebook', 'baidu')"
    ).selectExpr(
        *("auction", "bidder", "price", "channel"),
        "case lower(channel) when 'apple' then '0' when 'google' then '1' when 'facebook' then '2' when 'baidu'"
        f" then '3' else {_CHANNEL_ID} end as channel_id",
    )


@query(native=_BOTH, stateless=True)
def q22(events: Streams) -> DataFrame:
    """The directories of the URL."""
    directories = [f"split(url, '/')[{place}] as dir{i}" for i, place in enumerate((3, 4, 5), 1)]
    return events.bids.selectExpr("auction", "bidder", "price", "channel", *directories)

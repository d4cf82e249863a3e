"""Joins without a time bound: both sides are kept forever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.nexmark.queries.query import query, sql
from benchmarks.nexmark.spark import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@query(native=("append", "update"))
def q3(events: Streams) -> DataFrame:
    """Local item suggestion: sellers of items in category 10 from three states."""
    return sql(
        events,
        "select p.name, p.city, p.state, a.id from {auctions} a join {persons} p on a.seller = p.id"
        " where a.category = 10 and (p.state = 'OR' or p.state = 'ID' or p.state = 'CA')",
    )


@query(native=("append", "update"))
def q20(events: Streams) -> DataFrame:
    """Expanded bids: joined with their auctions of category 10."""
    return sql(
        events,
        "select auction, bidder, price, channel, url, b.dateTime as bid_dateTime, b.extra as bid_extra, itemName,"
        " description, initialBid, reserve, a.dateTime as auction_dateTime, expires, seller, category,"
        " a.extra as auction_extra from {bids} b join {auctions} a on b.auction = a.id where a.category = 10",
    )


@query(native=("append", "update"))
def q23(events: Streams) -> DataFrame:
    """Bids of users who also sell: joined with the user and each of the user's auctions."""
    return sql(
        events,
        "select bidder, price, channel, url, b.extra as bid_extra, p.id as person_id, name, emailAddress, creditCard,"
        " city, state, p.extra as person_extra, itemName, description, initialBid, reserve,"
        " a.dateTime as auction_dateTime, expires, seller, category, a.extra as auction_extra"
        " from {bids} b join {persons} p on p.id = b.bidder join {auctions} a on a.seller = b.bidder",
    )

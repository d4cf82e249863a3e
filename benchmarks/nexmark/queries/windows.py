"""Queries over event-time windows, which close with the watermark, and one over processing time.

Results contain their window (`endtime`) even where Flink's do not, so that tests can check which windows have closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.nexmark.queries.query import EVERY_MODE, query, sql
from benchmarks.nexmark.spark import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_APPEND = ("append",)
_SESSIONS = ("append", "complete")
_SESSION = "session_window(dateTime, '10 seconds')"


def _most(rows: str, value: str, most: str) -> str:
    """Return SQL for the rows of a list whose value equals `most`, which is evaluated once per list."""
    return f"inline(transform(array({most}), most_ -> filter({rows}, row_ -> row_.{value} = most_))[0])"


def _hot_auctions(events: Streams, kept: str, most: str) -> DataFrame:
    """Find the auctions with the most bids, ties included, in windows of 10 s every 2 s.

    Args:
        events: the streams.
        kept: aggregates to keep per window besides the list `counts`.
        most: expression for the largest number of bids.
    """
    return sql(
        events,
        f"select window.start as starttime, window.end as endtime, {_most('counts', 'num', most)} from ("
        f" select window, {kept}collect_list(struct(auction, num)) as counts from ("
        "  select window, auction, count(*) as num from {bids}"
        "  group by window(dateTime, '10 seconds', '2 seconds'), auction"
        " ) group by window)",
    )


@query(event_time=True, native=_APPEND)
def q5(events: Streams) -> DataFrame:
    """Hot items: the auctions with the most bids in the last 10 s, every 2 s."""
    return _hot_auctions(events, "max(num) as most, ", "most")


@query(event_time=True, native=_APPEND)
def q5_append(events: Streams) -> DataFrame:
    """Hot items, where a window's counts are collected until it closes."""
    return _hot_auctions(events, "", "array_max(counts.num)")


@query(event_time=True, native=_APPEND)
def q7(events: Streams) -> DataFrame:
    """Highest bid of each 10 s. A bid exactly at the end of a window counts for it as well."""
    return sql(
        events,
        "select auction, price, bidder, dateTime, extra, ended + interval 1 microsecond as endtime from {bids} join ("
        " select window_time(window) as ended, most from ("
        "  select window, max(price) as most from {bids} group by window(dateTime, '10 seconds'))"
        ") on price = most and dateTime >= ended - interval 9.999999 seconds"
        " and dateTime <= ended + interval 1 microsecond",
    )


@query(event_time=True, native=EVERY_MODE)
def q7_append(events: Streams) -> DataFrame:
    """Highest bid of each 10 s, where all bids of a window are collected until it closes."""
    return sql(
        events,
        f"select {_most('all', 'price', 'array_max(all.price)')}, window.end as endtime from ("
        " select window, collect_list(struct(auction, price, bidder, dateTime, extra)) as all from {bids}"
        " group by window(dateTime, '10 seconds'))",
    )


@query(event_time=True, native=_SESSIONS)
def q7_session(events: Streams) -> DataFrame:
    """Highest bid of each session of a bidder, where all bids of a session are collected until it closes."""
    return sql(
        events,
        f"select {_most('all', 'price', 'array_max(all.price)')}, session_window.end as endtime from ("
        " select session_window, collect_list(struct(auction, price, bidder, dateTime, extra)) as all from {bids}"
        f" group by bidder, {_SESSION})",
    )


@query(event_time=True, native=_APPEND)
def q8(events: Streams) -> DataFrame:
    """New users: persons who registered and opened an auction within the same 10 s."""
    return sql(
        events,
        "select id, name, p.window.start as starttime, p.window.end as endtime from ("
        " select id, name, window from {persons} group by id, name, window(dateTime, '10 seconds')) p join ("
        " select seller, window from {auctions} group by seller, window(dateTime, '10 seconds')) a"
        " on id = seller and p.window = a.window",
    )


@query(event_time=True, native=_SESSIONS)
def q11(events: Streams) -> DataFrame:
    """User sessions: number of bids of each user before a pause of 10 s."""
    return _sessions(events, "count(*) as bid_count")


@query(event_time=True, native=_SESSIONS)
def q11_median(events: Streams) -> DataFrame:
    """User sessions: median price of each session."""
    return _sessions(events, "median(price) as median_price")


@query(mode="update", native=("update", "complete"), keys=("bidder", "starttime"), determined=("bidder",))
def q12(events: Streams) -> DataFrame:
    """Processing time: number of bids of each user in 10 s by the engine's clock."""
    return sql(
        events,
        "select bidder, count(*) as bid_count, window.start as starttime, window.end as endtime from"
        " (select bidder, current_timestamp() as arrived from {bids}) group by bidder, window(arrived, '10 seconds')",
    )


def _sessions(events: Streams, aggregate: str) -> DataFrame:
    return sql(
        events,
        f"select bidder, {aggregate}, session_window.start as starttime, session_window.end as endtime from {{bids}}"
        f" group by bidder, {_SESSION}",
    )

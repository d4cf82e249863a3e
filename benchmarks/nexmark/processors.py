"""NEXMark's queries q11, q18 and q19 as processors of a user's own (`transformWithState`).

Times are numbers, and columns are read by position. Rows that are read more than once become tuples. A user whose
processor has to be fast does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from benchmarks.nexmark.queries import QUERIES
from benchmarks.nexmark.queries.query import Query, query
from benchmarks.nexmark.spark import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SUFFIX = "-processor"
"""Suffix of these queries' names, after the names of the queries of built-in operators."""

_GAP_MS = 10_000
_TOP = 10
_BID = "price bigint, channel string, url string, at bigint, extra string"
_BID_COLUMNS = ("price", "channel", "url", "unix_millis(dateTime) as at", "extra")
_SHOWN = ("auction", "bidder", "price", "channel", "url", "timestamp_millis(at) as dateTime", "extra")


class Sessions(StatefulProcessor):  # type: ignore[misc]
    """Counts the rows of each session of a key; rows are the key and a time in milliseconds.

    A key's open sessions are a list, which nearly always has one entry. A key has one timer, for the end of its first
    session or earlier. If that session has grown when the timer fires, a new timer is set: few rows set timers.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the sessions."""
        self.handle = handle
        self.open = handle.getListState("open", "starts bigint, ends bigint, count bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Put each row into its session."""
        held = list(self.open.get())
        sessions = _sessions(sorted([time for _, time in rows]))
        if held:
            sessions = _merged(held, sessions)
        self.open.put(sessions)
        if not held or sessions[0][1] < held[0][1]:
            self.handle.registerTimer(sessions[0][1])
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Give out the sessions that have ended."""
        now = timerValues.getCurrentWatermarkInMs()
        left = []
        for session in self.open.get():
            starts, ends, count = session
            if ends > now:
                left.append(session)
            else:
                yield Row(bidder=key[0], bid_count=count, starttime=_time(starts), endtime=_time(ends))
        if left:
            self.open.put(left)
            self.handle.registerTimer(left[0][1])
        else:
            self.open.clear()


Session = tuple[int, int, int]


def _sessions(times: list[int]) -> list[Session]:
    """Return the sessions of times that are in order."""
    sessions = []
    starts = last = times[0]
    count = 0
    for time in times:
        if time > last + _GAP_MS:
            sessions.append((starts, last + _GAP_MS, count))
            starts, count = time, 0
        last = time
        count += 1
    sessions.append((starts, last + _GAP_MS, count))
    return sessions


def _merged(first: list[Session], second: list[Session]) -> list[Session]:
    """Merge two lists of sessions into one, in order."""
    merged: list[Session] = []
    for session in sorted(first + second):
        if merged and session[0] <= merged[-1][1]:
            starts, ends, count = merged[-1]
            merged[-1] = starts, max(ends, session[1]), count + session[2]
        else:
            merged.append(session)
    return merged


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


class Last(StatefulProcessor):  # type: ignore[misc]
    """Keeps the last row of each key: auction, bidder, then `_BID`."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the bid."""
        self.bid = handle.getValueState("bid", _BID)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Keep the last."""
        last = max(rows, key=itemgetter(5))
        held = self.bid.get()
        if held is None or last[5] >= held[3]:
            self.bid.update(last[2:])
            yield last


class Highest(StatefulProcessor):  # type: ignore[misc]
    """Keeps the ten rows of each key with the highest prices: auction, bidder, then `_BID`. Changed rows are output."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the bids."""
        self.top = handle.getListState("top", f"bidder bigint, {_BID}")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Keep the highest."""
        highest = [row[1:] for row in sorted(map(tuple, rows), key=itemgetter(2), reverse=True)[:_TOP]]
        held = list(self.top.get())
        if len(held) == _TOP and highest[0][1] <= held[-1][1]:
            return
        top = sorted(held + highest, key=itemgetter(1), reverse=True)[:_TOP]
        self.top.put(top)
        for rank, bid in enumerate(top, 1):
            if rank > len(held) or bid is not held[rank - 1]:
                yield _RANKED(key[0], *bid, rank)


_RANKED = Row("auction", "bidder", "price", "channel", "url", "at", "extra", "rank_number")


@query(event_time=True)
def q11_processor(events: Streams) -> DataFrame:
    """User sessions, by a processor. The times of events are in order, so that no row is late."""
    times = events.bids.selectExpr("bidder", "unix_millis(dateTime) as at")
    schema = "bidder bigint, bid_count bigint, starttime timestamp, endtime timestamp"
    return times.groupBy("bidder").transformWithState(Sessions(), schema, "append", "eventTime")


@query(mode="update", keys=QUERIES["q18"].keys, determined=QUERIES["q18"].determined)
def q18_processor(events: Streams) -> DataFrame:
    """The last bid of each user on each auction, by a processor."""
    bids = events.bids.selectExpr("auction", "bidder", *_BID_COLUMNS)
    schema = f"auction bigint, bidder bigint, {_BID}"
    return bids.groupBy("bidder", "auction").transformWithState(Last(), schema, "update", "none").selectExpr(*_SHOWN)


@query(mode="update", keys=QUERIES["q19"].keys, determined=QUERIES["q19"].determined)
def q19_processor(events: Streams) -> DataFrame:
    """The ten highest bids on each auction, by a processor."""
    bids = events.bids.selectExpr("auction", "bidder", *_BID_COLUMNS)
    schema = f"auction bigint, bidder bigint, {_BID}, rank_number int"
    top = bids.groupBy("auction").transformWithState(Highest(), schema, "update", "none")
    return top.selectExpr(*_SHOWN, "rank_number")


PROCESSORS: dict[str, Query] = {variant.name: variant for variant in (q11_processor, q18_processor, q19_processor)}


def built_in(tested: Query) -> Query:
    """Return the query of built-in operators with the same rows."""
    return QUERIES[tested.name.removesuffix(SUFFIX)]

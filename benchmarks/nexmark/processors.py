"""NEXMark's queries q11, q18 and q19 as processors of a user's own (`transformWithState`).

They take and give times as numbers, and look at columns by position, of tuples where a row is looked at more than once:
what a user does whose processor has to be fast.
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
"""What the names of these queries have behind those of the built-in ones."""

_GAP_MS = 10_000
_TOP = 10
_BID = "price bigint, channel string, url string, at bigint, extra string"
_BID_COLUMNS = ("price", "channel", "url", "unix_millis(dateTime) as at", "extra")
_SHOWN = ("auction", "bidder", "price", "channel", "url", "timestamp_millis(at) as dateTime", "extra")


class Sessions(StatefulProcessor):  # type: ignore[misc]
    """Counts the rows of each session of a key; rows are the key and a time in milliseconds.

    A key's open sessions are a list, nearly always of one. There is one timer, not later than the first of them ends: a
    session that has grown since is waited for again when it fires, so that a row sets no timer.
    """

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the sessions."""
        self.handle = handle
        self.open = handle.getListState("open", "starts bigint, ends bigint, count bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Put each row into its session."""
        held = list(self.open.get())
        sessions = _sessions(sorted([at for _, at in rows]))
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
    """The sessions of times that are in order."""
    made = []
    starts = last = times[0]
    count = 0
    for time in times:
        if time > last + _GAP_MS:
            made.append((starts, last + _GAP_MS, count))
            starts, count = time, 0
        last = time
        count += 1
    made.append((starts, last + _GAP_MS, count))
    return made


def _merged(some: list[Session], others: list[Session]) -> list[Session]:
    """The sessions that two lists are together, both in order."""
    made: list[Session] = []
    for session in sorted(some + others):
        if made and session[0] <= made[-1][1]:
            starts, ends, count = made[-1]
            made[-1] = starts, max(ends, session[1]), count + session[2]
        else:
            made.append(session)
    return made


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


class Last(StatefulProcessor):  # type: ignore[misc]
    """The last row of each key: auction, bidder, then `_BID`."""

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
    """The ten rows of each key that have the highest price: auction, bidder, then `_BID`. Shows those that changed."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the bids."""
        self.top = handle.getListState("top", f"bidder bigint, {_BID}")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Keep the highest."""
        came = [row[1:] for row in sorted(map(tuple, rows), key=itemgetter(2), reverse=True)[:_TOP]]
        held = list(self.top.get())
        if len(held) == _TOP and came[0][1] <= held[-1][1]:
            return
        top = sorted(held + came, key=itemgetter(1), reverse=True)[:_TOP]
        self.top.put(top)
        for rank, bid in enumerate(top, 1):
            if rank > len(held) or bid is not held[rank - 1]:
                yield _RANKED(key[0], *bid, rank)


_RANKED = Row("auction", "bidder", "price", "channel", "url", "at", "extra", "rank_number")


@query(event_time=True)
def q11_processor(events: Streams) -> DataFrame:
    """User sessions, by a processor. The times of events are in order, so that no row is late."""
    times = events.bids.selectExpr("bidder", "unix_millis(dateTime) as at")
    shape = "bidder bigint, bid_count bigint, starttime timestamp, endtime timestamp"
    return times.groupBy("bidder").transformWithState(Sessions(), shape, "append", "eventTime")


@query(mode="update", keys=QUERIES["q18"].keys, determined=QUERIES["q18"].determined)
def q18_processor(events: Streams) -> DataFrame:
    """The last bid of each user on each auction, by a processor."""
    bids = events.bids.selectExpr("auction", "bidder", *_BID_COLUMNS)
    shape = f"auction bigint, bidder bigint, {_BID}"
    return bids.groupBy("bidder", "auction").transformWithState(Last(), shape, "update", "none").selectExpr(*_SHOWN)


@query(mode="update", keys=QUERIES["q19"].keys, determined=QUERIES["q19"].determined)
def q19_processor(events: Streams) -> DataFrame:
    """The ten highest bids on each auction, by a processor."""
    bids = events.bids.selectExpr("auction", "bidder", *_BID_COLUMNS)
    shape = f"auction bigint, bidder bigint, {_BID}, rank_number int"
    top = bids.groupBy("auction").transformWithState(Highest(), shape, "update", "none")
    return top.selectExpr(*_SHOWN, "rank_number")


PROCESSORS: dict[str, Query] = {one.name: one for one in (q11_processor, q18_processor, q19_processor)}


def built_in(one: Query) -> Query:
    """The query that gives what a query gives, by built-in operators."""
    return QUERIES[one.name.removesuffix(SUFFIX)]

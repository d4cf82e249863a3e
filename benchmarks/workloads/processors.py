"""Processors of a user's own, to measure the cost of `transformWithState` and `applyInPandasWithState`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import millpond

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COUNTED = "key bigint, count bigint"
AHEAD_MS = 100_000
"""Time from a row to its timer."""
PAUSE_MS = 10_000
"""Pause that ends a session."""
ENTRIES = 100
"""Entries of each key's map."""
PIECE = 64
"""Bytes that an entry holds; they are random, so that they cannot be compressed."""


class Counting(StatefulProcessor):  # type: ignore[misc]
    """Counts the rows of each key so far, row by row."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the count."""
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Count rows."""
        held = self.count.get()
        count = (held[0] if held else 0) + sum(1 for _ in rows)
        self.count.update((count,))
        yield Row(key=key[0], count=count)


class CountingFrames(Counting):
    """Counts the rows of each key so far, frame by frame; if `silent`, it gives no rows out."""

    def __init__(self, *, silent: bool) -> None:
        self.silent = silent

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Count rows."""
        import pandas as pd

        held = self.count.get()
        count = (held[0] if held else 0) + sum(len(frame) for frame in rows)
        self.count.update((count,))
        if not self.silent:
            yield pd.DataFrame({"key": key, "count": [count]})


class Reminding(StatefulProcessor):  # type: ignore[misc]
    """Sets a timer for each row of a key, and reports the timer when it is due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Keep the handle."""
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Set timers."""
        for row in rows:
            self.handle.registerTimer(int(row.time.timestamp() * 1000) + AHEAD_MS)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Report the timer."""
        yield Row(key=key[0], count=expiredTimerInfo.getExpiryTimeInMs())


class Waiting(StatefulProcessor):  # type: ignore[misc]
    """Keeps one timer for each key: the first for the time in the key's row, each next one a round later."""

    def __init__(self, round_ms: int) -> None:
        self.round_ms = round_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Keep the handle."""
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Set the first timer."""
        for row in rows:
            if row.due is not None:
                self.handle.registerTimer(row.due)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Report the timer, and set the next one."""
        due = expiredTimerInfo.getExpiryTimeInMs()
        self.handle.registerTimer(due + self.round_ms)
        yield Row(key=key[0], count=due)


class Looking(StatefulProcessor):  # type: ignore[misc]
    """Keeps a map for each key. The key's first row fills it, and each later row reads an entry."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the map."""
        self.entries = handle.getMapState("entries", "at int", "n bigint, piece binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fill the map, or look entries up."""
        for row in rows:
            if row.first:
                pieces = Random(row.key)
                for place in range(ENTRIES):
                    self.entries.updateValue((place,), (row.key * ENTRIES + place, pieces.randbytes(PIECE)))
            else:
                yield Row(key=row.key, count=self.entries.getValue((row.at,)).n)


class LookingAhead(millpond.AsyncStatefulProcessor):
    """Does the same as `Looking`, asynchronously: while a row waits for its entry, other rows ask for theirs."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the map."""
        self.entries = handle.getMapState("entries", "at int", "n bigint, piece binary")

    async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> AsyncIterator[Any]:
        """Fill the map, or look an entry up."""
        if row.first:
            pieces = Random(row.key)
            for place in range(ENTRIES):
                await self.entries.updateValue((place,), (row.key * ENTRIES + place, pieces.randbytes(PIECE)))
        else:
            entry = await self.entries.getValue((row.at,))
            yield Row(key=row.key, count=entry.n)


def counting(source: DataFrame) -> DataFrame:
    """Return counts by rows."""
    return source.groupBy("key").transformWithState(Counting(), COUNTED, "update", "none")


def counting_frames(source: DataFrame, *, silent: bool = False) -> DataFrame:
    """Return counts by pandas frames."""
    processor = CountingFrames(silent=silent)
    return source.groupBy("key").transformWithStateInPandas(processor, COUNTED, "update", "none")


def reminding(source: DataFrame) -> DataFrame:
    """Return event-time timers, one for each row."""
    return source.groupBy("key").transformWithState(Reminding(), COUNTED, "update", "eventTime")


def session(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """Count the events of each user's session, and yield the count when the session has timed out."""
    import pandas as pd

    if state.hasTimedOut:
        (count,) = state.get
        state.remove()
        yield pd.DataFrame({"key": [key[0]], "count": [count]})
        return
    count, last = (state.getOption or (0,))[0], 0
    for frame in frames:
        count += len(frame)
        last = max(last, int(frame["time"].max().timestamp() * 1000))
    state.update((count,))
    state.setTimeoutTimestamp(max(last, state.getCurrentWatermarkMs()) + PAUSE_MS)


def session_counts(source: DataFrame) -> DataFrame:
    """Return sessions by `applyInPandasWithState`."""
    return source.groupBy("key").applyInPandasWithState(session, COUNTED, "n bigint", "append", "EventTimeTimeout")


def waiting(source: DataFrame, *, keys: int) -> DataFrame:
    """Return event-time timers, one for each key. One is due in each millisecond, round after round."""
    return source.groupBy("key").transformWithState(Waiting(keys), COUNTED, "update", "eventTime")


def looking(source: DataFrame) -> DataFrame:
    """Return entries of maps."""
    return source.groupBy("key").transformWithState(Looking(), COUNTED, "update", "none")


def looking_ahead(source: DataFrame) -> DataFrame:
    """Return entries of maps, read asynchronously."""
    return source.groupBy("key").transformWithState(LookingAhead(), COUNTED, "update", "none")

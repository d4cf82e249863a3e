"""Processors of a user's own: what `transformWithState` and `applyInPandasWithState` cost."""

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
"""How far ahead timers are set."""
PAUSE_MS = 10_000
"""How long a user pauses at the end of a session."""
ENTRIES = 100
"""Entries of each key's map."""
PIECE = 64
"""Bytes that an entry holds, which cannot be made shorter."""


class Counting(StatefulProcessor):  # type: ignore[misc]
    """How often each key came so far, row by row."""

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
    """The same of pandas frames; `silent`: nothing comes out."""

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
    """Set a timer for each key that comes, some time ahead, and report when it is due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Keep the handle."""
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Set timers."""
        for row in rows:
            self.handle.registerTimer(int(row.time.timestamp() * 1000) + AHEAD_MS)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Tell that one was due."""
        yield Row(key=key[0], count=expiredTimerInfo.getExpiryTimeInMs())


class Waiting(StatefulProcessor):  # type: ignore[misc]
    """Has a timer for each key at all times: the first at the time that its row brings, the next a round later."""

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
        """Tell that one was due, and set the next."""
        due = expiredTimerInfo.getExpiryTimeInMs()
        self.handle.registerTimer(due + self.round_ms)
        yield Row(key=key[0], count=due)


class Looking(StatefulProcessor):  # type: ignore[misc]
    """Has a map for each key, which its first row fills, and gives out the entry that each later row asks for."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the map."""
        self.entries = handle.getMapState("entries", "at int", "n bigint, piece binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        """Fill the map, or look entries up."""
        for row in rows:
            if row.first:
                pieces = Random(row.key)
                for at in range(ENTRIES):
                    self.entries.updateValue((at,), (row.key * ENTRIES + at, pieces.randbytes(PIECE)))
            else:
                yield Row(key=row.key, count=self.entries.getValue((row.at,)).n)


class LookingAhead(millpond.AsyncStatefulProcessor):
    """The same, asynchronously: while one row waits for its entry, others ask for theirs."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Ask for the map."""
        self.entries = handle.getMapState("entries", "at int", "n bigint, piece binary")

    async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> AsyncIterator[Any]:
        """Fill the map, or look an entry up."""
        if row.first:
            pieces = Random(row.key)
            for at in range(ENTRIES):
                await self.entries.updateValue((at,), (row.key * ENTRIES + at, pieces.randbytes(PIECE)))
        else:
            entry = await self.entries.getValue((row.at,))
            yield Row(key=row.key, count=entry.n)


def counting(source: DataFrame) -> DataFrame:
    """Counts by rows."""
    return source.groupBy("key").transformWithState(Counting(), COUNTED, "update", "none")


def counting_frames(source: DataFrame, *, silent: bool = False) -> DataFrame:
    """Counts by pandas frames."""
    processor = CountingFrames(silent=silent)
    return source.groupBy("key").transformWithStateInPandas(processor, COUNTED, "update", "none")


def reminding(source: DataFrame) -> DataFrame:
    """Timers of event time, one for each row."""
    return source.groupBy("key").transformWithState(Reminding(), COUNTED, "update", "eventTime")


def session(key: Any, frames: Any, state: Any) -> Iterator[Any]:
    """How many events each user's session has so far, and has had once no more come for a while."""
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
    """Sessions by `applyInPandasWithState`."""
    return source.groupBy("key").applyInPandasWithState(session, COUNTED, "n bigint", "append", "EventTimeTimeout")


def waiting(source: DataFrame, *, keys: int) -> DataFrame:
    """Timers of event time, one for each key; one in a millisecond is due, and again when all others were."""
    return source.groupBy("key").transformWithState(Waiting(keys), COUNTED, "update", "eventTime")


def looking(source: DataFrame) -> DataFrame:
    """Entries of maps."""
    return source.groupBy("key").transformWithState(Looking(), COUNTED, "update", "none")


def looking_ahead(source: DataFrame) -> DataFrame:
    """Entries of maps, asynchronously."""
    return source.groupBy("key").transformWithState(LookingAhead(), COUNTED, "update", "none")

"""Processors that are tested without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle


class Count(StatefulProcessor):
    """Counts rows; an initial state says what it begins with."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield Row(k=key[0], n=self.more(sum(1 for _ in rows)))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.more(initialState.first)

    def more(self, by: int) -> int:
        held = self.count.get()
        self.count.update(((held[0] if held else 0) + by,))
        return int(self.count.get()[0])


class CountFrames(Count):
    """The same by frames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield pd.DataFrame({"k": key, "n": [self.more(sum(len(frame) for frame in rows))]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.more(int(initialState["first"].sum()))


class Highest(StatefulProcessor):
    """Shows each new maximum; null forgets it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.best = handle.getValueState("best", "v bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            if row.v is None:
                self.best.clear()
            elif not self.best.exists() or row.v > self.best.get()[0]:
                self.best.update((row.v,))
                yield Row(k=key[0], n=row.v)


class Recent(StatefulProcessor):
    """Keeps the last three values in a list."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.last = handle.getListState("last", "v bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.last.appendValue((row.v,))
        kept = [one[0] for one in self.last.get()][-3:]
        self.last.put([(one,) for one in kept])
        yield Row(k=key[0], n=sum(kept))


class Appending(StatefulProcessor):
    """Appends all values of a batch at once; a negative one clears the list."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.all = handle.getListState("all", "v bigint, s string")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        came = [row.v for row in rows]
        if min(came) < 0:
            self.all.clear()
        else:
            self.all.appendList([(v, str(v)) for v in came])
        yield Row(k=key[0], n=len(list(self.all.get())))


class Tally(StatefulProcessor):
    """Counts values in a map, and forgets one at its third time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.counts = handle.getMapState("counts", "v bigint", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            held = self.counts.getValue((row.v,)) if self.counts.containsKey((row.v,)) else (0,)
            if held[0] == 2:
                self.counts.removeKey((row.v,))
            else:
                self.counts.updateValue((row.v,), (held[0] + 1,))
        for (at,) in sorted(map(tuple, self.counts.keys())):
            yield Row(k=key[0], n=10 * at + self.counts.getValue((at,))[0])


class Sums(StatefulProcessor):
    """Shows what a map's iterator and values give, and clears it when it is large."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getMapState("seen", "v bigint", "n bigint")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.seen.updateValue((row.v,), (row.v * row.v,))
        yield Row(k=key[0], n=sum(one[0] for one in self.seen.values()))
        yield Row(k=key[0], n=sum(at[0] - one[0] for at, one in self.seen.iterator()))
        if len(list(self.seen.keys())) > 2:
            self.seen.clear()
        yield Row(k=key[0], n=int(self.seen.exists()))


class Upper(StatefulProcessor):
    """Has no state."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return (Row(k=key[0].upper(), n=-row.v) for row in rows)


class Pausing(StatefulProcessor):
    """Count until a key has had no row for ten seconds, by a timer that is reset."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint")

    def now(self, row: Any, times: Any) -> int:
        return int(times.getCurrentProcessingTimeInMs())

    def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            for at in list(self.handle.listTimers()):
                self.handle.deleteTimer(at)
            self.count.update(((self.count.get() or (0,))[0] + 1,))
            self.handle.registerTimer(self.now(row, timerValues) + 10_000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(k=key[0], n=100_000 * self.count.get()[0] + expiredTimerInfo.getExpiryTimeInMs())
        self.count.clear()


class Sessions(Pausing):
    """The same by event time, in seconds."""

    def now(self, row: Any, times: Any) -> int:
        return int(row.v * 1000)


class PausingFrames(Pausing):
    """The same by frames."""

    def handleInputRows(self, key: Any, rows: Iterable[Any], timerValues: Any) -> Iterator[Any]:
        each = [row for frame in rows for row in frame.itertuples()]
        super().handleInputRows(key, each, timerValues)
        yield pd.DataFrame({"k": [key[0]], "n": [len(each)]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        for row in super().handleExpiredTimer(key, timerValues, expiredTimerInfo):
            yield pd.DataFrame([row.asDict()])


class Several(StatefulProcessor):
    """Set a timer for each value, and report the values that are left when one is due."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.handle.registerTimer(row.v)
        yield Row(k=key[0], n=timerValues.getCurrentProcessingTimeInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(k=key[0], n=1000 * expiredTimerInfo.getExpiryTimeInMs() + sum(1 for _ in self.handle.listTimers()))

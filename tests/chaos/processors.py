"""Processors for schedules of crashes: they keep something of every kind, and tell all that they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

TEXT = "a text that fills some pages of a table, "


class Keeping(StatefulProcessor):
    """Report each row, and each timer, with all that the key has; the order of a key's rows does not matter.

    Args:
        waits: milliseconds from a row to its timer; no timers if there are none.
        lives: milliseconds that state lives; for ever if there are none.
        pandas: whether it sees frames.
    """

    def __init__(self, waits: int = 0, lives: int = 0, pandas: bool = False) -> None:
        self.waits, self.lives, self.pandas = waits, lives or None, pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "rows bigint, said string", self.lives)
        self.values = handle.getListState("values", "v bigint, s string", self.lives)
        self.texts = handle.getMapState("texts", "s string, even boolean", "n bigint", self.lives)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        return self.given(self.took(key[0], sorted(self.each(rows), key=repr), timerValues))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        return self.given(self.fired(key[0], expiredTimerInfo.getExpiryTimeInMs()))

    def took(self, key: Any, rows: Iterable[tuple[Any, ...]], times: Any) -> Iterator[tuple[Any, ...]]:
        for at, v, s in rows:
            count = (self.total.get() or (0,))[0] + 1
            if v == 0:
                self.total.clear()
            else:
                self.total.update((count, TEXT * (count % 5)))
            if v == 1:
                self.values.clear()
            elif v == 2:
                self.values.put([(v, s)] * 2)
            else:
                self.values.appendValue((v, s and s * 20))
            if v == 3:
                self.texts.removeKey((s, True))
            elif v == 4:
                self.texts.clear()
            else:
                self.texts.updateValue((s, v is not None and v % 2 == 0), (count,))
            if self.waits:
                now = times.getCurrentProcessingTimeInMs() if self.lives else at
                self.handle.registerTimer(now + self.waits + (v or 0))
                if v == 5:
                    self.handle.deleteTimer(now + self.waits + 2)
            yield key, at, self.told()

    def fired(self, key: Any, at: int) -> Iterator[tuple[Any, ...]]:
        yield key, -at, self.told()
        self.values.appendValue((at, "fired"))
        if at % 3:
            self.handle.registerTimer(at + self.waits)
        else:
            self.total.clear()

    def told(self) -> str:
        timers = sorted(self.handle.listTimers()) if self.waits else []
        total = self.total.get()
        known = total and (total[0], len(total[1]))
        return repr((known, list(self.values.get()), list(self.texts.iterator()), timers))

    def each(self, rows: Iterator[Any]) -> Iterator[tuple[Any, ...]]:
        """Each row's event time in milliseconds, number and text."""
        if not self.pandas:
            return ((row.ms, row.v, row.s) for row in rows)
        both = (row for frame in rows for row in frame.itertuples(index=False))
        return ((int(row.ms), None if row.v != row.v or row.v is None else int(row.v), row.s) for row in both)

    def given(self, answers: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        if not self.pandas:
            return (Row(k=key, at=at, said=said) for key, at, said in answers)
        import pandas as pd

        return (pd.DataFrame([answer], columns=["k", "at", "said"]) for answer in answers)

"""Processors that do the same, synchronously and asynchronously: what the text of each row says.

Spark's workers import this module: it needs no pytest and no session.
"""

from __future__ import annotations

import ast
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

import millpond

OPERATIONS: dict[str, Any] = {
    "get": lambda p: p.value.get(),
    "update": lambda p, n: p.value.update((n,)),
    "append": lambda p, n: p.list.appendValue((n,)),
    "put": lambda p, n: p.list.put([(n,), (n + 1,)]),
    "extend": lambda p, n: p.list.appendList([(n,)]),
    "list": lambda p: p.list.get(),
    "set": lambda p, k, n: p.map.updateValue((k,), (n,)),
    "at": lambda p, k: p.map.getValue((k,)),
    "has": lambda p, k: p.map.containsKey((k,)),
    "remove": lambda p, k: p.map.removeKey((k,)),
    "entries": lambda p: p.map.iterator(),
    "keys": lambda p: p.map.keys(),
    "values": lambda p: p.map.values(),
    "exists": lambda p, name: getattr(p, name).exists(),
    "clear": lambda p, name: getattr(p, name).clear(),
    "timer": lambda p, n: p.handle.registerTimer(p.start + n * p.unit),
    "no timer": lambda p, n: p.handle.deleteTimer(p.start + n * p.unit),
    "timers": lambda p: p.handle.listTimers(),
}
SEVERAL = {"list", "entries", "keys", "values", "timers"}

COLUMNS = "k string, n bigint, do string"
SHOWN = "k string, n bigint, said string"


class Waits:
    """The keys under way, and their largest number; `begin` and `end` are called for each key."""

    def __init__(self) -> None:
        self.under_way: set[Any] = set()
        self.most = 0
        self.log: list[Any] = []

    def begin(self, key: Any, at: int) -> None:
        assert key not in self.under_way
        self.log.append((key, at))
        self.under_way.add(key)
        self.most = max(self.most, len(self.under_way))

    def end(self, key: Any) -> None:
        self.under_way.remove(key)


waits = Waits()


class Twin:
    """The base class of both.

    Args:
        ttl: how long state lives. due: what timers do. start, unit: by which times are shown, in milliseconds.
    """

    pandas = False
    ddl = SHOWN

    def __init__(self, ttl: int = 0, due: Any = (), start: int = 0, unit: int = 1) -> None:
        self.ttl, self.due, self.start, self.unit = ttl, due, start, unit

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n bigint", self.ttl)
        self.list = handle.getListState("list", "n bigint", self.ttl)
        self.map = handle.getMapState("map", "k string", "n bigint", self.ttl)

    def each(self, rows: Iterable[Any]) -> list[Any]:
        if self.pandas:
            rows = (row for frame in rows for row in frame.itertuples(index=False))
        return sorted(rows, key=lambda row: row.n)

    def shown(self, rows: list[Any]) -> Iterator[Any]:
        if not self.pandas:
            yield from (Row(k=k, n=n, said=said) for k, n, said in rows)
        elif rows:
            import pandas as pd

            yield pd.DataFrame(rows, columns=["k", "n", "said"])

    def close(self) -> None:
        pass


class Sync(Twin, StatefulProcessor):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in self.each(rows):
            yield from self.record(key[0], row.n, ast.literal_eval(row.do))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = (expiredTimerInfo.getExpiryTimeInMs() - self.start) // self.unit
        yield from self.record(key[0], -1 - at, self.due)

    def record(self, key: Any, at: int, program: Any) -> Iterator[Any]:
        for one in program:
            if one[0] == "say":
                yield from self.shown([(key, at, str(n)) for n in range(one[1])])
            else:
                yield from self.shown([(key, at, repr(self.done(one)))])

    def done(self, one: Any) -> Any:
        if one[0] == "gather":
            return [self.done(inner) for inner in one[1]]
        value = OPERATIONS[one[0]](self, *one[1:])
        return sorted(value) if one[0] == "timers" else list(value) if one[0] in SEVERAL else value


class Async(Twin, millpond.AsyncStatefulProcessor):
    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Any]:
        for row in self.each(rows):
            async for shown in self.record(key[0], row.n, ast.literal_eval(row.do)):
                yield shown

    async def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> AsyncIterator[Any]:
        at = (expiredTimerInfo.getExpiryTimeInMs() - self.start) // self.unit
        async for shown in self.record(key[0], -1 - at, self.due):
            yield shown

    async def record(self, key: Any, at: int, program: Any) -> AsyncIterator[Any]:
        waits.begin(key, at)
        for one in program:
            if one[0] == "say":
                for shown in self.shown([(key, at, str(n)) for n in range(one[1])]):
                    yield shown
            else:
                for shown in self.shown([(key, at, repr(await self.done(one)))]):
                    yield shown
        waits.end(key)

    async def done(self, one: Any) -> Any:
        if one[0] == "gather":
            values = await millpond.gather(*(OPERATIONS[inner[0]](self, *inner[1:]) for inner in one[1]))
            return [sorted(v) if inner[0] == "timers" else v for v, inner in zip(values, one[1], strict=True)]
        value = OPERATIONS[one[0]](self, *one[1:])
        if one[0] == "timers":
            return sorted(await value)
        if one[0] in SEVERAL and len(waits.log) % 2:  # now and then
            return [part async for part in value]
        return await value


class Single(Async):
    """The same, row by row."""

    handleInputRows = millpond.AsyncStatefulProcessor.handleInputRows

    async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> AsyncIterator[Any]:
        async for shown in self.record(key[0], row.n, ast.literal_eval(row.do)):
            yield shown

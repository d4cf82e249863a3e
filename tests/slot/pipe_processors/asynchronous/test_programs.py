"""Random programs: asynchronous and synchronous, with state that is there or not, give the same."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

import millpond
from tests.slot.pipe_processors.asynchronous.lacking import Far, Waits, make_far
from tests.slot.pipe_processors.mini_slot import MiniSlot, user_processor

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
    "timer": lambda p, n: p.handle.registerTimer(n),
    "no timer": lambda p, n: p.handle.deleteTimer(n),
    "timers": lambda p: p.handle.listTimers(),
}
SEVERAL = {"list", "entries", "keys", "values", "timers"}

number, name = st.integers(0, 5), st.sampled_from(["value", "list", "map"])
word = st.sampled_from("xyz")
read = st.one_of(
    st.tuples(st.sampled_from(["get", "list", "entries", "keys", "values", "timers"])),
    st.tuples(st.sampled_from(["at", "has"]), word),
    st.tuples(st.just("exists"), name),
)
operation = st.one_of(
    read,
    st.tuples(st.sampled_from(["update", "append", "put", "extend"]), number),
    st.tuples(st.just("set"), word, number),
    st.tuples(st.just("remove"), word),
    st.tuples(st.just("clear"), name),
    st.tuples(st.sampled_from(["timer", "no timer"]), st.integers(0, 30)),
    st.tuples(st.just("gather"), st.lists(read, max_size=4)),
    st.tuples(st.just("say"), number),
)
batches = st.lists(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.lists(operation, max_size=4)), max_size=16),
    min_size=1,
    max_size=4,
)

programs: list[Any] = []
log: list[Any] = []
waits = Waits()


def declare(self: Any, handle: Any) -> None:
    self.handle = handle
    self.value = handle.getValueState("value", "n bigint", self.ttl)
    self.list = handle.getListState("list", "n bigint", self.ttl)
    self.map = handle.getMapState("map", "k string", "n bigint", self.ttl)


class Sync(StatefulProcessor):
    def __init__(self, ttl: int) -> None:
        self.ttl = ttl

    def init(self, handle: Any) -> None:
        declare(self, handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            for one in programs[row.v]:
                yield from self.act(key, row.v, one)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        time = expiredTimerInfo.getExpiryTimeInMs()
        for one in programs[time % len(programs)]:
            yield from self.act(key, -time, one)

    def close(self) -> None:
        pass

    def act(self, key: Any, at: int, one: Any) -> Iterator[Row]:
        what, *arguments = one
        if what == "say":
            yield from (Row(k=key[0], n=at, said=str(n)) for n in range(arguments[0]))
        else:
            yield Row(k=key[0], n=at, said=repr(self.done(one)))

    def done(self, one: Any) -> Any:
        if one[0] == "gather":
            return [self.done(inner) for inner in one[1]]
        value = OPERATIONS[one[0]](self, *one[1:])
        return list(value) if one[0] in SEVERAL else value


class Async(millpond.AsyncStatefulProcessor):
    def __init__(self, ttl: int) -> None:
        self.ttl = ttl

    def init(self, handle: Any) -> None:
        declare(self, handle)

    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
        for row in rows:
            async for shown in self.record(key, row.v, programs[row.v]):
                yield shown

    async def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> AsyncIterator[Row]:
        time = expiredTimerInfo.getExpiryTimeInMs()
        async for shown in self.record(key, -time, programs[time % len(programs)]):
            yield shown

    async def record(self, key: Any, at: int, program: Any) -> AsyncIterator[Row]:
        waits.begin(key[0])
        log.append((key[0], at))
        for one in program:
            what, *arguments = one
            if what == "say":
                for n in range(arguments[0]):
                    yield Row(k=key[0], n=at, said=str(n))
            else:
                yield Row(k=key[0], n=at, said=repr(await self.done(one)))
        waits.end(key[0])

    async def done(self, one: Any) -> Any:
        if one[0] == "gather":
            return await millpond.gather(*(OPERATIONS[inner[0]](self, *inner[1:]) for inner in one[1]))
        value = OPERATIONS[one[0]](self, *one[1:])
        if one[0] in SEVERAL and waits.most % 2:  # now and then
            return [part async for part in value]
        return await value


class Single(Async):
    """The same, row by row."""

    handleInputRows = millpond.AsyncStatefulProcessor.handleInputRows

    async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> AsyncIterator[Row]:
        async for shown in self.record(key, row.v, programs[row.v]):
            yield shown


@pytest.mark.filterwarnings("error")
@settings(max_examples=200, deadline=None)
@given(
    program=batches,
    seed=st.integers(0, 1000),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    limit=st.integers(1, 9),
    together=st.integers(1, 9),
    piece=st.sampled_from([1, 3, 10_000]),
    ttl=st.sampled_from([0, 15]),
    kind=st.sampled_from([Async, Single]),
)
def test_any_program(
    program: Any, seed: int, share: float, limit: int, together: int, piece: int, ttl: int, kind: Any
) -> None:
    programs[:] = [do for batch in program for _, do in batch] or [[]]
    log.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millpond.slot.pipe.processors.rows.TOGETHER", piece)
        patch.setattr("millpond.slot.pipe.processors.rows.RowResults.look", piece)
        shape: Any = {"shown": "k string, n bigint, said string", "mode": "processing"}
        sync = MiniSlot(user_processor(Sync(ttl), **shape), together=together)
        synchronous = [list(shown) for shown in _batches(sync, program)]
        far = make_far(patch, Far(random.Random(seed), share, whole=False))
        slot = MiniSlot(user_processor(kind(ttl), in_flight=limit, **shape), together=together)
        waits.most = 0
        for (number, batch), expected in zip(enumerate(program), synchronous, strict=True):
            log.clear()
            first = sum(len(one) for one in program[:number])
            rows = [(key, first + at) for at, (key, _) in enumerate(batch)]
            assert slot.batch(rows, processing=number * 10) == expected
            assert not waits.under_way
            for key in {key for key, _ in rows}:  # in the order in which they came, then the timers
                mine = [at for other, at in log if other == key]
                given_ = [at for other, at in rows if other == key]
                assert mine[: len(given_)] == given_
                assert mine[len(given_) :] == sorted(mine[len(given_) :], reverse=True)
        assert waits.most <= limit
        assert share or not far.fetches
        for table in slot.types:
            assert _listed(slot, table) == _listed(sync, table)
        assert slot.expiries == sync.expiries


def _batches(slot: MiniSlot, program: Any) -> Iterator[list[Any]]:
    first = 0
    for number, batch in enumerate(program):
        yield slot.batch([(key, first + at) for at, (key, _) in enumerate(batch)], processing=number * 10)
        first += len(batch)


def _listed(slot: MiniSlot, table: str) -> dict[Any, pa.Array]:
    return {key: value.to_pylist() for key, value in slot.state[table].items()}

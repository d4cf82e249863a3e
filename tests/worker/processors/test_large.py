"""Large maps and lists: only parts of them are asked for and written."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import Row

from millpond.spec.types import parse_type
from millpond.worker.processors.state import columns
from millpond.worker.processors.state.buckets import MAX_ENTRIES
from millpond.worker.processors.state.order import row_bytes
from tests.worker.processors.mini_slot import MiniSlot, Scripted, user_processor

ORDER = row_bytes(parse_type("struct<k:string>"))
MAP, LIST = "parts.m", "parts.l"


class Large:
    """A processor with a map and a list that runs a given step for each key."""

    def __init__(
        self, ttl: int = 0, together: int = 1000, close: Callable[[Any], Any] = lambda processor: None
    ) -> None:
        def init(self: Any, handle: Any) -> None:
            self.map = handle.getMapState("m", "k string", "a bigint", ttl)
            self.list = handle.getListState("l", "a string", ttl)

        def rows(processor: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
            self.told.append(self.step(processor, key[0]))
            yield from ()

        mode: Any = "processing" if ttl else "none"
        self.slot = MiniSlot(user_processor(Scripted(init=init, rows=rows, close=close), mode=mode), together)

    def run(self, step: Callable[[Any, str], Any], *keys: str, now: int = 0) -> list[Any]:
        """Call a step for some keys; what it returned, and in `asks` how often there were asks."""
        self.step, self.told = step, list[Any]()
        before = self.slot.asks
        self.written = {table: dict(parts) for table, parts in self.slot.parts.items()}
        self.slot.batch([(key, 0) for key in keys or ("k",)], now)
        self.asks = self.slot.asks - before
        return self.told

    def changed(self, table: str) -> int:
        """How many parts the last run has written or removed."""
        before, now = self.written[table], self.slot.parts[table]
        return sum(before.get(one) is not now.get(one) for one in before.keys() | now.keys())


def fill(count: int, start: int = 0) -> Callable[[Any, str], None]:
    return lambda self, key: [self.map.updateValue((str(n),), (n,)) for n in range(start, start + count)] and None


@pytest.mark.parametrize("ttl", [0, 10**6])
def test_a_map_grows_and_shrinks(ttl: int) -> None:
    large = Large(ttl)
    chosen = random.Random(ttl)
    model: dict[str, int] = {}

    def step(self: Any, key: str) -> None:
        for _ in range(chosen.choice([1, 30, 300])):
            one = str(chosen.randrange(3000))
            kind = chosen.random()
            if kind < growing:
                self.map.updateValue((one,), (len(model),))
                model[one] = len(model)
            elif kind < 0.9:
                one = chosen.choice([one, *model][:400])
                self.map.removeKey((one,))
                model.pop(one, None)
            else:
                assert self.map.getValue((one,)) == ((model[one],) if one in model else None)
                assert self.map.containsKey((one,)) == (one in model)
                assert self.map.exists() == bool(model)

    for batch in range(200):
        growing = 0.8 if batch < 100 else 0.1
        large.run(step, now=batch)
        if batch % 9 == 0:
            wanted = sorted(model, key=lambda one: ORDER((one,)))
            assert large.run(lambda self, key: list(self.map.keys()), now=batch) == [[(one,) for one in wanted]]
        head = large.slot.heads["variable.m"].get(("k",))
        if head and not ttl:
            assert head["entries"] == len(model)
            assert math.ceil(len(model) / MAX_ENTRIES) <= head["stop"] <= math.ceil(4 * len(model) / MAX_ENTRIES)
            assert len(large.slot.parts[MAP]) <= head["stop"]
        if batch == 99:
            assert head
            assert 1200 / MAX_ENTRIES < head["stop"] < 3000 / MAX_ENTRIES * 4.1
    while model:
        some = list(model)[:37]
        large.run(lambda self, key: [self.map.removeKey((one,)) for one in some], now=200)  # noqa: B023
        for one in some:
            del model[one]
    assert not large.slot.parts[MAP]
    assert not large.slot.heads["variable.m"]
    assert not large.slot.of("variable.m")


def test_only_what_is_used_is_asked_for_and_written() -> None:
    large = Large()
    large.run(fill(10_000))
    stop = large.slot.heads["variable.m"][("k",)]["stop"]
    assert stop >= 10_000 / MAX_ENTRIES
    assert large.run(lambda self, key: self.map.getValue(("77",))) == [(77,)]
    assert (large.asks, large.changed(MAP)) == (1, 0)
    large.run(lambda self, key: [self.map.updateValue(("77",), (1,)), self.map.removeKey(("78",))])
    assert large.asks == 1  # when the call is over
    assert large.changed(MAP) <= 2
    told = large.run(lambda self, key: [self.map.getValue((str(n),))[0] for n in range(2, 10_000, 7)])
    assert told == [[*range(2, 10_000, 7)]]
    assert large.asks < 20  # the more were asked for, the more are fetched at once
    large.run(fill(64, 10_000))
    assert large.asks <= 2
    assert large.changed(MAP) < 70
    large.run(lambda self, key: (self.map.updateValue(("a",), (1,)), self.map.getValue(("a",)), self.map.exists()))
    assert large.asks == 1
    large.run(lambda self, key: self.map.clear())
    assert large.asks == 0
    assert not large.slot.parts[MAP]


@pytest.mark.parametrize("ttl", [0, 10**6])
def test_maps_that_change_too_much_for_one_table(monkeypatch: pytest.MonkeyPatch, ttl: int) -> None:
    """The writes of a call are sent in several tables, as complete as in one."""
    monkeypatch.setattr(columns, "_MAX_COLUMN_BYTES", 6000)
    large = Large(ttl)
    keys = [f"k{n}" for n in range(20)]

    def told() -> list[dict[str, int]]:
        return large.run(lambda self, key: {k: n for (k,), (n,) in self.map.iterator()}, *keys)

    large.run(fill(200), *keys)
    assert told() == [{str(n): n for n in range(200)}] * 20
    large.run(fill(150, 100), *keys)
    assert told() == [{str(n): n for n in range(250)}] * 20
    large.run(lambda self, key: [self.map.removeKey((str(n),)) for n in range(0, 250, 2)] and None, *keys)
    assert told() == [{str(n): n for n in range(1, 250, 2)}] * 20
    if not ttl:
        assert {head["entries"] for head in large.slot.heads["variable.m"].values()} == {125}


def test_an_iteration_sees_the_map_as_it_was() -> None:
    large = Large()
    large.run(fill(5000))

    def step(self: Any, key: str) -> Any:
        self.map.updateValue(("new",), (1,))
        self.map.removeKey(("7",))
        self.map.updateValue(("8",), (-8,))
        told = self.map.iterator()
        first = next(told)
        self.map.clear()
        assert list(self.map.keys()) == []
        self.map.updateValue(("later",), (1,))
        return [first, *told]

    (seen,) = large.run(step)
    wanted = {str(n): n for n in range(5000)} | {"new": 1, "8": -8}
    del wanted["7"]
    assert seen == [((one,), (wanted[one],)) for one in sorted(wanted, key=lambda one: ORDER((one,)))]
    assert large.slot.of("variable.m") == {("k",): [{"key": {"k": "later"}, "value": {"a": 1}}]}
    assert not large.slot.parts[MAP]


def test_what_is_asked_for_often_is_fetched_along() -> None:
    large = Large()
    keys = [f"k{n}" for n in range(300)]
    large.run(fill(200), *keys)
    assert large.run(lambda self, key: self.map.getValue(("77",)), *keys) == [(77,)] * 300
    assert large.asks < 10
    large.run(lambda self, key: self.list.put([(key,)] * 300), *keys)
    told = large.run(lambda self, key: list(self.list.get()), *keys)
    assert told == [[(key,)] * 300 for key in keys]
    assert large.asks < 40


def test_nothing_is_fetched_along_that_is_rarely_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key asks for one of 40 entries, all in parts of their own: it would use one of 40 that are fetched for it.

    Once most keys ask for the same entry, it is fetched along again.
    """
    for module in ("buckets", "maps"):
        monkeypatch.setattr(f"millpond.worker.processors.state.{module}.MAX_ENTRIES", 1)
    large = Large()
    keys = [f"k{n}" for n in range(600)]
    large.run(fill(64), *keys)
    chosen = random.Random(1)
    wanted = {key: chosen.randrange(40) for key in keys}
    for _ in range(3):
        before = large.slot.asked_parts
        told = large.run(lambda self, key: self.map.getValue((str(wanted[key]),)), *keys)
        assert told == [(wanted[key],) for key in keys]
        assert large.slot.asked_parts - before < 1200
    assert large.run(lambda self, key: self.map.getValue(("50",)), *keys) == [(50,)] * 600
    assert large.asks < 20


def test_many_keys_are_fetched_with_one_message() -> None:
    large = Large()
    keys = [f"k{n}" for n in range(30)]

    def step(self: Any, key: str) -> Any:
        if key == "k0":
            self.map.fetch([(at, ("5",)) for at in range(30)] + [(0, ("6",))])
            self.list.fetch([(at, None) for at in range(30)])
        assert not self.map.lacks(int(key[1:]), ("5",))
        assert not self.list.lacks(int(key[1:]), None)
        return self.map.getValue(("5",)), len(list(self.list.get()))

    large.run(lambda self, key: (fill(200)(self, key), self.list.put([(key,)] * 300)), *keys)
    assert large.run(step, *keys) == [((5,), 300)] * 30
    assert large.asks == 2


def test_a_list_is_appended_to_and_not_written_again() -> None:
    large = Large()
    wanted: list[tuple[str]] = []
    for batch in range(40):
        more = [(f"{batch} {n}",) for n in range(50)]
        large.run(lambda self, key: self.list.appendList(more))  # noqa: B023
        assert large.asks == 0
        assert large.changed(LIST) <= 1
        wanted += more
    assert len(large.slot.parts[LIST]) > 5
    assert large.run(lambda self, key: (list(self.list.get()), self.list.exists())) == [(wanted, True)]
    large.run(lambda self, key: self.list.put(["x"]))
    assert not large.slot.parts[LIST]
    assert large.slot.of("variable.l") == {("k",): [{"a": "x"}]}
    large.run(lambda self, key: self.list.put([("y" * 9000,), ("z",)]))
    assert len(large.slot.parts[LIST]) == 1
    large.run(lambda self, key: self.list.clear())
    assert not large.slot.parts[LIST]
    assert not large.slot.of("variable.l")


def test_a_long_list_is_streamed() -> None:
    large = Large()
    wanted = [(f"{n} " * 300,) for n in range(10_000)]
    large.run(lambda self, key: self.list.put(wanted))

    def step(self: Any, key: str) -> Any:
        told = self.list.get()
        assert next(told) == wanted[0]
        assert large.slot.asks - before == 1
        self.list.put([("other",)])
        return [wanted[0], *told]

    before = large.slot.asks
    assert large.run(step) == [wanted]
    assert large.asks > 3
    assert large.slot.of("variable.l") == {("k",): [{"a": "other"}]}


def test_a_list_is_not_read_when_its_call_is_over() -> None:
    large = Large(together=1)
    large.run(lambda self, key: self.list.put([("x" * 500,)] * 5000), "a", "b")
    kept = []

    def step(self: Any, key: str) -> None:
        if key == "a":
            kept.append(self.list.get())
            next(kept[0])
        else:
            list(kept[0])

    with pytest.raises(PySparkRuntimeError, match="getting list state"):
        large.run(step, "a", "b")


def test_a_list_is_not_read_when_all_calls_are_over() -> None:
    kept: list[Iterator[Any]] = []
    large = Large(close=lambda processor: [list(one) for one in kept])
    large.run(lambda self, key: self.list.put([("x" * 500,)] * 5000))

    def step(self: Any, key: str) -> None:
        kept.append(self.list.get())
        next(kept[0])

    with pytest.raises(PySparkRuntimeError, match="getting list state"):
        large.run(step)


def test_elements_and_entries_expire() -> None:
    large = Large(ttl=100)
    for now in range(0, 200, 10):
        large.run(lambda self, key: self.list.appendList([(str(now),)] * 100), now=now)  # noqa: B023
        large.run(fill(100, now), now=now)
    told = large.run(lambda self, key: (list(self.list.get()), list(self.map.keys()), self.list.exists()), now=205)
    alive = [now for now in range(0, 200, 10) if now + 100 > 205]
    assert told[0][0] == [(str(now),) for now in alive for _ in range(100)]
    assert {k for (k,) in told[0][1]} == {str(n) for now in alive for n in range(now, now + 100)}
    told = large.run(lambda self, key: (self.list.exists(), self.map.exists(), list(self.list.get())), now=291)
    assert told == [(False, False, [])]
    large.run(lambda self, key: (self.list.appendValue(("new",)), fill(1)(self, key)), now=291)
    told = large.run(lambda self, key: (list(self.list.get()), list(self.map.keys())), now=295)
    assert told == [([("new",)], [("0",)])]


def test_entries_of_an_earlier_run_live_as_long_as_it_said() -> None:
    """Also those that come into buckets when a run with a shorter time to live adds others."""
    before, after = Large(ttl=1000), Large(ttl=10)
    before.run(fill(60))
    for name in ("state", "heads", "parts", "expiries"):
        setattr(after.slot, name, getattr(before.slot, name))
    after.run(fill(60, 60), now=1)

    def keys(self: Any, key: str) -> list[int]:
        return [int(one) for (one,) in list(self.map.keys())]

    assert sorted(after.run(keys, now=10)[0]) == [*range(120)]
    assert sorted(after.run(keys, now=11)[0]) == [*range(60)]
    after.run(lambda self, key: [self.map.removeKey((str(n),)) for n in range(50)] and None, now=12)  # no buckets now
    after.run(fill(60, 60), now=13)
    assert sorted(after.run(keys, now=999)[0]) == [*range(50, 60)]
    assert after.run(keys, now=1000) == [[]]

"""The controller: who runs when, what is fetched together, and what happens where something goes wrong."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.streaming import StatefulProcessorHandle
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

import millpond
from millpond.errors import UsageError
from millpond.worker.processors.asynchronous.base import check_asynchronous
from millpond.worker.processors.start import start_processor
from tests.worker.processors.asynchronous.lacking import Far, make_far
from tests.worker.processors.mini_slot import MiniSlot, unasked, user_processor

pytestmark = pytest.mark.filterwarnings("error")


class Counting(millpond.AsyncStatefulProcessor):
    said: ClassVar[list[Any]] = []

    def init(self, handle: Any) -> None:
        Counting.said.clear()
        self.handle = handle
        self.count = handle.getValueState("count", "n bigint")
        self.seen = handle.getMapState("seen", "k string", "n bigint")

    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
        for row in rows:
            Counting.said.append(("asks", key[0]))
            held = await self.count.get()
            Counting.said.append(("has", key[0]))
            total = (held[0] if held else 0) + row.v
            await self.count.update((total,))
            yield Row(k=key[0], n=total)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    return make_far(monkeypatch, Far(random.Random(0)))


def slot(processor: Any, in_flight: int = 10, together: int = 10, **more: Any) -> MiniSlot:
    return MiniSlot(user_processor(processor, in_flight=in_flight, **more), together)


ROWS = [("a", 1), ("b", 2), ("c", 3), ("a", 4)]


class Deleting(Counting):
    """Asks for a map, deletes it, and reads it."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        handle.deleteIfExists("seen")

    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
        yield Row(k=key[0], n=len(list(rows)) + await self.seen.containsKey(("x",)))


def test_a_variable_that_is_deleted_cannot_be_awaited() -> None:
    with pytest.raises(PySparkRuntimeError, match="Map state seen is not initialized"):
        slot(Deleting()).batch(ROWS)


def test_keys_wait_together(far: Far) -> None:
    assert [row["n"] for row in slot(Counting()).batch(ROWS)] == [1, 5, 2, 3]
    assert far.fetches == [("count", [(0, None), (1, None), (2, None)])]
    assert Counting.said == [
        *(("asks", key) for key in "abc"),
        *(("has", "a"), ("asks", "a"), ("has", "a"), ("has", "b"), ("has", "c")),
    ]


def test_as_many_as_may(far: Far) -> None:
    assert [row["n"] for row in slot(Counting(), in_flight=2).batch(ROWS)] == [1, 5, 2, 3]
    assert [wanted for _, wanted in far.fetches] == [[(0, None), (1, None)], [(2, None)]]
    assert Counting.said[:5] == [("asks", "a"), ("asks", "b"), ("has", "a"), ("asks", "a"), ("has", "a")]


def test_what_was_sent_along_is_answered_at_once(far: Far) -> None:
    far.share = 0
    slot(Counting()).batch(ROWS)
    assert Counting.said[:4] == [("asks", "a"), ("has", "a"), ("asks", "a"), ("has", "a")]
    assert not far.fetches


def test_several_reads_of_a_key_at_a_time(far: Far) -> None:
    class Gathering(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            await self.seen.updateValue(("x",), (key[0] == "a",))
            reads = millpond.gather(self.count.get(), *(self.seen.getValue((one,)) for one in "xy"))
            both = await millpond.gather(reads, self.seen.containsKey(("x",)), self.seen.iterator())
            yield Row(k=repr(both), n=0)

    rows = slot(Gathering(), in_flight=100).batch(ROWS)
    assert rows[0]["k"] == "[[None, Row(n=None), None], True, [(('x',), (None,))]]"
    assert [(name, [key for _, key in wanted]) for name, wanted in far.fetches] == [
        ("count", [None] * 3),
        ("seen", [("x",), ("y",), ("x",)] * 3),
        ("seen", [None] * 3),
    ]


def test_writes_take_effect_when_they_are_called_and_reads_when_they_are_awaited(far: Far) -> None:
    class Late(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            read = self.count.get()
            self.count.update((1,))
            written = self.count.update((2,))
            yield Row(k=str(await read), n=(await self.count.get())[0])
            assert await written is None
            assert await written is None
            self.count.clear()
            yield Row(k=str(await self.count.exists()), n=0)

    assert slot(Late()).batch([("a", 1)]) == [{"k": "(2,)", "n": 2}, {"k": "False", "n": 0}]


def test_an_iterator_sees_what_was_there_when_it_began(far: Far) -> None:
    class Iterating(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            for word in "xyz":
                await self.seen.updateValue((word,), (key[0] == "a",))
            async for (word,) in self.seen.keys():
                await self.seen.removeKey((word,))
                await self.count.get()  # others take turns
                yield Row(k=key[0] + word, n=0)

    one = slot(Iterating())
    assert [row["k"] for row in one.batch(ROWS)] == [key + word for key in "abc" for word in "xyz"]
    assert one.of("variable.seen") == {}


def test_a_coroutine_gives_nothing_out(far: Far) -> None:
    class Silent(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> None:
            await self.count.get()
            await self.count.update((len(list(rows)),))

    one = slot(Silent())
    assert one.batch(ROWS) == []
    assert one.of("variable.count") == {("a",): {"n": 2}, ("b",): {"n": 1}, ("c",): {"n": 1}}


def test_a_coroutine_that_returns_rows_is_told_to_yield_them() -> None:
    class Returning(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return [Row(k="a", n=1)]

    with pytest.raises(UsageError, match=r"returned list for key \('a',\).*yield"):
        slot(Returning()).batch(ROWS)


def test_a_read_is_not_what_it_reads() -> None:
    class Forgetful(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            if self.count.exists():
                yield Row(k="a", n=1)

    with pytest.raises(UsageError, match="Await it"):
        slot(Forgetful()).batch(ROWS)


@pytest.mark.parametrize("wrong", [3, asyncio.sleep, [1]])
def test_only_reads_are_gathered(wrong: Any) -> None:
    with pytest.raises(UsageError, match=f"{type(wrong).__qualname__}, which is no read of state"):
        millpond.gather(wrong)


# what is awaited beside state ---------------------------------------------------------------------------------


class Odd:
    def __await__(self) -> Any:
        yield 1


class Loop:
    def get_debug(self) -> bool:
        return False


async def _through() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (lambda: asyncio.sleep(0), r"asyncio\.tasks\.sleep"),
        (lambda: asyncio.sleep(1), r"asyncio\.tasks\.sleep"),
        (lambda: asyncio.Future(loop=Loop()), r"asyncio\.Future"),
        (_through, r"asyncio\.tasks\.sleep"),
        (Odd, r"Odd\.__await__"),
    ],
)
@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_nothing_but_state_is_awaited(far: Far, what: Any, name: str, caught: bool, plain: bool) -> None:
    class Foreign(Counting):
        async def do(self, key: Any) -> None:
            await self.count.get()
            if key[0] == "b":
                try:
                    await what()
                except UsageError:
                    if not caught:
                        raise
                await self.count.get()

        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            await self.do(key)
            yield Row(k="", n=1)

    class Plain(Foreign):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> None:
            await self.do(key)

    user = user_processor((Plain if plain else Foreign)(), in_flight=10)
    running = start_processor(user, unasked)
    with pytest.raises(UsageError, match=rf"awaits {name} for key \('b',\), but nothing except state") as raised:
        list(MiniSlot(user, 10)._calls(running, "rows", {(key,): [(key, 1)] for key in "abc"}, -1, -1))
    assert running.key == ("b",)
    assert any(entry.name == "do" for entry in raised.traceback)  # where it was awaited
    del raised
    gc.collect()


# errors and ends ----------------------------------------------------------------------------------------------


class Ending(Counting):
    """Fail for one key, after all have waited; report how the others end."""

    def __init__(self, raised: BaseException, stubborn: bool = False) -> None:
        self.raised, self.stubborn = raised, stubborn

    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
        try:
            await self.count.get()
            if key[0] == "b":
                raise self.raised
            await self.seen.getValue(("x",))
            yield Row(k=key[0], n=1)
        finally:
            await self.count.update((7,))
            if self.stubborn:
                await self.seen.getValue(("y",))
            Counting.said.append(("ends", key[0]))


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("stubborn", [False, True])
def test_an_error_names_its_key_and_the_others_end(far: Far, raised: BaseException, stubborn: bool) -> None:
    user = user_processor(Ending(ValueError("no"), stubborn), in_flight=10)
    running = start_processor(user, unasked)
    running._processor.raised = raised
    with pytest.raises(type(raised)):
        list(MiniSlot(user, 10)._calls(running, "rows", {(key,): [(key, 1)] for key in "abcd"}, -1, -1))
    assert running.key == ("b",)
    ended = {key for what, key in Counting.said if what == "ends"}
    assert ended == set("b" if stubborn else "abcd")
    gc.collect()


def test_a_consumer_that_stops(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.worker.processors.rows.ROWS_PER_BATCH", 1)
    monkeypatch.setattr("millpond.worker.processors.rows.RowResults.check_every", 1)
    user = user_processor(Ending(ValueError("no")), in_flight=10)
    calls: Any = MiniSlot(user, 10)._calls(
        start_processor(user, unasked), "rows", {(key,): [(key, 1)] for key in "acd"}, -1, -1
    )
    assert next(calls) == {"k": "a", "n": 1}
    calls.close()
    assert {key for what, key in Counting.said if what == "ends"} == set("acd")


def test_a_fetch_that_fails(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(list[Any]):
        def append(self, one: Any) -> None:
            raise OSError("gone")

    far.fetches = Gone()
    user = user_processor(Ending(ValueError("no")), in_flight=10)
    running = start_processor(user, unasked)
    with pytest.raises(OSError, match="gone"):
        list(MiniSlot(user, 10)._calls(running, "rows", {(key,): [(key, 1)] for key in "ab"}, -1, -1))
    assert running.key is None
    assert Counting.said == [("ends", "a"), ("ends", "b")]


def test_generators_that_are_not_used_up_are_closed_for_their_key(far: Far) -> None:
    class Breaking(Counting):
        async def numbers(self, key: Any) -> AsyncIterator[int]:
            try:
                for number in range(9):
                    await self.count.get()
                    yield number
            finally:
                await self.seen.containsKey((key[0],))  # waits
                await self.seen.updateValue((key[0],), (1,))
                Counting.said.append(("closed", key[0]))

        async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> AsyncIterator[Row]:
            async for number in self.numbers(key):
                if number == row.v:
                    break
            async for one in self.seen.iterator():
                yield Row(k=one[0][0], n=0)
                break
            await self.seen.getValue(("x",))
            Counting.said.append(("done", key[0]))

        handleInputRows = millpond.AsyncStatefulProcessor.handleInputRows

    one = slot(Breaking())
    assert one.batch(ROWS) == [{"k": "a", "n": 0}]
    for key in "abc":
        assert [what for what, whose in Counting.said if whose == key] == ["done", "closed"] * (2 if key == "a" else 1)
    assert {key[0]: [entry["key"]["k"] for entry in map_] for key, map_ in one.of("variable.seen").items()} == {
        "a": ["a"],
        "b": ["b"],
        "c": ["c"],
    }


# timers and rows ----------------------------------------------------------------------------------------------


def test_timers_of_a_key_fire_in_order_and_are_gone(far: Far) -> None:
    class Timed(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> None:
            for row in rows:
                await self.handle.registerTimer(row.v)
            await self.handle.deleteTimer(99)
            await self.count.get()

        async def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> AsyncIterator[Row]:
            await self.count.get()
            left = [time async for time in self.handle.listTimers()]
            yield Row(k=f"{key.k} {left}", n=expiredTimerInfo.getExpiryTimeInMs())

    one = slot(Timed(), mode="processing")
    assert one.batch([("a", 3), ("b", 4), ("a", 2), ("a", 9), ("b", 99)], processing=5) == [
        {"k": "a [2, 3, 9]", "n": 2},
        {"k": "a [3, 9]", "n": 3},
        {"k": "b [4]", "n": 4},
    ]
    assert one.of("timers") == {("a",): [9]}


def test_a_processor_without_a_handler_of_timers(far: Far) -> None:
    class Unhandled(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> None:
            await self.handle.registerTimer(1)

    one = slot(Unhandled(), mode="processing")
    assert one.batch(ROWS, processing=5) == []
    assert one.of("timers") == {}


def test_many_rows_of_a_key_and_keys_that_use_none(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    class Some(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            await self.count.get()
            if key[0] != "b":
                yield Row(k=key[0], n=sum(row.v for row in rows))

    monkeypatch.setattr("millpond.worker.processors.rows._BLOCK_ROWS", 3)
    rows = [("a", n) for n in range(7)] + [("b", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("e", 6)]
    assert [row["n"] for row in slot(Some()).batch(rows)] == [21, 3, 4, 11]


def test_lists_that_are_changed_after_they_were_given_out(far: Far) -> None:
    class Growing(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            values: list[int] = []
            for row in rows:
                await self.count.get()
                values.append(row.v)
                yield Row(a=values)

    assert slot(Growing(), shown="a array<bigint>").batch(ROWS) == [
        {"a": [1]},
        {"a": [1, 4]},
        {"a": [2]},
        {"a": [3]},
    ]


def test_rows_that_do_not_fit_name_their_key(far: Far) -> None:
    class Wrong(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            await self.count.get()
            yield Row(k="a", n="x" if key[0] == "b" else 1)

    user = user_processor(Wrong(), in_flight=10)
    running = start_processor(user, unasked)
    with pytest.raises(ValueError, match="x"):
        list(MiniSlot(user, 10)._calls(running, "rows", {(key,): [(key, 1)] for key in "abc"}, -1, -1))
    assert running.key == ("b",)


def test_frames(far: Far) -> None:
    class Framed(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[pd.DataFrame]:
            held = await self.count.get()
            count = (held[0] if held else 0) + sum(len(frame) for frame in rows)
            await self.count.update((count,))
            yield pd.DataFrame({"k": [key[0]], "n": [count]})
            yield pd.DataFrame({"k": [key[0]], "n": ["x" if key[0] == "bad" else 0]})

    one = slot(Framed(), pandas=True)
    expected = [{"k": key, "n": n} for key, many in (("a", 2), ("b", 1), ("c", 1)) for n in (many, 0)]
    assert one.batch(ROWS) == expected
    assert [wanted for _, wanted in far.fetches] == [[(0, None), (1, None), (2, None)]]
    user = user_processor(Framed(), in_flight=10, pandas=True)
    running = start_processor(user, unasked)
    with pytest.raises(Exception, match=r"type .object. to Arrow type .int64."):
        list(MiniSlot(user, 10)._calls(running, "rows", {(key,): [(key, 1)] for key in ("a", "bad")}, -1, -1))
    assert running.key == ("bad",)


# what is no asynchronous processor ----------------------------------------------------------------------------


class Half(StatefulProcessor):
    def init(self, handle: Any) -> None: ...

    async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any: ...


class Neither(millpond.AsyncStatefulProcessor):
    def init(self, handle: Any) -> None: ...


class Timers(Counting):
    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return iter([])


class Two(Counting):
    async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> None: ...


class One(Neither):
    async def handleInputRow(self, key: Any, row: Any, timerValues: Any) -> None: ...


class Init(Counting):
    async def init(self, handle: Any) -> None: ...


@pytest.mark.parametrize(
    ("processor", "match"),
    [
        (Half(), "handleInputRows of Half is asynchronous, but the processor is not. Derive it"),
        (Neither(), "neither handleInputRows nor handleInputRow"),
        (Two(), "both handleInputRows and handleInputRow"),
        (Timers(), "handleExpiredTimer of the asynchronous processor Timers is not"),
        (Init(), "init of Init is asynchronous"),
    ],
)
def test_processors_that_are_asynchronous_in_part(processor: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        check_asynchronous(processor, pandas=False)


def test_processors_that_are_or_are_not() -> None:
    assert check_asynchronous(Counting(), pandas=True)
    assert check_asynchronous(One(), pandas=False)
    with pytest.raises(UsageError, match="Define handleInputRows, or use transformWithState"):
        check_asynchronous(One(), pandas=True)


def test_spark_itself_is_refused() -> None:
    class Local(Counting):
        pass

    copy = cloudpickle.loads(cloudpickle.dumps(Local()))
    with pytest.raises(UsageError, match=r"Local is an asynchronous processor, .*millpond\.writeStream"):
        copy.init(StatefulProcessorHandle(None))
    with pytest.raises(UsageError, match=r"Neither is an asynchronous processor"):
        Neither().handleInputRows(("a",), iter([]), None)


class HasInitialState(Counting):
    async def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        held = await self.count.get()
        await self.count.update(((held[0] if held else 0) + initialState.total,))


def test_an_initial_state_is_awaited(far: Far) -> None:
    made = slot(HasInitialState(), initial="k string, total bigint")
    first = [("a", 10), ("c", 20), ("a", 5)]
    assert [row["n"] for row in made.batch(ROWS, initial=first)] == [16, 20, 2, 23]
    assert [wanted for _, wanted in far.fetches] == [[(0, None), (1, None)], [(0, None), (1, None), (2, None)]]


def test_an_initial_state_gives_nothing_out() -> None:
    class Giving(Counting):
        async def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> AsyncIterator[Row]:  # type: ignore[override]
            yield Row(k=key[0], n=1)

    with pytest.raises(UsageError, match="handleInitialState"):
        check_asynchronous(Giving(), pandas=False)

    class Plain(Counting):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(UsageError, match="async def"):
        check_asynchronous(Plain(), pandas=False)


def test_few_rows_wait_for_those_of_a_slow_key(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a key waits again and again, the others give out what there is room for, and then wait for it, too."""

    class Slow(Counting):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> AsyncIterator[Row]:
            for number in range(50 if key[0] == "a0" else 1):
                await self.seen.getValue((str(number),))
            for _ in range(30):
                Counting.said.append(key[0])
                yield Row(k=key[0], n=1)

    monkeypatch.setattr("millpond.worker.processors.awaiting._MAX_QUEUED_ROWS", 100)
    keys = [f"a{n}" for n in range(60)]
    shown = slot(Slow(), in_flight=20, together=60).batch([(key, 1) for key in keys])
    assert [row["k"] for row in shown] == [key for key in keys for _ in range(30)]
    assert 100 <= Counting.said.index("a0") < 100 + 30


def _logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapped


def test_functions_may_be_decorated() -> None:
    class Decorated(Counting):
        handleInputRows = _logged(Counting.handleInputRows)

        @_logged  # type: ignore[untyped-decorator]
        async def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
            await self.count.update((initialState.v,))

    assert check_asynchronous(Decorated(), pandas=False)
    one = slot(Decorated(), initial="k string, v bigint")
    assert [row["n"] for row in one.batch(ROWS, initial=[("a", 7)])] == [8, 12, 2, 3]

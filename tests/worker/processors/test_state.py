"""State variables, against a model of what they should have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    IntegerType,
    LongType,
    Row,
    StringType,
    StructField,
    StructType,
)

from millpond.errors import UsageError
from millpond.layout import NEVER
from millpond.spec.types import parse_type
from millpond.worker.processors.state import buckets, columns, parts
from millpond.worker.processors.state import lists as lists_
from millpond.worker.processors.state import maps as maps_
from millpond.worker.processors.state.order import row_bytes
from tests.worker.processors.mini_slot import MiniSlot, Scripted, user_processor

Step = Callable[[Any], None]


def running(declare: Callable[[Any, Any], None], *, mode: Any = "none", together: int = 3) -> Any:
    """A function that runs a step for a key in a batch of its own, at a time; the processor knows its variables."""
    steps: list[Step] = []

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for _ in rows:
            steps[0](self)
        yield from ()

    slot = MiniSlot(user_processor(Scripted(init=declare, rows=rows), mode=mode), together)

    def run(step: Step, now: int = 0, key: str = "k") -> None:
        steps[:] = [step]
        slot.batch([(key, 0)], now)

    run.slot = slot  # type: ignore[attr-defined]
    return run


def value(self: Any, handle: Any) -> None:
    self.state = handle.getValueState("v", "a bigint, b string")


def lists(self: Any, handle: Any) -> None:
    self.state = handle.getListState("l", "a bigint")


def maps(self: Any, handle: Any) -> None:
    self.state = handle.getMapState("m", "k string", "a bigint")


def expect(wanted: Any, got: Callable[[Any], Any]) -> Step:
    def step(self: Any) -> None:
        assert got(self.state) == wanted

    return step


def test_a_value() -> None:
    run = running(value)

    def first(self: Any) -> None:
        assert self.state.get() is None
        assert not self.state.exists()
        self.state.clear()
        self.state.update((1, "x"))
        assert self.state.get() == (1, "x")
        assert type(self.state.get()) is tuple

    run(first)
    run(expect((1, "x"), lambda state: state.get()))
    run(expect(True, lambda state: state.exists()))
    run(lambda self: self.state.update([np.int64(5), "y"]))
    run(expect((5, "y"), lambda state: state.get()))
    run(lambda self: self.state.update(Row(b="z", a=None)))  # by position, as in Spark
    run(expect((None, None), lambda state: state.get()))
    run(lambda self: self.state.clear())
    run(expect(None, lambda state: state.get()))
    assert run.slot.of("variable.v") == {}


def test_what_is_too_large_for_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of many keys come in several; that of one key which is too large is an error that names the variable."""
    monkeypatch.setattr(columns, "_MAX_COLUMN_BYTES", 10_000)
    told = []

    def init(self: Any, handle: Any) -> None:
        self.value = handle.getValueState("v", "s string")

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        told.append(self.value.get())
        self.value.update((key[0] * sum(row.v for row in rows),))
        yield from ()

    slot = MiniSlot(user_processor(Scripted(init=init, rows=rows)), 1000)
    keys = [f"{n:02}" for n in range(40)]
    for _ in range(2):
        slot.batch([(key, 500) for key in keys])
    assert told == [None] * 40 + [(key * 500,) for key in keys]
    with pytest.raises(UsageError, match="The state variable 'v' has become so large that a key has more than 2 GB"):
        slot.batch([("00", 500), ("01", 6000)])


def test_nothing_changes_where_nothing_is_written() -> None:
    def declare(self: Any, handle: Any) -> None:
        value(self, handle)
        self.list, self.map = handle.getListState("l", "a bigint"), handle.getMapState("m", "k string", "a bigint")

    run = running(declare)

    def step(self: Any) -> None:
        self.state.clear()
        self.list.clear()
        self.map.clear()
        self.map.removeKey(("x",))
        assert [self.state.get(), list(self.list.get()), list(self.map.keys())] == [None, [], []]

    run(step)
    assert run.slot.expiries == {"variable.v": {}, "variable.l": {}, "variable.m": {}}


def test_a_list() -> None:
    run = running(lists)

    def first(self: Any) -> None:
        assert list(self.state.get()) == []
        self.state.appendValue((1,))
        old = self.state.get()
        assert next(old) == (1,)
        later = self.state.get()
        self.state.appendList([(2,), [3]])
        assert list(old) == []  # a snapshot of when the first was asked for
        assert list(later) == [(1,), (2,), (3,)]
        assert self.state.exists()

    run(first)
    run(expect([(1,), (2,), (3,)], lambda state: list(state.get())))
    run(lambda self: self.state.put(iter([(7,)])))
    run(expect([(7,)], lambda state: list(state.get())))
    for refused in (lambda self: self.state.put([]), lambda self: self.state.appendList([])):
        with pytest.raises(PySparkRuntimeError, match=r"Error updating value state: \[ILLEGAL_STATE_STORE_VALUE.EMPTY"):
            run(refused)
    with pytest.raises(TypeError):
        run(lambda self: self.state.put([None]))
    run(lambda self: self.state.clear())
    run(expect(False, lambda state: state.exists()))


def test_a_map() -> None:
    run = running(maps)

    def first(self: Any) -> None:
        assert self.state.getValue(("a",)) is None
        assert not self.state.exists()
        for at, key in enumerate(["b", "a", "a long key that comes later", "c"]):
            self.state.updateValue((key,), (at,))
        old = self.state.iterator()
        assert next(old) == (("a",), (1,))
        self.state.removeKey(("b",))
        self.state.removeKey(("none",))
        assert list(old) == [(("b",), (0,)), (("c",), (3,)), (("a long key that comes later",), (2,))]

    run(first)
    run(expect(Row(a=3), lambda state: state.getValue(("c",))))
    run(expect(["a"], lambda state: state.getValue(["c"]).__fields__))
    run(expect([("a",), ("c",), ("a long key that comes later",)], lambda state: list(state.keys())))
    run(expect([(1,), (3,), (2,)], lambda state: list(state.values())))
    run(expect((True, False), lambda state: (state.containsKey(("a",)), state.containsKey(("b",)))))
    run(lambda self: self.state.clear())
    run(expect([], lambda state: list(state.iterator())))


def test_keys_of_maps_that_python_does_not_tell_apart_as_spark_does() -> None:
    def declare(self: Any, handle: Any) -> None:
        self.state = handle.getMapState("m", "k double, l array<string>", "a bigint")

    run = running(declare)

    def first(self: Any) -> None:
        for at, key in enumerate([0.0, -0.0, float("nan"), float("nan"), 1, None]):
            self.state.updateValue((key, ["x"]), (at,))
        assert sorted(value for (value,) in self.state.values()) == [0, 1, 3, 5]

    run(first)
    run(expect(Row(a=3), lambda state: state.getValue((float("nan"), ["x"]))))
    run(expect(Row(a=1), lambda state: state.getValue((-0.0, ["x"]))))
    run(expect(None, lambda state: state.getValue((None, []))))


def test_a_value_that_is_changed_after_it_was_given_or_got() -> None:
    def declare(self: Any, handle: Any) -> None:
        self.state = handle.getValueState("v", "a array<bigint>, m map<string,array<int>>")

    run = running(declare)

    def step(self: Any) -> None:
        given: Any = ([1, 2], {"a": [1]})
        self.state.update(given)
        given[0].append(3)
        got = self.state.get()
        assert got == ([1, 2], {"a": [1]})
        got[0].append(4)
        got[1]["a"].append(2)

    run(step)
    run(expect(([1, 2], {"a": [1]}), lambda state: state.get()))


@pytest.mark.parametrize(
    "declare",
    [
        lambda self, handle: setattr(self, "state", handle.getValueState("x", "a bigint", 10)),
        lambda self, handle: setattr(self, "state", handle.getListState("x", "a bigint", 10)),
        lambda self, handle: setattr(self, "state", handle.getMapState("x", "k bigint", "a bigint", 10)),
    ],
)
def test_what_has_lived_its_time_is_gone(declare: Any) -> None:
    run = running(declare, mode="processing")

    def write(state: Any, number: int) -> None:
        if hasattr(state, "updateValue"):
            state.updateValue((number,), (number,))
        elif hasattr(state, "appendValue"):
            state.appendValue((number,))
        else:
            state.update((number,))

    def everything(state: Any) -> Any:
        if hasattr(state, "updateValue"):
            return list(state.values())
        return list(state.get()) if hasattr(state, "appendValue") else [one for one in [state.get()] if one]

    run(lambda self: write(self.state, 1), 100)
    assert run.slot.expiries["variable.x"] == {("k",): 110}
    run(expect([(1,)], everything), 109)
    run(expect([], everything), 110)
    run(expect(False, lambda state: state.exists()), 110)
    run(lambda self: write(self.state, 2), 105)
    single = run.slot.user.spec.variables[0].kind == "value"
    run(expect([(2,)] if single else [(1,), (2,)], everything), 109)
    run(expect([(2,)], everything), 110)
    run(lambda self: write(self.state, 3), 112)
    assert run.slot.expiries["variable.x"] == {("k",): 122 if single else 115}
    run(lambda self: self.state.clear(), 113)
    assert run.slot.expiries["variable.x"] == {("k",): NEVER}


def test_with_another_time_to_live_the_middle_of_a_list_may_go_first() -> None:
    def declare(ttl: int) -> Any:
        return lambda self, handle: setattr(self, "state", handle.getListState("x", "a bigint", ttl))

    long, short = running(declare(100), mode="processing"), running(declare(10), mode="processing")
    short.slot.state, short.slot.expiries = long.slot.state, long.slot.expiries
    long(lambda self: self.state.appendValue((1,)), 0)
    short(lambda self: self.state.appendList([(2,), (3,)]), 0)
    long(lambda self: self.state.appendValue((4,)), 5)
    long(expect([(1,), (4,)], lambda state: list(state.get())), 10)


def test_state_without_a_key_is_refused() -> None:
    kept: list[Any] = []

    def close(self: Any) -> None:
        if kept:
            kept[0](self)

    slot = MiniSlot(user_processor(Scripted(init=value, close=close)))
    kept.append(lambda self: self.state.get())
    with pytest.raises(
        PySparkRuntimeError, match=r"Error getting value state: \[INTERNAL_ERROR_TWS\] Implicit key not"
    ):
        slot.batch([("a", 1)])
    for use in (lambda self: self.state.update((1, "a")), lambda self: self.state.clear()):
        kept[:] = [use]
        with pytest.raises(PySparkRuntimeError, match="stateName=v"):
            slot.batch([])


def test_a_value_of_the_wrong_length() -> None:
    run = running(value)
    with pytest.raises(
        PySparkRuntimeError,
        match=r"Error updating value state: \[STRUCT_ARRAY_LENGTH_MISMATCH\] .* 2 fields .* 3 values",
    ):
        run(lambda self: self.state.update((1, "x", 2)))


FULL = "b array<struct<x:int,y:string>>, `a, b` decimal(10,2) NOT NULL COMMENT 'x, (', c bigint, `d` string not null"
FULL_TYPE = StructType(
    [
        StructField("b", ArrayType(StructType([StructField("x", IntegerType()), StructField("y", StringType())]))),
        StructField("a, b", DecimalType(10, 2), False),
        StructField("c", LongType()),
        StructField("d", StringType(), False),
    ]
)


@pytest.mark.parametrize("schema", [FULL, FULL_TYPE], ids=["DDL", "type"])
@pytest.mark.parametrize(
    ("kind", "put"),
    [
        ("getValueState", lambda state, row: state.update(row)),
        ("getListState", lambda state, row: state.appendValue(row)),
        ("getListState", lambda state, row: state.put([row])),
        ("getMapState", lambda state, row: state.updateValue((1,), row)),
    ],
)
def test_what_may_not_be_null(kind: str, put: Any, schema: Any) -> None:
    """As DDL and as a type."""
    schemas = ("k int", schema) if kind == "getMapState" else (schema,)
    run = running(lambda self, handle: setattr(self, "state", getattr(handle, kind)("v", *schemas)))
    run(lambda self: put(self.state, (None, Decimal(1), None, "x")))
    with pytest.raises(PySparkRuntimeError, match="The 1th field 'a, b' of input row cannot be null"):
        run(lambda self: put(self.state, ([], None, None, "x")))
    with pytest.raises(PySparkRuntimeError, match="The 3th field 'd' of input row cannot be null"):
        run(lambda self: put(self.state, (None, Decimal(1), 5, None)))


@pytest.mark.parametrize("schema", ["a bigint not null", StructType([StructField("a", LongType(), False)])])
def test_keys_of_maps_may_not_be_null(schema: Any) -> None:
    run = running(lambda self, handle: setattr(self, "state", handle.getMapState("m", schema, "b bigint")))
    run(lambda self: self.state.updateValue((1,), (None,)))
    run(expect((None,), lambda state: state.getValue((1,))))
    with pytest.raises(PySparkRuntimeError, match="The 0th field 'a' of input row cannot be null"):
        run(lambda self: self.state.updateValue((None,), (1,)))


def test_another_variable_than_on_the_driver() -> None:
    names = iter(["a", "a", "b"])
    processor = Scripted(init=lambda self, handle: handle.getValueState(next(names), "a bigint"))
    slot = MiniSlot(user_processor(processor))
    slot.batch([("a", 1)])
    with pytest.raises(UsageError, match="did not ask for"):
        slot.batch([("a", 1)])


def test_many_keys_that_nobody_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_KEYS_PER_READ", 2)

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for row in rows:
            if row.v:
                self.state.appendList([(row.v, None), (None, str(row.v))])
                yield Row(k=str(list(self.state.get())), n=row.v)

    declare: Any = lambda self, handle: setattr(self, "state", handle.getListState("l", "a bigint, b string"))  # noqa: E731
    slot = MiniSlot(user_processor(Scripted(init=declare, rows=rows)), together=100)
    keys = [f"k{n}" for n in range(11)]
    slot.batch([(key, n % 3) for n, key in enumerate(keys)])
    slot.batch([(key, 5 * (n == 7)) for n, key in enumerate(keys)])
    added = {key: [n % 3] if n % 3 else [] for n, key in enumerate(keys)}
    added["k7"].append(5)
    assert slot.of("variable.l") == {
        (key,): [part for v in many for part in ({"a": v, "b": None}, {"a": None, "b": str(v)})]
        for key, many in added.items()
        if many
    }


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("l", lambda self: self.list.put([(n, []) for n in range(6)])),
        ("m", lambda self: [self.map.updateValue((n,), (n, None)) for n in range(6)]),
        ("m", lambda self: self.map.updateValue((1,), (1, list(range(6))))),
    ],
)
def test_a_variable_that_has_become_too_large(monkeypatch: pytest.MonkeyPatch, kind: str, change: Step) -> None:
    monkeypatch.setattr(columns, "_MAX_ITEMS", 5)

    def declare(self: Any, handle: Any) -> None:
        self.list = handle.getListState("l", "a bigint, b array<int>")
        self.map = handle.getMapState("m", "k bigint", "a bigint, b array<int>")

    run = running(declare)
    run(lambda self: self.list.put([(n, [n]) for n in range(5)]))
    with pytest.raises(UsageError, match=f"The state variable '{kind}' has become so large"):
        run(change)


def test_texts_that_are_too_long_for_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pa, "array", lambda values, kind: pa.chunked_array([values, values], kind))  # as it answers
    with pytest.raises(columns.TooLarge):
        columns.from_stored(["text"], pa.string())


# random programs -----------------------------------------------------------------------------------------------

ORDER = row_bytes(parse_type("struct<k:string,n:int>"))
small = st.integers(-3, 3)
map_key = st.tuples(st.sampled_from(["", "a", "b", "é", "a longer one", "12345678", "123456789"]), st.none() | small)
element = st.tuples(st.none() | small, st.sampled_from(["x", "y"]) | st.none())
operation = st.one_of(
    st.tuples(st.just("update"), element),
    st.tuples(st.just("clear"), st.sampled_from(["value", "list", "map"])),
    st.tuples(st.just("put"), st.lists(element, min_size=1, max_size=3)),
    st.tuples(st.just("append"), element),
    st.tuples(st.just("extend"), st.lists(element, min_size=1, max_size=3)),
    st.tuples(st.just("set"), map_key, element),
    st.tuples(st.just("remove"), map_key),
    st.tuples(st.just("read"), map_key),
    st.tuples(st.just("timer"), st.integers(0, 60)),
    st.tuples(st.just("no timer"), st.integers(0, 60)),
)
batches = st.lists(
    st.tuples(
        st.integers(0, 8), st.lists(st.tuples(st.sampled_from("abcde"), st.lists(operation, max_size=6)), max_size=5)
    ),
    min_size=1,
    max_size=6,
)


class Model:
    """The expected state of a key; each part with its time of expiry."""

    def __init__(self) -> None:
        self.value: list[tuple[Any, int]] = []
        self.list: list[tuple[Any, int]] = []
        self.map: dict[Any, tuple[Any, int]] = {}
        self.timers: set[int] = set()

    def run(self, processor: Any, one: Any, now: int, ttl: int) -> None:
        name, argument = one[:2]
        expiry = now + ttl if ttl else NEVER
        if name == "update":
            processor.value.update(argument)
            self.value = [(argument, expiry)]
        elif name == "clear":
            getattr(processor, argument).clear()
            setattr(self, argument, {} if argument == "map" else [])
        elif name == "put":
            processor.list.put(argument)
            self.list = [(part, expiry) for part in argument]
        elif name == "append":
            processor.list.appendValue(argument)
            self.list.append((argument, expiry))
        elif name == "extend":
            processor.list.appendList(argument)
            self.list += [(part, expiry) for part in argument]
        elif name == "set":
            processor.map.updateValue(argument, one[2])
            self.map[argument] = (one[2], expiry)
        elif name == "remove":
            processor.map.removeKey(argument)
            self.map.pop(argument, None)
        elif name == "timer":
            processor.handle.registerTimer(argument)
            self.timers.add(argument)
        elif name == "no timer":
            processor.handle.deleteTimer(argument)
            self.timers.discard(argument)
        else:
            self.check(processor, argument, now)

    def expire(self, now: int) -> None:
        self.value = [part for part in self.value if part[1] > now]
        self.list = [part for part in self.list if part[1] > now]
        self.map = {key: part for key, part in self.map.items() if part[1] > now}

    def check(self, processor: Any, key: Any, now: int) -> None:
        self.expire(now)
        wanted = [part for part, _ in self.value]
        assert processor.value.get() == (wanted[0] if wanted else None)
        assert processor.value.exists() == bool(wanted)
        assert list(processor.list.get()) == [part for part, _ in self.list]
        assert processor.list.exists() == bool(self.list)
        ordered = sorted(self.map, key=ORDER)
        assert list(processor.map.iterator()) == [(one, self.map[one][0]) for one in ordered]
        assert list(processor.map.keys()) == ordered
        assert list(processor.map.values()) == [self.map[one][0] for one in ordered]
        assert processor.map.exists() == bool(self.map)
        assert processor.map.getValue(key) == (self.map[key][0] if key in self.map else None)
        assert processor.map.containsKey(key) == (key in self.map)
        assert sorted(processor.handle.listTimers()) == sorted(self.timers)


firsts = st.lists(st.tuples(st.sampled_from("abcdefg"), st.lists(operation, max_size=4)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(batches, firsts, st.sampled_from([0, 5]), st.integers(1, 4))
def test_any_program(program: Any, initial_state: Any, ttl: int, together: int) -> None:
    run_program(program, initial_state, ttl, together)


@settings(max_examples=200, deadline=None)
@given(batches, firsts, st.sampled_from([0, 5]), st.integers(1, 4), st.sampled_from([0, 100, 1 << 20]))
def test_any_program_with_parts(program: Any, initial_state: Any, ttl: int, together: int, at_once: int) -> None:
    """Two elements and three entries are many; some are fetched as a whole, others streamed."""
    with ExitStack() as stack:
        for module, name, few in [
            (buckets, "MAX_ENTRIES", 2),
            (maps_, "MAX_ENTRIES", 3),
            (maps_, "_ENTRIES_PER_READ", 2),
            (lists_, "_MAX_SENT_ELEMENTS", 2),
            (lists_, "_MAX_PART_ELEMENTS", 2),
            (parts, "_MAX_PARTS_PER_REQUEST", 2),
            (parts, "MAX_FETCH_BYTES", at_once),
            (maps_, "MAX_FETCH_BYTES", at_once),
            (parts, "_PREFETCH_AFTER", 2),
        ]:
            stack.enter_context(patch.object(module, name, few))
        run_program(program, initial_state, ttl, together)


def run_program(program: Any, initial_state: Any, ttl: int, together: int) -> None:
    models: dict[str, Model] = {}
    waiting: dict[str, list[Any]] = {}
    now = 0
    fired: list[tuple[str, int]] = []

    def init(self: Any, handle: Any) -> None:
        self.value = handle.getValueState("value", "a bigint, b string", ttl)
        self.list = handle.getListState("list", "a bigint, b string", ttl)
        self.map = handle.getMapState("map", "k string, n int", "a bigint, b string", ttl)

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        model = models.setdefault(key[0], Model())
        for row in rows:
            model.expire(now)
            for one in waiting[key[0]][row.v]:
                model.run(self, one, now, ttl)
        model.check(self, ("a", None), now)
        yield from ()

    def initial(self: Any, key: Any, row: Any, times: Any) -> None:
        for one in initial_state[row.at][1]:
            models.setdefault(key[0], Model()).run(self, one, now, ttl)

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[Row]:
        fired.append((key.k, info.getExpiryTimeInMs()))
        models[key.k].check(self, ("a", 1), now)
        self.list.appendValue((info.getExpiryTimeInMs(), None))
        models[key.k].list.append(((info.getExpiryTimeInMs(), None), now + ttl if ttl else NEVER))
        yield from ()
        models[key.k].timers.discard(info.getExpiryTimeInMs())

    processor = Scripted(init=init, rows=rows, initial=initial, timer=timer)
    slot = MiniSlot(user_processor(processor, mode="processing", initial="k string, at int"), together)
    given_first = [(key, at) for at, (key, _) in enumerate(initial_state)]
    for step, batch in program:
        now += step
        waiting.clear()
        for key, operations in batch:
            waiting.setdefault(key, []).append(operations)
        fired.clear()
        given = [(key, at) for key, many in waiting.items() for at in range(len(many))]
        slot.batch(given, now, initial=given_first)
        given_first = []
        assert fired == sorted(fired, key=lambda one: (list(dict.fromkeys(k for k, _ in fired)).index(one[0]), one[1]))
        assert all(time <= now for _, time in fired)
        for key, model in models.items():
            assert not any(time <= now for time in model.timers)
            model.expire(now)
            for table, has in [("value", model.value), ("list", model.list), ("map", model.map)]:
                first = slot.expiries[f"variable.{table}"].get((key,), NEVER)
                head = slot.heads.get(f"variable.{table}", {}).get((key,))
                if has:
                    parts_of = has.values() if isinstance(has, dict) else has
                    assert first <= min(expiry for _, expiry in parts_of) or head
                    assert (key,) in slot.state[f"variable.{table}"]

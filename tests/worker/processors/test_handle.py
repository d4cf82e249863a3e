"""Methods of a handle, and when they may be called; timers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import LongType, Row, StringType, StructType

from millpond.layout import NEVER
from millpond.spec.kinds.processor import TIMERS, Variable
from millpond.worker.processors.declaration import declare_state
from tests.worker.processors.mini_slot import MiniSlot, Scripted, user_processor

HANDLE_STATE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
TIME_MODE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"


# timers --------------------------------------------------------------------------------------------------------


def test_timers_fire_once_and_are_gone() -> None:
    seen: list[Any] = []

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(row.v)
            self.handle.registerTimer(row.v)
        yield from ()

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[Row]:
        assert type(key) is Row
        assert info.getExpiryTimeInMs() in list(self.handle.listTimers())
        seen.append((key.k, info.getExpiryTimeInMs(), times.getCurrentProcessingTimeInMs()))
        yield Row(k=key.k, n=info.getExpiryTimeInMs())

    slot = MiniSlot(user_processor(Scripted(rows=rows, timer=timer), mode="processing"))
    assert slot.batch([("a", 50), ("a", 20), ("b", 30)], 25) == [{"k": "a", "n": 20}]
    assert slot.of(TIMERS) == {("a",): [50], ("b",): [30]}
    assert slot.expiries[TIMERS] == {("a",): 50, ("b",): 30}
    assert slot.batch([], 60) == [{"k": "a", "n": 50}, {"k": "b", "n": 30}]
    assert slot.state[TIMERS] == {}
    assert slot.expiries[TIMERS] == {("a",): NEVER, ("b",): NEVER}
    assert seen == [("a", 20, 25), ("a", 50, 60), ("b", 30, 60)]


def test_what_a_handler_does_to_timers() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(row.v)
        yield from ()

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[Row]:
        time = info.getExpiryTimeInMs()
        if time == 10:
            self.handle.deleteTimer(20)  # fires all the same
            self.handle.deleteTimer(99)  # there is none
            self.handle.registerTimer(10)  # is there, and goes after this
            self.handle.registerTimer(15)  # is due, but in the next batch
        yield Row(k=key.k, n=time)

    slot = MiniSlot(user_processor(Scripted(rows=rows, timer=timer), mode="event"))
    assert [one["n"] for one in slot.batch([("a", 10), ("a", 20)], 0, 20)] == [10, 20]
    assert slot.of(TIMERS) == {("a",): [15]}
    assert [one["n"] for one in slot.batch([], 0, 20)] == [15]


def test_timers_are_listed_in_the_order_of_sparks_bytes() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(row.v)
        listed = self.handle.listTimers()
        first = next(listed)
        self.handle.deleteTimer(1)
        yield Row(k=str([first, *listed]), n=0)

    slot = MiniSlot(user_processor(Scripted(rows=rows), mode="processing"))
    assert slot.batch([("a", 1), ("a", 256), ("a", -1), ("a", 513)], -5)[0]["k"] == "[256, 1, 513, -1]"
    assert slot.of(TIMERS) == {("a",): [-1, 256, 513]}


@pytest.mark.parametrize("time", [1.5, "1", True, 2**63])
def test_times_are_whole_numbers(time: Any) -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> None:
        self.handle.registerTimer(time)

    said = "cannot be interpreted as an integer|Field .*RegisterTimer.expiryTimestampMs: Expected an int|out of range"
    with pytest.raises((TypeError, ValueError), match=said):
        MiniSlot(user_processor(Scripted(rows=rows), mode="processing")).batch([("a", 1)], 0)


def test_no_time_is_the_first_one() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        self.handle.registerTimer(None)
        yield from ()

    slot = MiniSlot(user_processor(Scripted(rows=rows), mode="event"))
    slot.batch([("a", 1)], watermark=-1)
    assert slot.of(TIMERS) == {("a",): [0]}


def test_timers_of_keys_of_all_kinds() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        self.handle.registerTimer(1)
        yield from ()

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[Row]:
        yield Row(k=repr(key), n=None)

    columns = "k string, t timestamp_ntz, b binary, v bigint"
    user = user_processor(Scripted(rows=rows, timer=timer), columns=columns, keys=(0, 1, 2), mode="processing")
    assert MiniSlot(user).batch([(None, 0, b"x", 1)], 1) == [
        {"k": "Row(k=None, t=datetime.datetime(1970, 1, 1, 0, 0), b=b'x')", "n": None}
    ]


# what is refused -----------------------------------------------------------------------------------------------


def refused(match: str, **functions: Any) -> None:
    mode = functions.pop("mode", "none")
    slot = MiniSlot(user_processor(Scripted(), mode=mode))
    slot = MiniSlot(user_processor(Scripted(**functions), mode=mode))
    with pytest.raises(PySparkRuntimeError, match=match):
        slot.batch([("a", 1)], 0, 0)


def test_timers_need_a_time_mode() -> None:
    for doing, operation, call in [
        ("register timer", "register_timer", lambda handle: handle.registerTimer(1)),
        ("deleting timer", "delete_timer", lambda handle: handle.deleteTimer(1)),
        ("listing timers", "list_timers", lambda handle: list(handle.listTimers())),
    ]:
        match = f"Error {doing}: .{TIME_MODE}. .*operation={operation} with invalid timeMode=NoTime SQLSTATE: 42802"
        refused(match, rows=lambda self, key, rows, times, call=call: call(self.handle))


def test_timers_need_a_key() -> None:
    refused(
        f"{HANDLE_STATE}.*register_timer with invalid handle state=TIMER_PROCESSED",
        mode="event",
        close=_unless_learning(lambda self: self.handle.registerTimer(1)),
    )


def test_with_an_initial_state_timers_need_a_key_in_the_end_too() -> None:
    close = _unless_learning(lambda self: self.handle.registerTimer(1))
    slot = MiniSlot(user_processor(Scripted(close=close), mode="event", initial="k string"))
    with pytest.raises(PySparkRuntimeError, match=r"Error register timer: .INTERNAL_ERROR_TWS. Implicit key not found"):
        slot.batch([])


def _unless_learning(function: Any) -> Any:
    def close(self: Any) -> None:
        if self.handle.state.name != "PRE_INIT":
            function(self)

    return close


def test_variables_are_asked_for_in_init() -> None:
    refused(
        f"Error initializing list state: .{HANDLE_STATE}. .*get_list_state with invalid handle state=INITIALIZED",
        rows=lambda self, key, rows, times: self.handle.getListState("x", "a bigint"),
    )
    refused(
        f"Error deleting state: .{HANDLE_STATE}. .*delete_if_exists with invalid handle state=TIMER_PROCESSED",
        close=_unless_learning(lambda self: self.handle.deleteIfExists("x")),
    )
    refused(
        f"{HANDLE_STATE}.*get_map_state with invalid handle state=DATA_PROCESSED",
        mode="processing",
        rows=lambda self, key, rows, times: self.handle.registerTimer(0) or [],
        timer=lambda self, key, times, info: self.handle.getMapState("x", "a bigint", "a bigint"),
    )


# on the driver -------------------------------------------------------------------------------------------------


def test_variables_are_learnt() -> None:
    said: list[str] = []

    def init(self: Any, handle: Any) -> None:
        handle.getValueState("v", "a INT, `b c` STRING NOT NULL")
        handle.getListState("l", StructType().add("x", LongType()).add("y", StructType().add("z z", StringType())), 5)
        handle.getMapState("m", "k string", "v: array<decimal(5,2)>, w map<string,timestamp>", ttlDurationMs=0)
        handle.deleteIfExists("old")
        self.kept = True

    processor = Scripted(init=init, close=lambda self: said.append("closed"))
    handle = declare_state(processor, "processing")
    assert handle.variables == [
        Variable("v", "value", "struct<a:int,`b c`:string>"),
        Variable("l", "list", "struct<x:bigint,y:struct<`z z`:string>>", ttl_ms=5),
        Variable("m", "map", "struct<v:array<decimal(5,2)>,w:map<string,timestamp>>", key="struct<k:string>"),
    ]
    assert said == ["closed"]
    assert not hasattr(processor, "kept")
    assert handle.purged == ["old"]


@pytest.mark.parametrize(
    ("init", "match"),
    [
        (
            lambda h: [h.getValueState("x", "a int"), h.getValueState("x", "a int")],
            "Error initializing value state: Value state x already exists",
        ),
        (
            lambda h: [h.getValueState("x", "a int"), h.getListState("x", "a int")],
            "Error initializing list state: .STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED. .* name x has",
        ),
        (
            lambda h: h.getListState("x", "a int", -1),
            "Error initializing list state: .STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE. .*on state=x",
        ),
        (lambda h: h.getValueState("x", "a int<"), "Error parsing string schema: "),
        (
            lambda h: h.getValueState("x", "a int").get(),
            f"Error getting value state: .{HANDLE_STATE}. .*operation=x.get with invalid handle state=PRE_INIT",
        ),
        (lambda h: h.getListState("x", "a int").appendValue((1,)), "operation=x.appendValue"),
        (lambda h: h.getMapState("x", "a int", "a int").getValue((1,)), "Error getting value: .*operation=x.getValue"),
        (lambda h: h.registerTimer(1), f"{HANDLE_STATE}.*register_timer with invalid handle state=PRE_INIT"),
    ],
)
def test_misuse_on_the_driver(init: Any, match: str) -> None:
    with pytest.raises(PySparkRuntimeError, match=match):
        declare_state(Scripted(init=lambda self, handle: init(handle)), "processing")


@pytest.mark.parametrize("name", ["", " a", "a\t", "default"])
def test_names_that_the_state_store_does_not_take(name: str) -> None:
    said = ".STATE_STORE_CANNOT_USE_COLUMN_FAMILY_WITH_INVALID_NAME. Failed to perform column family operation="
    with pytest.raises(
        PySparkRuntimeError, match=f"Error initializing map state: {said}create_col_family .*={name}. C"
    ):
        declare_state(Scripted(init=lambda self, handle: handle.getMapState(name, "a int", "a int")), "none")
    with pytest.raises(PySparkRuntimeError, match=f"Error deleting state: {said}remove_col_family .*={name}. Column"):
        declare_state(Scripted(init=lambda self, handle: handle.deleteIfExists(name)), "none")


def test_names_that_are_reserved() -> None:
    said = ".STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS. .* unsupported starting character and name="
    with pytest.raises(PySparkRuntimeError, match=f"Error initializing list state: {said}.x. SQLSTATE: 42802"):
        declare_state(Scripted(init=lambda self, handle: handle.getListState("$x", "a int")), "none")
    (variable,) = declare_state(
        Scripted(init=lambda self, handle: handle.getListState("_ x$", "a int")), "none"
    ).variables
    assert variable.name == "_ x$"


@pytest.mark.parametrize(("mode", "name"), [("none", "NoTime"), ("event", "EventTime")])
def test_a_time_to_live_needs_processing_time(mode: Any, name: str) -> None:
    processor = Scripted(init=lambda self, handle: handle.getMapState("x", "a int", "a int", 5))
    match = f"STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL. Cannot use TTL for state=x in timeMode={name},"
    with pytest.raises(PySparkRuntimeError, match=match):
        declare_state(processor, mode)


def test_a_variable_that_is_deleted_and_begins_anew() -> None:
    def init(self: Any, handle: Any) -> None:
        handle.getValueState("a", "n int")
        handle.deleteIfExists("b")
        handle.getListState("b", "n int")
        handle.deleteIfExists("c")

    handle = declare_state(Scripted(init=init), "none")
    assert [one.name for one in handle.variables] == ["a", "b"]
    assert handle.purged == ["b", "c"]


_KINDS = {"Value": ("n int",), "List": ("n int",), "Map": ("k int", "n int")}


def _deleted(kind: str, handle: Any) -> Any:
    """A variable that is asked for, then deleted."""
    made = getattr(handle, f"get{kind}State")("old", *_KINDS[kind])
    handle.deleteIfExists("old")
    return made


def test_a_variable_that_is_deleted_once_it_is_there() -> None:
    def init(self: Any, handle: Any) -> None:
        self.old = _deleted("List", handle)
        self.count = handle.getValueState("count", "n bigint")

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        total = (self.count.get() or (0,))[0] + sum(1 for _ in rows)
        self.count.update((total,))
        yield Row(k=key[0], n=total)

    handle = declare_state(Scripted(init=init), "none")
    assert [one.name for one in handle.variables] == ["old", "count"]
    assert handle.purged == ["old"]
    slot = MiniSlot(user_processor(Scripted(init=init, rows=rows)))
    assert [row["n"] for row in slot.batch([("a", 10), ("a", 11), ("b", 20)])] == [2, 1]
    assert [row["n"] for row in slot.batch([("a", 12)])] == [3]
    assert slot.of("variable.old") == {}


@pytest.mark.parametrize(
    ("kind", "use", "doing"),
    [
        ("Value", lambda old: old.exists(), "checking value state exists"),
        ("Value", lambda old: old.get(), "getting value state"),
        ("Value", lambda old: old.update((1,)), "updating value state"),
        ("Value", lambda old: old.clear(), "clearing value state"),
        ("List", lambda old: old.exists(), "checking value state exists"),
        ("List", lambda old: old.put([(1,)]), "updating value state"),
        ("List", lambda old: old.appendValue((1,)), "updating value state"),
        ("List", lambda old: old.appendList([(1,)]), "updating value state"),
        ("List", lambda old: old.clear(), "clearing value state"),
        ("Map", lambda old: old.exists(), "checking map state exists"),
        ("Map", lambda old: old.getValue((1,)), "getting value"),
        ("Map", lambda old: old.containsKey((1,)), "checking if map state contains key"),
        ("Map", lambda old: old.updateValue((1,), (1,)), "updating map state value"),
        ("Map", lambda old: old.removeKey((1,)), "removing key from map state"),
        ("Map", lambda old: old.clear(), "clearing map state"),
    ],
)
def test_a_deleted_variable_cannot_be_used(kind: str, use: Any, doing: str) -> None:
    refused(
        f"Error {doing}: {kind} state old is not initialized.",
        init=lambda self, handle: setattr(self, "old", _deleted(kind, handle)),
        rows=lambda self, key, rows, times: use(self.old),
    )


def test_a_deleted_list_or_map_has_nothing_to_go_through() -> None:
    def init(self: Any, handle: Any) -> None:
        self.old = _deleted("List", handle)
        self.map = handle.getMapState("map", *_KINDS["Map"])
        handle.deleteIfExists("map")

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        found = [*self.old.get(), *self.map.iterator(), *self.map.keys(), *self.map.values()]
        yield Row(k=key[0], n=len(found))

    assert MiniSlot(user_processor(Scripted(init=init, rows=rows))).batch([("a", 1)]) == [{"k": "a", "n": 0}]

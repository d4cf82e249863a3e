"""Processors that see rows."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.types import Row

from millpond.worker.processors import rows as rows_module
from millpond.worker.processors.rows import RowResults, row_iterators
from millpond.worker.processors.start import start_processor
from tests.worker.processors.mini_slot import MiniSlot, Scripted, fields, struct, unasked, user_processor


def count(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
    before = self.count.get()
    total = (before[0] if before else 0) + sum(1 for _ in rows)
    self.count.update((total,))
    yield Row(k=key[0], n=total)


def counting(self: Any, handle: Any) -> None:
    self.count = handle.getValueState("count", "n bigint")


def test_counts_go_on_from_batch_to_batch() -> None:
    slot = MiniSlot(user_processor(Scripted(init=counting, rows=count)))
    assert slot.batch([(f"k{n % 5}", n) for n in range(12)]) == [
        {"k": f"k{n}", "n": 3 if n < 2 else 2} for n in range(5)
    ]
    assert slot.batch([("k4", 1), (None, 1), ("k4", 1), ("new", 0)]) == [
        {"k": "k4", "n": 4},
        {"k": None, "n": 1},
        {"k": "new", "n": 1},
    ]
    assert slot.of("variable.count")[("k0",)] == {"n": 3}
    assert slot.batch([]) == []


def test_rows_and_keys_are_what_spark_makes_of_them() -> None:
    seen: list[Any] = []

    def rows(self: Any, key: Any, rows: Any, times: Any) -> list[Row]:
        seen.append((key, list(rows), times.getCurrentProcessingTimeInMs(), times.getCurrentWatermarkInMs()))
        return []

    at = dt.datetime(2024, 7, 1, 12, 0, 0, 5, tzinfo=dt.UTC)
    columns = "k timestamp, d decimal(5,2), a array<int>, s struct<x:int,y:timestamp>, m map<string,int>, b binary, "
    columns += "f float, t boolean, day date, ntz timestamp_ntz"
    given = (at, Decimal("1.50"), [1, None], {"x": 1, "y": at}, [("a", 1)], b"x", 0.1, True, dt.date(2024, 1, 1), at)
    user = user_processor(Scripted(rows=rows), columns=columns, mode="event", session_timeZone="Europe/Berlin")
    slot = MiniSlot(user)
    ntz = at.replace(tzinfo=None)
    slot.batch([(*given[:-1], ntz), (None,) * 10], 7, 5)
    local = at.astimezone(ZoneInfo("Europe/Berlin"))
    (key, (row,), *times), (nothing, (empty,), *_) = seen
    assert times == [7, 5]
    assert key == (local,)
    assert key[0].utcoffset() == dt.timedelta(hours=2)
    assert type(row) is Row
    assert row.asDict() == {
        "k": local,
        "d": Decimal("1.50"),
        "a": [1, None],
        "s": {"x": 1, "y": local},
        "m": [("a", 1)],
        "b": b"x",
        "f": pytest.approx(0.1),
        "t": True,
        "day": dt.date(2024, 1, 1),
        "ntz": ntz,
    }
    assert row.s["y"].utcoffset() == dt.timedelta(hours=2)
    assert nothing == (None,)
    assert tuple(empty) == (None,) * 10


@pytest.mark.parametrize(("keys", "key"), [((1,), (2.5,)), ((2, 0), ("c", 1)), ((2, 2), ("c", "c")), ((), ())])
def test_keys_are_any_columns(keys: Any, key: Any) -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        yield Row(k=str((key, list(rows))), n=0)

    user = user_processor(Scripted(rows=rows), columns="a int, b double, c string", keys=keys)
    shown = MiniSlot(user).batch([(1, 2.5, "c")])
    assert shown == [{"k": str((key, [Row(a=1, b=2.5, c="c")])), "n": 0}]


def test_a_processor_without_time_knows_no_time() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        yield Row(k=str(times.getCurrentProcessingTimeInMs()), n=times.getCurrentWatermarkInMs())

    assert MiniSlot(user_processor(Scripted(rows=rows))).batch([("a", 1)], 7, 5) == [{"k": "-1", "n": -1}]


def test_rows_that_are_not_used_are_skipped_and_rows_that_are_kept_are_gone() -> None:
    kept: list[Any] = []

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for old in kept:
            assert list(old) == []
        kept.append(rows)
        yield Row(k=key[0], n=next(rows).v)

    slot = MiniSlot(user_processor(Scripted(rows=rows)))
    assert [one["n"] for one in slot.batch([("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5)])] == [1, 3, 5]


def test_input_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_BLOCK_ROWS", 3)
    slot = MiniSlot(user_processor(Scripted(init=counting, rows=count)), together=10)
    assert [one["n"] for one in slot.batch([("a", n) for n in range(7)] + [("b", 1)])] == [7, 1]


def test_much_output_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_PER_BATCH", 4)

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        made = (Row(k=key[0], n=n) for n in range(next(rows).v))
        return list(made) if key[0] == "list" else made

    slot = MiniSlot(user_processor(Scripted(rows=rows)))
    given = [("a", 9), ("b", 1), ("list", 11), ("c", 4), ("d", 0), ("e", 1)]
    shown = slot.batch(given)
    assert shown == [{"k": key, "n": n} for key, many in given for n in range(many)]


def test_init_and_close_are_called_once_a_batch() -> None:
    said: list[str] = []
    processor = Scripted(
        init=lambda self, handle: said.append("init"),
        rows=lambda self, key, rows, times: said.append(key[0]) or [],
        close=lambda self: said.append("close"),
    )
    slot = MiniSlot(user_processor(processor), together=1)
    said.clear()
    slot.batch([("a", 1), ("b", 1)])
    slot.batch([])
    assert said == ["init", "a", "b", "close", "init", "close"]


def test_a_generator_has_its_own_key_as_long_as_it_runs() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(k=key[0], n=row.v)
            self.count.update((row.v,))

    slot = MiniSlot(user_processor(Scripted(init=counting, rows=rows)))
    slot.batch([("a", 1), ("a", 2), ("b", 3)])
    assert slot.of("variable.count") == {("a",): {"n": 2}, ("b",): {"n": 3}}


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(ValueError("no"), ValueError), (SystemExit(0), SystemExit), (StopIteration(), PySparkRuntimeError)],
)
def test_what_the_user_raises_stays_what_it_is(raised: BaseException, seen: type[BaseException]) -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        raise raised

    with pytest.raises(seen):
        MiniSlot(user_processor(Scripted(rows=rows))).batch([("a", 1)])


# initial state ----------------------------------------------------------------------------------------------


def test_an_initial_state_comes_before_rows() -> None:
    seen: list[Any] = []

    def initial(self: Any, key: Any, row: Any, times: Any) -> None:
        seen.append((key, row, times.getCurrentProcessingTimeInMs()))
        before = self.count.get()
        self.count.update((row.total + (before[0] if before else 0),))
        self.handle.registerTimer(row.total)
        return 5  # which is ignored

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[Row]:
        yield Row(k=key.k, n=info.getExpiryTimeInMs())

    functions = {"init": counting, "rows": count, "initial": initial, "timer": timer}
    user = user_processor(Scripted(**functions), initial="k string, total bigint", mode="processing")
    slot = MiniSlot(user, together=2)
    shown = slot.batch([("a", 1), ("d", 1), ("a", 1)], 5, initial=[("a", 10), ("b", 3), ("c", 7), ("a", 5)])
    assert shown == [{"k": "a", "n": 17}, {"k": "d", "n": 1}, {"k": "a", "n": 5}, {"k": "b", "n": 3}]
    assert seen == [
        (("a",), Row(k="a", total=10), 5),
        (("a",), Row(k="a", total=5), 5),
        (("b",), Row(k="b", total=3), 5),
        (("c",), Row(k="c", total=7), 5),
    ]
    assert slot.batch([("b", 1)], 8) == [{"k": "b", "n": 4}, {"k": "c", "n": 7}]


def test_an_initial_state_that_fails_names_its_key() -> None:
    def initial(self: Any, key: Any, row: Any, times: Any) -> None:
        raise LookupError

    user = user_processor(Scripted(initial=initial), initial="k string")
    running = start_processor(user, unasked)
    with pytest.raises(LookupError):
        list(MiniSlot(user)._calls(running, "initial", {("b",): [("b",)]}, -1, -1))
    assert running.key == ("b",)


# output ------------------------------------------------------------------------------------------------------


def native(rows: list[Row], schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([row.asDict(True) for row in rows], schema=schema)


Pair = Row("k", "n")


@pytest.mark.parametrize(
    "rows",
    [
        [Row(k="a", n=1), Row(k=None, n=2)],
        [Row(n=1, k="a"), Row(n=2, k="b")],
        [Row(k="a", n=1), Row(n=2, k="b")],
        [Pair("a", 1), Pair("b", 2)],
        [Pair("a", 1), Row(k="b", n=2)],
        [Row(k="a")],
        [Row(n=5, other="x")],
        [Row(k="a", n=1), Row(k="b")],
        [Pair("a")],
        [Row(k="a", n=1.0)],
    ],
)
def test_rows_become_what_spark_makes_of_their_dictionaries(rows: list[Row]) -> None:
    results = RowResults(struct("k string, n bigint"))
    assert not results.collect(iter(rows), "key")
    (batch,) = results.drain(lambda key: None)
    assert batch == native(rows, batch.schema)


def test_rows_in_rows() -> None:
    schema = "k string, s struct<x:int,y:array<struct<z:string>>>, m map<string,int>"
    rows = [
        Row(k="a", s=Row(y=[Row(z="q")], x=1), m={"a": 1}),
        Row(k="b", s={"x": 2}, m=None),
        Row(k="c", s=None, m={}),
        Row(k="d", s=None, m=[("a", 1)]),
    ]
    results = RowResults(struct(schema))
    results.collect(iter(rows), "key")
    (batch,) = results.drain(lambda key: None)
    assert batch == native(rows, batch.schema)
    assert batch.to_pylist()[0]["s"] == {"x": 1, "y": [{"z": "q"}]}


def test_tuples_in_rows() -> None:
    """Arrow reads them as the fields of a struct, and as the entries of a map, as which a processor sees its input."""
    rows = [Row(s=(1, "x"), a=[(2, "y")], m=[("a", (3, None))])]
    results = RowResults(
        struct("s struct<x:int,y:string>, a array<struct<x:int,y:string>>, m map<string,struct<x:int,y:int>>")
    )
    results.collect(iter(rows), "key")
    (batch,) = results.drain(lambda key: None)
    assert batch == native(rows, batch.schema)


def test_a_list_that_is_changed_after_it_was_given_out() -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        values: list[int] = []
        for row in rows:
            values.append(row.v)
            yield Row(a=values)

    slot = MiniSlot(user_processor(Scripted(rows=rows), shown="a array<bigint>"))
    assert slot.batch([("a", 1), ("a", 2)]) == [{"a": [1]}, {"a": [1, 2]}]


@pytest.mark.parametrize("shown", ["a array<bigint>, b binary", "b binary", "n struct<a:array<array<bigint>>>"])
def test_a_buffer_that_is_filled_again_for_the_next_key(shown: str) -> None:
    numbers, text = np.zeros(1, np.int64), bytearray(1)

    def rows(self: Any, key: Any, rows: Any, times: Any) -> Iterator[Row]:
        numbers[0] = text[0] = next(rows).v
        yield Row(a=numbers, b=text, n=Row(a=[numbers]))

    given = {"a": lambda v: [v], "b": lambda v: bytes([v]), "n": lambda v: {"a": [[v]]}}
    slot = MiniSlot(user_processor(Scripted(rows=rows), shown=shown))
    assert slot.batch([("a", 1), ("b", 2)]) == [{name: given[name](v) for name in struct(shown).names} for v in (1, 2)]


def test_timers_see_the_names_of_the_query() -> None:
    """Those of columns of state have no dots, and are unique whatever their case."""
    seen: list[Row] = []

    def rows(self: Any, key: Any, rows: Any, times: Any) -> list[Row]:
        self.handle.registerTimer(5)
        return []

    def timer(self: Any, key: Any, times: Any, info: Any) -> list[Row]:
        seen.append(key)
        return []

    scripted = Scripted(rows=rows, timer=timer)
    user = user_processor(scripted, columns="`user.id` string, v bigint", mode="processing")
    stored = replace(user.spec, columns=fields("user_id string, v bigint"))
    MiniSlot(dataclasses.replace(user, spec=stored)).batch([("a", 1)], 9)
    assert seen == [Row("user.id")("a")]
    assert seen[0].asDict() == {"user.id": "a"}


@pytest.mark.parametrize(
    ("wrong", "raised"),
    [
        (Row(k="a", n="x"), pa.ArrowInvalid),
        (("a", 1), AttributeError),
        (Row("a", 1), PySparkTypeError),
        (Row(k=1, n=1), pa.ArrowTypeError),
    ],
)
def test_rows_that_do_not_fit_name_their_key(wrong: Any, raised: type[Exception]) -> None:
    def rows(self: Any, key: Any, rows: Any, times: Any) -> Any:
        return [wrong if key[0] == "bad" else Row(k="a", n=1)]

    user = user_processor(Scripted(rows=rows))
    slot = MiniSlot(user)
    running = start_processor(user, unasked)
    with pytest.raises(raised):
        list(slot._calls(running, "rows", {(key,): [(key, 1)] for key in ("a", "bad", "b")}, -1, -1))
    assert running.key == ("bad",)


@pytest.mark.parametrize("nan", [math.nan, {"f": math.nan}, [1.0, math.nan]])
def test_each_row_of_a_key_with_nan_comes_with_a_call(nan: Any) -> None:
    assert [list(rows) for rows in row_iterators(("a", 1.0, {"f": None}), "xyz")] == [["x", "y", "z"]]
    assert [list(rows) for rows in row_iterators(("a", nan), "xyz")] == [["x"], ["y"], ["z"]]

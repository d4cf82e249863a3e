"""Processors that see pandas frames."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkValueError
from pyspark.sql.conversion import ArrowBatchTransformer, PandasToArrowConversion
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType
from pyspark.worker import RunnerConf

from millpond.worker.processors import frames as frames_module
from millpond.worker.processors.frames import FrameResults, Frames
from millpond.worker.processors.start import start_processor
from tests.worker.processors.mini_slot import MiniSlot, Scripted, struct, unasked, user_processor

ZONE = {"spark.sql.session.timeZone": "Europe/Berlin"}


def native(batch: pa.RecordBatch, keys: int, most: int) -> list[tuple[Any, list[pd.DataFrame]]]:
    """The frames of each key as Spark's worker makes them: row by row, each frame from Python's values."""
    series = ArrowBatchTransformer.to_pandas(batch, timezone="Europe/Berlin")
    rows = list(pd.concat(series, axis=1).itertuples(index=False))
    made = []
    for key, group in itertools.groupby(rows, lambda row: tuple(row[:keys])):
        some = list(group)
        parts = [pd.DataFrame(some[at : at + most]) for at in range(0, len(some), most)]
        made.append((key, [part.iloc[:, list(range(keys, batch.num_columns))] for part in parts]))
    return made


UTC = dt.UTC
AT = [dt.datetime(2024, 7, 1, 12, n, tzinfo=UTC) for n in range(6)]
COLUMNS: dict[str, list[Any]] = {
    "tinyint": [1, 2, 3, 4, 5, 6],
    "int": [1, None, 3, 4, None, None],
    "bigint": [2**60 + n for n in range(6)],
    "float": [0.1, None, 3, 4, 5, 6],
    "double": [0.1, float("nan"), 3, 4, 5, None],
    "boolean": [True, False, True, True, True, False],
    "string": ["a", None, "c", "d", "e", None],
    "binary": [b"a", None, b"c", b"d", b"e", None],
    "date": [AT[0].date(), None, AT[0].date(), AT[0].date(), AT[0].date(), None],
    "timestamp": [AT[0], None, AT[2], AT[3], AT[4], None],
    "timestamp_ntz": [one.replace(tzinfo=None) for one in AT],
    "decimal(10,2)": [Decimal("1.50"), None, Decimal(3), Decimal(4), Decimal(5), None],
    "array<int>": [[1, 2], None, [], [4], [5], None],
    "struct<x:int,y:string>": [{"x": 1, "y": "a"}, None, {"x": None, "y": None}, {"x": 4, "y": "d"}, {"x": 5}, None],
    "map<string,int>": [[("a", 1)], None, [], [("d", 4)], [("e", 5)], None],
}
WITHOUT_SLICES = {"boolean": [True, None, False, True, True, None]}


def compared(types: list[str], columns: list[list[Any]], most: int = 2) -> bool:
    """Whether frames were slices; asserts that they are as Spark's."""
    ddl = ", ".join(["k string", *(f"c{n} {kind}" for n, kind in enumerate(types))])
    schema = to_arrow_schema(struct(ddl), timezone="Europe/Berlin")
    lists = [["a", "a", "a", "b", "c", "c"], *columns]
    batch = pa.record_batch(
        [pa.array(one, field.type) for one, field in zip(lists, schema, strict=True)], schema=schema
    )
    conf = RunnerConf(ZONE | {"spark.sql.execution.arrow.maxRecordsPerBatch": str(most)})
    frames = Frames(struct(ddl), (0,), tuple(range(1, len(types) + 1)), conf)
    sliced: list[bool] = []
    chosen = frames._built_per_key
    frames._built_per_key = lambda series: sliced.append(False) or chosen(series)
    got = [
        (key, list(parts))
        for key, parts in frames.groups([batch.column(0).take([0, 3, 4])], [3, 1, 2], (one for one in [batch]))
    ]
    wanted = native(batch, 1, most)
    assert [key for key, _ in got] == [key for key, _ in wanted]
    for (_, mine), (_, theirs) in zip(got, wanted, strict=True):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            pd.testing.assert_frame_equal(one, other, check_exact=True)
            assert list(one.index) == list(range(len(one)))
            assert [list(map(type, one[name])) for name in one] == [list(map(type, other[name])) for name in other]
    return not sliced


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_is_as_in_spark(kind: str) -> None:
    assert compared([kind], [COLUMNS[kind]])


@pytest.mark.parametrize("kind", WITHOUT_SLICES)
def test_a_column_whose_type_depends_on_the_frame_is_as_in_spark(kind: str) -> None:
    assert not compared([kind, "int"], [WITHOUT_SLICES[kind], COLUMNS["int"]])


def test_many_columns_and_one_frame_a_key() -> None:
    assert compared(list(COLUMNS), list(COLUMNS.values()), most=100)
    assert compared(list(COLUMNS), list(COLUMNS.values()), most=1)


def counting(self: Any, handle: Any) -> None:
    self.count = handle.getValueState("count", "n bigint")


def count(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
    before = self.count.get()
    total = (before[0] if before else 0) + sum(map(len, frames))
    self.count.update((total,))
    yield pd.DataFrame({"k": [key[0]], "n": [total]})


def test_counts_go_on_from_batch_to_batch() -> None:
    slot = MiniSlot(user_processor(Scripted(init=counting, rows=count), pandas=True))
    assert slot.batch([(f"k{n % 4}", n) for n in range(10)]) == [{"k": f"k{n}", "n": 3 - n // 2} for n in range(4)]
    assert slot.batch([("k0", 1), (None, 1)]) == [{"k": "k0", "n": 4}, {"k": None, "n": 1}]


def test_a_frame_that_the_user_changes() -> None:
    seen: list[Any] = []

    def rows(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
        for frame in frames:
            seen.append(frame.v.tolist())
            frame.iloc[:, 0] = -1
            frame["v"] = frame["v"] * 2
            frame["w"] = 5
            frame.index = frame.index + 7
        yield from ()

    slot = MiniSlot(user_processor(Scripted(rows=rows), pandas=True, execution_arrow_maxRecordsPerBatch="2"))
    slot.batch([("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)])
    assert seen == [[1, 2], [3], [4, 5]]


def test_names_that_are_none_in_python() -> None:
    names: list[Any] = []

    def rows(self: Any, key: Any, frames: Any, times: Any) -> Any:
        names.extend(frame.columns.tolist() for frame in frames)
        return []

    user = user_processor(Scripted(rows=rows), columns="`the k` string, `a b` int, class int, fine int", pandas=True)
    MiniSlot(user).batch([("a", 1, 2, 3)])
    assert names == [["_0", "_1", "_2", "fine"]]


@pytest.mark.parametrize(
    ("keys", "beside", "key", "names"),
    [
        ((2,), 0, ("c",), ["a", "b", "c"]),
        ((2, 0), 0, ("c", 1), ["a", "b", "c"]),
        ((0, 2, 2), 1, (1, "c", "c"), ["b", "c"]),
        ((), 0, (), ["a", "b", "c"]),
    ],
)
def test_frames_have_the_columns_of_the_data(keys: Any, beside: int, key: Any, names: list[str]) -> None:
    seen: list[Any] = []

    def rows(self: Any, key: Any, frames: Any, times: Any) -> Any:
        seen.extend((key, frame.columns.tolist(), frame.c.tolist()) for frame in frames)
        return []

    columns = "a int, b double, c string"
    user = user_processor(Scripted(rows=rows), columns=columns, keys=keys, beside=beside, pandas=True)
    MiniSlot(user).batch([(1, 0.5, "c"), (1, 0.25, "c")])
    assert seen == [(key, names, ["c", "c"])]


def test_a_processor_that_sees_the_key_alone() -> None:
    def rows(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [key[0]], "n": [sum(frame.shape[0] for frame in frames)]})

    user = user_processor(Scripted(rows=rows), columns="k string", pandas=True)
    assert MiniSlot(user).batch([("a",), ("a",), ("b",)]) == [{"k": "a", "n": 2}, {"k": "b", "n": 1}]


def test_frames_are_bounded_in_bytes() -> None:
    def rows(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [str([len(frame) for frame in frames])], "n": [0]})

    user = user_processor(
        Scripted(rows=rows), columns="k bigint, v bigint", pandas=True, execution_arrow_maxBytesPerBatch="32"
    )
    assert MiniSlot(user).batch([(1, n) for n in range(5)]) == [{"k": "[2, 2, 1]", "n": 0}]


def test_an_initial_state_comes_in_frames() -> None:
    seen: list[Any] = []

    def initial(self: Any, key: Any, frame: Any, times: Any) -> None:
        seen.append((key, frame.to_dict("list")))
        self.count.update((len(seen),))

    user = user_processor(
        Scripted(init=counting, rows=count, initial=initial),
        pandas=True,
        initial="k string, total int",
        execution_arrow_maxRecordsPerBatch="2",
    )
    slot = MiniSlot(user)
    assert slot.batch([("b", 1)], initial=[("a", 1), ("b", 2), ("a", 3), ("a", 4)]) == [{"k": "b", "n": 4}]
    assert seen == [
        (("a",), {"k": ["a", "a"], "total": [1, 3]}),
        (("a",), {"k": ["a"], "total": [4]}),
        (("b",), {"k": ["b"], "total": [2]}),
    ]
    assert slot.of("variable.count") == {("a",): {"n": 2}, ("b",): {"n": 4}}


def test_timers_give_frames() -> None:
    def rows(self: Any, key: Any, frames: Any, times: Any) -> Any:
        self.handle.registerTimer(5)
        return []

    def timer(self: Any, key: Any, times: Any, info: Any) -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"n": [info.getExpiryTimeInMs()], "k": [key.k]})

    slot = MiniSlot(user_processor(Scripted(rows=rows, timer=timer), pandas=True, mode="processing"))
    assert slot.batch([("a", 1)], 9) == [{"k": "a", "n": 5}]


def test_a_buffer_that_is_filled_again_for_the_next_frame() -> None:
    text = bytearray(1)

    def rows(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
        for number in next(frames)["v"]:
            text[0] = number
            yield pd.DataFrame({"b": [text]})

    slot = MiniSlot(user_processor(Scripted(rows=rows), shown="b binary", pandas=True))
    assert slot.batch([("a", 1), ("a", 2), ("b", 3)]) == [{"b": bytes([number])} for number in (1, 2, 3)]


# output ----------------------------------------------------------------------------------------------------------


def results(frames: list[pd.DataFrame], shown: str) -> pa.Table:
    made = FrameResults(struct(shown), RunnerConf(ZONE))
    made.collect(iter(frames), "key")
    return pa.Table.from_batches(list(made.drain(lambda key: None)))


def natively(frames: list[pd.DataFrame], shown: str) -> pa.Table:
    schema = StructType([StructField("_0", struct(shown))])
    made = [
        PandasToArrowConversion.convert(
            [frame], schema, timezone="Europe/Berlin", safecheck=False, arrow_cast=True, assign_cols_by_name=True
        )
        for frame in frames
    ]
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(one.column(0)) for one in made])


NAIVE = pd.Timestamp("2024-07-01 12:00")


@pytest.mark.parametrize(
    ("shown", "frames"),
    [
        ("a int, b string", [{"a": [1, 2], "b": ["x", None]}, {"a": [3], "b": ["y"]}, {"b": ["z"], "a": [4]}]),
        ("a int, b string", [{"a": [1], "b": ["x"]}, {"a": [1.0, None], "b": ["x", "y"]}, {"a": [1], "b": [None]}]),
        ("a bigint", [{"a": [2**60 + 1]}, {"a": [None]}, {"a": [2.0]}, {"a": [2**60 + 3]}]),
        ("a int", [{"a": [1, 2]}, {"a": ["3"]}, {"a": [4]}]),
        ("a double", [{"a": [1]}, {"a": ["2.5"]}, {"a": ["3"]}, {"a": [4.5]}]),
        ("a int", [{"a": pd.Series([1], dtype=object)}, {"a": pd.Series(["3"], dtype=object)}]),
        ("a timestamp, b date", [{"a": [NAIVE], "b": [NAIVE.date()]}, {"a": [NAIVE], "b": [None]}]),
        ("a timestamp", [{"a": [NAIVE]}, {"a": [NAIVE.tz_localize("UTC")]}, {"a": [NAIVE.tz_localize("UTC")]}]),
        ("a int", [{"a": pd.Series([1], dtype="Int64")}, {"a": pd.Series([None], dtype="Int64")}]),
        ("a string", [{"a": pd.Series(["x"], dtype="category")}, {"a": pd.Series(["y"], dtype="category")}]),
        ("a array<int>", [{"a": [[1]]}, {"a": [[2, 3]]}]),
        ("a int, b int", [{0: [1], 1: [2]}, {0: [3], 1: [4]}]),
        ("a int", [{"a": []}, {"a": [1]}, {}]),
        ("a decimal(10,2)", [{"a": [Decimal("1.5")]}, {"a": [Decimal("2.25")]}]),
    ],
)
def test_frames_become_what_spark_makes_of_each(shown: str, frames: list[Any]) -> None:
    made = [pd.DataFrame(one) for one in frames]
    assert results(made, shown).equals(natively(made, shown))


def test_a_frame_that_is_changed_after_it_was_given_out() -> None:
    def rows(self: Any, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
        frame = pd.DataFrame({"k": ["a"], "n": [0]})
        for n in range(3):
            frame.loc[0, "n"] = n
            yield frame

    slot = MiniSlot(user_processor(Scripted(rows=rows), pandas=True))
    assert [one["n"] for one in slot.batch([("a", 1)])] == [0, 1, 2]


def test_much_output_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "ROWS_PER_BATCH", 4)

    def rows(self: Any, key: Any, frames: Any, times: Any) -> Any:
        return [pd.DataFrame({"k": ["a"], "n": [n]}) for n in range(11)]

    slot = MiniSlot(user_processor(Scripted(rows=rows), pandas=True))
    assert [one["n"] for one in slot.batch([("a", 1), ("b", 1)])] == 2 * list(range(11))


def test_what_is_no_frame() -> None:
    slot = MiniSlot(user_processor(Scripted(rows=lambda self, key, frames, times: [1]), pandas=True))
    with pytest.raises(PySparkValueError, match="Invalid return type"):
        slot.batch([("a", 1)])


def test_frames_that_do_not_fit_name_their_key() -> None:
    def rows(self: Any, key: Any, frames: Any, times: Any) -> Any:
        return [pd.DataFrame({"k": ["a"], "n": [object() if key[0] == "bad" else 1]})]

    user = user_processor(Scripted(rows=rows), pandas=True)
    running = start_processor(user, unasked)
    slot = MiniSlot(user)
    with pytest.raises(PySparkValueError):
        list(slot._calls(running, "rows", {(key,): [(key, 1)] for key in ("a", "bad", "b")}, -1, -1))
    assert running.key == ("bad",)


def test_times_in_keys_are_the_clocks_of_the_session_for_timers_too() -> None:
    """As for rows; in structs too, and null."""
    seen: list[Any] = []

    def rows(self: Scripted, key: Any, frames: Any, times: Any) -> Iterator[pd.DataFrame]:
        self.handle.registerTimer(1)
        seen.append(("rows", key[0], key[1]["t"]))
        return iter([])

    def timer(self: Scripted, key: Any, times: Any, info: Any) -> Iterator[pd.DataFrame]:
        seen.append(("timer", key.at, key.st.t))
        return iter([])

    user = user_processor(
        Scripted(rows=rows, timer=timer),
        columns="at timestamp, st struct<t: timestamp, n: int>",
        keys=(0, 1),
        mode="event",
        pandas=True,
        session_timeZone="America/New_York",
    )
    slot = MiniSlot(user)
    keys = [(AT[0], HashableDict(t=AT[1], n=1)), (AT[2], HashableDict(t=None, n=2))]
    slot.batch(keys, watermark=5)
    clock = dt.datetime(2024, 7, 1, 8, 0)
    expected = [(clock, clock.replace(minute=1)), (clock.replace(minute=2), None)]
    assert [one[1:] for one in seen if one[0] == "rows"] == expected
    assert [one[1:] for one in seen if one[0] == "timer"] == expected


class HashableDict(dict[str, Any]):
    """A struct that may be a key of `MiniSlot`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

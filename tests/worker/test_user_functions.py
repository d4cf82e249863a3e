"""Functions of the user over groups as slots give them, without Spark's JVM."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import DataType, DoubleType, LongType, StringType, StructField, StructType, TimestampType

from millpond.tasks.user_functions import Kind, UserFunction, UserFunctions
from millpond.worker.user_functions import GroupCaller

UTC = pa.timestamp("us", tz="UTC")
ROW = pa.struct([("c0", pa.int64()), ("c1", UTC)])
AT = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
GROUPS = [
    [{"c0": 1, "c1": AT}, {"c0": None, "c1": None}],
    [{"c0": n, "c1": AT} for n in range(7)],
    [{"c0": 5, "c1": AT}],
]


def function(kind: Kind, code: Callable[..., Any], result: DataType, *arguments: int, **keywords: int) -> UserFunction:
    return UserFunction("f", kind, cloudpickle.dumps((code, result)), arguments, tuple(keywords.items()))


def batch(groups: list[Any] = GROUPS) -> pa.RecordBatch:
    """Keys and counts of groups with a list of their rows, cut out of a longer one."""
    groups = [[{"c0": -1, "c1": None}], *groups, []]
    columns = [pa.array([f"k{n}" for n in range(len(groups))]), pa.array([len(group) for group in groups])]
    whole = pa.RecordBatch.from_arrays([*columns, pa.array(groups, pa.list_(ROW))], ["k", "n", "rows"])
    return whole.slice(1, len(groups) - 2)


def struct(*types: DataType) -> StructType:
    made = StructType()
    for number, one in enumerate(types):
        made.add(f"_{number}", one)
    return made


CONF = {"spark.sql.session.timeZone": "Europe/Berlin", "spark.sql.execution.arrow.maxRecordsPerBatch": "3"}
COLUMNS = struct(LongType(), TimestampType())


def arrow_sum(values: pa.Array, at: pa.Array) -> Any:
    assert at.type == pa.timestamp("us", tz="Europe/Berlin")
    return pc.sum(values)


def sizes(parts: Iterator[pa.Array]) -> int:
    return int("".join(str(len(part)) for part in parts))


def test_pieces_are_bounded_in_bytes() -> None:
    one = function(Kind.AGGREGATE_ARROW_PIECES, sizes, LongType(), 0)
    conf = CONF | {"spark.sql.execution.arrow.maxBytesPerBatch": "30"}  # a row has 16, and some bits for nulls
    calls = UserFunctions("t", (one,), COLUMNS, struct(StringType(), LongType()), (-1,), conf)
    (result,) = GroupCaller(calls)(batch())
    assert result.column(1).to_pylist() == [2, 2221, 1]


def test_aggregates_of_several_kinds() -> None:
    functions = (
        function(Kind.AGGREGATE_PANDAS, lambda v, at: v.mean() + at.notna().sum(), DoubleType(), 0, at=1),
        function(Kind.AGGREGATE_PANDAS, lambda at: at.max(), TimestampType(), 1),
        function(Kind.AGGREGATE_ARROW, arrow_sum, LongType(), 0, 1),
        function(Kind.AGGREGATE_ARROW_PIECES, sizes, LongType(), 0),
        function(Kind.AGGREGATE_PANDAS, lambda v: str(v.dtype), StringType(), 0),
    )
    shown = struct(StringType(), DoubleType(), LongType(), TimestampType(), LongType(), LongType(), StringType())
    calls = UserFunctions("t", functions, COLUMNS, shown, (-1, 1, -2, -3, -4, -5), CONF)
    (result,) = GroupCaller(pickle.loads(pickle.dumps(calls)))(batch())
    assert result.schema == GroupCaller(calls).schema
    assert result.column(3).type == UTC
    assert list(map(tuple, (row.values() for row in result.to_pylist()))) == [
        ("k1", 2.0, 2, AT, 1, 2, "float64"),
        ("k2", 10.0, 7, AT, 21, 331, "int64"),
        ("k3", 6.0, 1, AT, 5, 1, "int64"),
    ]
    assert list(GroupCaller(calls)(batch([]))) == []


def maps(kind: Kind, code: Callable[..., Any], *shown: DataType) -> UserFunctions:
    columns = StructType().add("k", StringType()).add("n", LongType()).add("v", LongType()).add("at", TimestampType())
    one = function(kind, code, struct(*shown), 5, 2, 0, 1, 2, 3)
    return UserFunctions("t", (one,), columns, struct(*shown), (), CONF)


def frames(key: tuple[Any, ...], rows: pd.DataFrame) -> pd.DataFrame:
    assert list(rows.columns) == ["v", "at"]
    return pd.DataFrame({"_1": rows["v"], "_0": key[0]})[: len(rows) - 1]


def pieces(key: tuple[Any, ...], parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        yield pa.RecordBatch.from_arrays([pa.array([key[0].as_py()]), pa.array([part.num_rows])], ["_0", "_1"])


@pytest.mark.parametrize(
    ("kind", "code", "wanted"),
    [
        (Kind.MAP_PANDAS, frames, [("k1", 1), *(("k2", n) for n in range(6))]),
        (Kind.MAP_ARROW_PIECES, pieces, [("k1", 2), ("k2", 3), ("k2", 3), ("k2", 1), ("k3", 1)]),
        (Kind.MAP_ARROW, lambda rows: pa.table({"_0": ["x"], "_1": [len(rows)]}), [("x", 2), ("x", 7), ("x", 1)]),
        (Kind.MAP_PANDAS_PIECES, lambda parts: (pd.DataFrame({"_0": "x", "_1": p["v"]})[:1] for p in parts), None),
    ],
)
def test_groups_to_rows(kind: Kind, code: Callable[..., Any], wanted: list[Any] | None) -> None:
    rows = [
        row for result in GroupCaller(maps(kind, code, StringType(), LongType()))(batch()) for row in result.to_pylist()
    ]
    assert [tuple(row.values()) for row in rows] == (wanted or [("x", n) for n in (1, 0, 3, 6, 5)])


def test_results_travel_in_batches_that_are_not_too_small() -> None:
    many = batch([[{"c0": n, "c1": AT}] for n in range(25_000)])
    mapped = maps(Kind.MAP_ARROW, lambda rows: rows.select(["v"]).rename_columns(["_0"]), LongType())
    results = list(GroupCaller(mapped)(many))
    assert [result.num_rows for result in results] == [10_000, 10_000, 5_000]
    assert results[2].column(0).to_pylist() == list(range(20_000, 25_000))


def test_what_functions_raise_comes_out() -> None:
    with pytest.raises(ZeroDivisionError):
        list(GroupCaller(maps(Kind.MAP_PANDAS, lambda rows: 1 // 0, LongType()))(batch()))
    with pytest.raises(PySparkRuntimeError, match="RESULT_COLUMN"):
        list(GroupCaller(maps(Kind.MAP_PANDAS, lambda rows: rows, LongType()))(batch()))


FULL = StructType([StructField("a", LongType(), False)])
"""A struct whose field is never null, although the struct may be."""


def full_arrow(rows: Any) -> pa.Table:
    assert rows.schema.field("v").type == pa.struct([pa.field("a", pa.int64(), nullable=False)])
    return pa.table({"_0": rows["v"]})


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.AGGREGATE_ARROW, lambda v: v.null_count),
        (Kind.MAP_PANDAS, lambda rows: pd.DataFrame({"_0": [rows.v[0]]})),
        (Kind.MAP_ARROW, full_arrow),
    ],
)
def test_null_structs_of_fields_that_are_never_null(kind: Kind, code: Callable[..., Any]) -> None:
    """As keys, in rows and in results; below such a struct, a slot's columns have nulls."""
    if kind.maps:
        one = function(kind, code, struct(FULL), 3, 1, 0, 1)
        calls = UserFunctions("t", (one,), StructType().add("k", FULL).add("v", FULL), struct(FULL))
    else:  # the result is the key
        calls = UserFunctions("t", (function(kind, code, LongType(), 0),), struct(FULL), struct(FULL), (0,))
    null = pa.StructArray.from_arrays([pa.nulls(1, pa.int64())], ["a"], mask=pa.array([True]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.StructArray.from_arrays([null], ["c0"]))
    (result,) = GroupCaller(calls)(pa.RecordBatch.from_arrays([null, lists], ["k", "rows"]))
    assert result.to_pylist() == [{"_0": None}]

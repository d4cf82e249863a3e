"""Columns of a slot under the types that Spark declares."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType, TimestampType
from pyspark.worker import RunnerConf

from millpond.operators.columns.nested import pack, unpack
from millpond.spec.types import parse_type
from millpond.tasks.ddl import ddl
from millpond.worker.processors.casts import Typed
from millpond.worker.processors.frames import Frames
from millpond.worker.processors.group_frames import GroupFrames
from millpond.worker.processors.rows import Rows

ZONE = "Europe/Berlin"
FULL = StructType([StructField("a", LongType(), False), StructField("at", TimestampType(), False)])
"""A struct whose fields are never null, although the struct may be."""
COLUMNS = StructType(
    [
        StructField("k", StringType()),
        StructField("w", FULL),
        StructField("l", ArrayType(FULL)),
        StructField("m", MapType(StringType(), FULL)),
        StructField("n", StructType([StructField("w", FULL)]), False),
    ]
)
VALUE = {"a": 1, "at": dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)}
ROWS: list[dict[str, Any]] = [
    {"k": "a", "w": VALUE, "l": [VALUE, None], "m": [("x", VALUE), ("y", None)], "n": {"w": VALUE}},
    {"k": "a", "w": None, "l": None, "m": None, "n": {"w": None}},
]


def from_slot(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    """Columns as a slot decodes them: the fields of a null struct are null."""
    dtype = parse_type(ddl(COLUMNS))
    ends, data = pack(pa.array(rows, dtype.arrow), dtype)
    return pa.RecordBatch.from_struct_array(unpack(data, ends, dtype))


@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1], ROWS[1:]])
def test_null_structs_of_fields_that_are_never_null(rows: list[dict[str, Any]]) -> None:
    batch = from_slot(rows)
    assert batch.column(1).field(0).null_count == 1
    typed = Typed(COLUMNS, ZONE)(batch.columns)
    typed.validate(full=True)
    assert typed.schema == to_arrow_schema(COLUMNS, timezone=ZONE)
    assert typed.to_pylist() == rows
    assert Typed(COLUMNS, ZONE)(batch.slice(1).columns).to_pylist() == rows[1:]


def test_some_columns() -> None:
    batch = from_slot(ROWS)
    typed = Typed(COLUMNS, ZONE)([batch.column(1)], [1])
    assert typed.to_pylist() == [{"w": row["w"]} for row in ROWS]


def test_another_layout_is_converted() -> None:
    small = pa.array([{"a": 1, "at": None}], pa.struct([("a", pa.int8()), ("at", pa.timestamp("s", "UTC"))]))
    assert Typed(StructType([StructField("w", FULL)]), ZONE)([small]).to_pylist() == [{"w": {"a": 1, "at": None}}]


@pytest.mark.parametrize("frames", [Frames, GroupFrames])
def test_frames(frames: type[Frames]) -> None:
    batch = from_slot(ROWS)
    given = frames(COLUMNS, (0,), range(5), RunnerConf({"spark.sql.session.timeZone": ZONE}))
    ((key, (frame,)),) = [
        (key, list(parts)) for key, parts in given.groups([pa.array(["a"])], [2], (piece for piece in [batch]))
    ]
    assert key == ("a",)
    assert frame.w[0]["a"] == frame.l[0][0]["a"] == 1
    assert frame.w[1] is frame.l[0][1] is frame.l[1] is frame.m[1] is None


def test_rows() -> None:
    batch = from_slot(ROWS)
    given = Rows(COLUMNS, (1,), ZONE)
    groups = given.groups([batch.column(1)], [1, 1], (piece for piece in [batch]))
    assert [(key, [row.asDict() for row in rows]) for key, rows in groups] == [((row["w"],), [row]) for row in ROWS]

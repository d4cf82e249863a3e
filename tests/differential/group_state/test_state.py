"""The state of a group: what is kept of what users give, and what they see of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import BooleanType, IntegerType, StringType, StructField, StructType, TimestampType

from tests.differential.data import write
from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script
from tests.differential.harness import Batches, run, stream
from tests.differential.processors.checks import DDL, ONCE, Turn, compare, script, spoken


@pytest.mark.parametrize("mode", ["update", "append"])
def test_operations(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    """Read, written, removed, within a call, from batch to batch, across a restart."""
    told = "state.exists, state.getOption, state.get, str(state), state.hasTimedOut, state.oldTimeoutTimestamp"
    first = script(
        ("a", told.replace("state.get,", "")),
        ("a", f"state.update((1,)), {told}"),
        ("b", f"state.update((2,)), state.remove(), {told}"),
        ("b", "state.exists, state.getOption"),
        ("c", "state.update((3,)), state.update((4,)), state.getCurrentProcessingTimeMs() > 10**12"),
        ("d", "state.get"),
        ("e", "state.remove(), state.update((5,))"),
        (None, "state.update((6,))"),
    )
    second = script(
        ("a", told),
        ("a", "state.remove()"),
        ("b", "state.getOption"),
        ("c", f"{told}, state.update((None,))"),
        ("d", "state.exists"),
        ("e", told),
        (None, told),
    )
    third = script(*((key, "state.getOption") for key in ("a", "b", "c", "d", "e", None)))
    query = grouped(Script(), mode=mode)
    found = compare(spark, tmp_path, [Turn(query, [first, second], mode=mode), Turn(query, [third], mode=mode)])
    assert spoken(found, "a")[1] == ["(True, (1,), (1,), 'GroupState((1,))', False, -1)", "None"]
    assert spoken(found, "c")[2] == ["(None,)"]


KINDS = (IntegerType(), BooleanType(), TimestampType())
LENGTH = "STRUCT_ARRAY_LENGTH_MISMATCH"
TYPED = (
    "i8 tinyint, i64 bigint, f32 float, d double, b boolean, s string, bin binary, dec decimal(10, 2), day date, "
    "ts timestamp, tsn timestamp_ntz, st struct<x: int, y: struct<z: string>>"
)
WHOLE = (
    "(1, 2**60 + 1, 0.1, 0.1, True, 'ö', bytes([0, 1]), Decimal('1.25'), dt.date(2024, 2, 29), "
    "dt.datetime(2024, 3, 10, 12, 30, 0, 5), dt.datetime(2024, 3, 10, 12, 30, 0, 5), "
    "Row(x=1, y=Row(z='z')))"
)


def test_all_types(spark: SparkSession, tmp_path: Path) -> None:
    """State keeps each type, nulls, and values that do not fit; and users may change the values that they get."""
    numpy = "(__import__('numpy').int8(3), __import__('numpy').int64(4), __import__('numpy').float32(0.5))"
    pandas = "(__import__('pandas').Timestamp(2024, 1, 2, 3),)"
    first = script(
        ("whole", f"state.update({WHOLE}), state.get"),
        ("nulls", "state.update((None,) * 12), state.get"),
        ("wrong", "state.update(('x', 'x', 'x', 1, 1, 1, 1, 1, None, None, None, None)), state.get"),
        ("wraps", "state.update((300, 2**63, 1e300, nan, *[None] * 8)), state.get"),
        ("numpy", f"state.update({numpy} + (None,) * 9), state.get"),
        ("pandas", f"state.update((None,) * 9 + {pandas} * 2 + (None,)), state.get"),
        ("tuple", "state.update([None] * 11 + [(1, ('z',))]), state.get"),
        ("part", "state.update([None] * 11 + [dict(x=1)]), state.get"),
        ("none", "state.update(None)"),
        ("number", "state.update(1)"),
    )
    keys = [key for key in first.column("k").to_pylist() if key not in ("none", "number")]
    second = script(*((key, "state.getOption") for key in keys))
    query = grouped(Script(), state=TYPED)
    found = compare(spark, tmp_path, [Turn(query, [first, second]), Turn(query, [second])])
    assert spoken(found, "whole")[2][0].endswith("y=Row(z='z')))")


def test_lists_and_maps(spark: SparkSession, tmp_path: Path) -> None:
    """Spark 4.3 fails as soon as a state has some. One that is not set again stays, unless a timeout is set."""
    change = "state.get[0].append(2)"
    tables = [
        script(("a", "state.update(([1], {'x': 1}))"), ("b", "state.update(([None], None))")),
        script(("a", change), ("b", f"{change}, state.setTimeoutDuration(10**6)")),
        script(*((key, "state.getOption") for key in "ab")),
    ]
    query = grouped(Script(), state="a array<int>, m map<string, int>", timeout="ProcessingTimeTimeout")
    found: Batches = {}
    for number, table in enumerate(tables):
        write(tmp_path / "in", number, table)
        df = query(stream(spark, tmp_path / "in", DDL))
        run(df, "update", tmp_path / "ours", ours=True, into=found, trigger=ONCE)
    assert (spoken(found, "a")[2], spoken(found, "b")[2]) == (["([1], {'x': 1})"], ["([None, 2], None)"])


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        ("state.update((1, 2))", LENGTH),
        ("state.update(())", LENGTH),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_state_that_cannot_be_kept(spark: SparkSession, tmp_path: Path, wrong: str, fails: str) -> None:
    """The query fails; with a function that does not do so, it goes on as if nothing had been."""
    query, again = grouped(Script(strict=True)), grouped(Script())
    turns = [
        Turn(again, [script(("a", "state.update((1,))"))]),
        Turn(query, [script(("a", "state.update((2,))"), ("b", wrong))], fails=fails),
    ]
    compare(spark, tmp_path, turns)


def test_fields_that_are_never_null(spark: SparkSession, tmp_path: Path) -> None:
    """Numbers and times become zero instead, what has a length is an error."""
    whole = StructType([StructField(name, kind, False) for name, kind in zip("nbt", KINDS, strict=True)])
    first = script(("a", "state.update((1, True, None)), state.get"), ("b", "state.update((None, None, None))"))
    query = grouped(Script(), state=whole)
    compare(spark, tmp_path, [Turn(query, [first, script(("a", "state.get"), ("b", "state.get"))])])


def test_texts_that_are_never_null(spark: SparkSession, tmp_path: Path) -> None:
    query = grouped(Script(), state=StructType([StructField("s", StringType(), False)]))
    null = "EXPRESSION_DECODING_FAILED"
    ours = "The 0th field 's' of input row cannot be null."
    turn = Turn(query, [script(("b", "state.update((None,))"))], fails=null, fails_ours=ours)
    compare(spark, tmp_path, [Turn(query, [script(("a", "state.update(('x',))"))]), turn])

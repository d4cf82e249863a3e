"""Python objects of a table as Arrow columns: without loss, at any depth."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from millpond.lookup.convert import convert_column, from_objects
from millpond.spec.types import parse_type


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        ("array<bigint>", [[1, None, 2], None, []]),
        ("array<array<int>>", [[[1], []], [None], None]),
        ("struct<a:bigint,b:string>", [{"a": 1, "b": "x"}, None, {"a": None, "b": None}]),
        ("array<struct<a:array<double>>>", [[{"a": [0.5]}, {"a": None}, None]]),
        ("map<string,int>", [{"a": 1}, None]),
    ],
)
def test_nested_values_come_back(type_: str, values: list[Any]) -> None:
    made = from_objects(values, parse_type(type_).arrow)
    made.validate(full=True)
    expected = [list(value.items()) if type_.startswith("map") and value else value for value in values]
    assert made.to_pylist() == expected


def test_other_fields_are_left_out_and_missing_ones_are_null() -> None:
    assert from_objects([{"c": 1}], parse_type("struct<a:int>").arrow).to_pylist() == [{"a": None}]


@pytest.mark.parametrize(
    ("type_", "right", "wrong"),
    [
        ("array<bigint>", [2], [Decimal("1.9")]),
        ("array<bigint>", [Decimal("2.0")], [1.9]),
        ("struct<a:bigint>", {"a": 1}, {"a": 1.9}),
        ("struct<at:timestamp>", {"at": None}, {"at": 1_700_000_000}),
        ("array<date>", [None], [19_000]),
        ("array<float>", [0.5], [1e300]),
        ("timestamp", None, 1_700_000_000),
    ],
)
def test_values_that_would_lose_something_are_unreadable(type_: str, right: Any, wrong: Any) -> None:
    column, unreadable = convert_column([right, wrong], pa.field("c", parse_type(type_).arrow), from_objects)
    assert column.to_pylist() == [right, None]
    assert list(unreadable) == [1]

"""Nested values in state: what comes out is what went in, and their byte strings are equal and ordered as they are."""

from __future__ import annotations

from functools import cmp_to_key
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.operators.columns.encode import operand
from millpond.operators.columns.nested import pack, unpack
from millpond.operators.columns.order_keys import order_keys
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType, evolves, parse_type
from tests.operators.rig import Rig, as_rows, fields, normal, record_batch
from tests.operators.values import TYPES, values

STRUCT = "struct<a:bigint,s:string,d:double,t:timestamp,n:struct<x:decimal(38,2),y:binary>,b:boolean>"
DEEP = "array<struct<a:array<string>,s:struct<x:array<double>,b:boolean>,d:decimal(9,2)>>"
MAP = "map<string,array<struct<x:float,y:map<int,string>>>>"
ORDERED = [*TYPES, STRUCT, DEEP, "array<int>", "array<array<binary>>", "struct<x:float,l:array<string>>"]
NESTED = [ddl for ddl in ORDERED if parse_type(ddl).nested] + [MAP, "struct<>", "array<struct<>>"]


def arrays(ddl: str) -> st.SearchStrategy[pa.Array]:
    """Arrays of a type that begin and end within others, some of whose nulls hide values."""
    dtype = parse_type(ddl)

    def cut(rows: list[Any], start: int, hidden: set[int]) -> pa.Array:
        array = pa.array(rows, dtype.arrow)
        if pa.types.is_list(array.type) and len(rows) and hidden:
            valid = np.array([not (row is None or i in hidden) for i, row in enumerate(rows)])
            offsets = pa.array(np.asarray(array.offsets), pa.int32())
            array = pa.ListArray.from_arrays(offsets, array.values, type=array.type, mask=pa.array(~valid))
        return array.slice(start)

    return st.builds(
        cut, st.lists(values(ddl), max_size=20), st.integers(0, 3), st.sets(st.integers(0, 20), max_size=3)
    )


@pytest.mark.parametrize("ddl", NESTED)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_values_come_back_as_they_were(ddl: str, data: st.DataObject) -> None:
    dtype, array = parse_type(ddl), data.draw(arrays(ddl))
    ends, packed = pack(array, dtype)
    back = unpack(packed, ends, dtype)
    back.validate(full=True)
    assert back.type == dtype.arrow
    wanted = array.to_pylist()
    there = array.is_valid().to_pylist()
    found = [value if valid else None for value, valid in zip(back.to_pylist(), there, strict=True)]
    assert str(found) == str(wanted)


HISTORY = [
    "struct<a:int,s:string,l:array<struct<x:float>>,m:map<string,struct<y:smallint>>>",
    "struct<s:string,a:bigint,l:array<struct<x:double,n:binary>>,m:map<string,struct<y:int,z:string>>>",
    "struct<m:map<string,struct<z:string,y:float>>,a:double,l:array<struct<n:binary>>,b:boolean>",
]
"""Types of one value, one after the other."""


def became(value: Any, now: DataType) -> Any:
    """A value as one of another type."""
    if value is None or not now.nested:
        return value if value is None or now.name not in ("float", "double") else float(value)
    if now.name == "struct":
        return {name: became(value.get(name), inner) for name, inner in now.fields}
    if now.name == "map":
        return [(key, became(inner, now.fields[1][1])) for key, inner in value]
    return [became(inner, now.fields[0][1]) for inner in value]


@pytest.mark.parametrize(
    "form", ["{}", "array<{}>", "struct<value:{},expiry:bigint>", "array<struct<key:int,value:{}>>"]
)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_values_of_earlier_types(form: str, data: st.DataObject) -> None:
    """Byte strings of several ages come back together, as values of the newest type."""
    plain = [parse_type(form.format(ddl)) for ddl in HISTORY]
    versions = [parse_type(form.format(f"versions<{','.join(HISTORY[: n + 1])}>")) for n in range(len(HISTORY))]
    packed, wanted, lengths = [], [], []
    for age in data.draw(st.lists(st.integers(0, 2), max_size=4)):
        array = data.draw(arrays(form.format(HISTORY[age])))
        array = array.filter(array.is_valid())
        ends, strings = pack(array, versions[age])
        packed.append(strings)
        lengths.append(np.diff(ends))
        wanted += [became(value, plain[-1]) for value in array.to_pylist()]
    ends = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))]).astype(np.int64)
    found = unpack(np.concatenate([np.zeros(0, np.uint8), *packed]), ends, versions[-1])
    found.validate(full=True)
    assert found.type == plain[-1].arrow
    assert str(found.to_pylist()) == str(pa.array(wanted, plain[-1].arrow).to_pylist())


@pytest.mark.parametrize(
    ("before", "now", "wanted"),
    [
        (HISTORY[0], HISTORY[2], True),
        (HISTORY[2], HISTORY[0], False),
        ("bigint", "int", False),
        ("int", "string", False),
        ("double", "float", False),
        ("float", "bigint", False),
        ("decimal(9,2)", "decimal(10,2)", False),
        ("timestamp", "bigint", False),
        ("map<int,int>", "map<bigint,int>", False),
        ("map<int,int>", "map<int,bigint>", True),
        ("struct<a:int>", "array<int>", False),
        ("struct<a:struct<b:bigint>>", "struct<a:struct<b:int>>", False),
        ("struct<a:int>", "struct<b:string>", True),
    ],
)
def test_which_types_values_may_become(before: str, now: str, wanted: bool) -> None:
    assert evolves(parse_type(before), parse_type(now)) == wanted


@pytest.mark.parametrize("ddl", [ddl for ddl in ORDERED if parse_type(ddl).nested])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_those_that_group_together_are_the_same_byte_string(ddl: str, data: st.DataObject) -> None:
    dtype, array = parse_type(ddl), data.draw(arrays(ddl)).drop_null()
    ends, packed = pack(array, dtype, normal=True)
    strings = [packed[low:high].tobytes() for low, high in pairwise(ends)]
    meant = [repr(normal(value)) for value in array.to_pylist()]
    for left, one in zip(strings, meant, strict=True):
        for right, other in zip(strings, meant, strict=True):
            assert (left == right) == (one == other)


@pytest.mark.parametrize("ddl", ORDERED)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_keys_are_ordered_as_values(ddl: str, data: st.DataObject) -> None:
    dtype, array = parse_type(ddl), data.draw(arrays(ddl)).drop_null()
    ends, packed = order_keys(array, dtype)
    strings = [packed[low:high].tobytes() for low, high in pairwise(ends)]
    rows = array.to_pylist()
    for left, one in zip(strings, rows, strict=True):
        for right, other in zip(strings, rows, strict=True):
            assert (left > right) - (left < right) == compared(one, other)


def compared(left: Any, right: Any) -> int:
    """How Spark orders two values of one type."""
    if left is None or right is None:
        return (left is not None) - (right is not None)
    if isinstance(left, dict):
        left, right = list(left.values()), list(right.values())
    if isinstance(left, list):
        for one, other in zip(left, right, strict=False):
            if order := compared(one, other):
                return order
        return (len(left) > len(right)) - (len(left) < len(right))
    if isinstance(left, float):
        left, right = ((value != value, 0.0 if value != value else value) for value in (left, right))
    if isinstance(left, str):
        left, right = left.encode(), right.encode()
    return (left > right) - (left < right)


def plain(value: Any, dtype: DataType) -> str:
    """A value as Arrow would show it."""
    return str(pa.array([value], dtype.arrow).to_pylist())


@pytest.mark.parametrize("ddl", [STRUCT, DEEP, MAP])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_lists_grow_over_batches_and_restarts(ddl: str, data: st.DataObject) -> None:
    shape = AggregateSpec(
        fields("k int"), fields(f"v {ddl}"), (AggregateCall("collect_list", (0,), f"array<{ddl}>"),), "update"
    )
    rig = Rig(shape)
    lists: dict[int, list[Any]] = {}
    try:
        for batch in data.draw(batches(ddl)):
            for key, value in batch:
                lists.setdefault(key, []).extend([] if value is None else [value])
            out = rig.batch(record_batch(shape, [{"k": key, "v": value} for key, value in batch], ["k"]))
            assert out.num_rows == len({key for key, _ in batch})
            for key, found in as_rows(out):
                assert str(found) == str(pa.array(lists[key], parse_type(ddl).arrow).to_pylist())
            rig.restart()
    finally:
        rig.close()


@pytest.mark.parametrize("ddl", [STRUCT, DEEP, MAP, "string collate UTF8_LCASE"])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_values_are_kept_over_batches_and_restarts(ddl: str, data: st.DataObject) -> None:
    dtype = parse_type(ddl)
    calls = [
        AggregateCall("first", (0,), ddl),
        AggregateCall("last", (0,), ddl),
        AggregateCall("last", (0,), ddl, options={"ignore_nulls": True}),
        AggregateCall("max_by", (0, 1), ddl),
        AggregateCall("min_by", (0, 1), ddl),
    ]
    shape = AggregateSpec(fields("k int"), fields(f"v {ddl}; n int"), tuple(calls), "update")
    rig = Rig(shape)
    seen: dict[int, list[Any]] = {}
    try:
        for batch in data.draw(batches(ddl)):
            rows = []
            for key, value in batch:
                seen.setdefault(key, []).append(value)
                rows.append({"k": key, "v": value, "n": len(seen[key])})
            out = rig.batch(record_batch(shape, rows, ["k"]))
            for key, *found in as_rows(out):
                there = [value for value in seen[key] if value is not None]
                wanted = [seen[key][0], seen[key][-1], there[-1] if there else None, seen[key][-1], seen[key][0]]
                assert str(found) == str(pa.array(wanted, dtype.arrow).to_pylist())
            rig.restart()
    finally:
        rig.close()


@pytest.mark.parametrize("ddl", [STRUCT, DEEP, "array<double>"])
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_the_least_and_the_greatest_over_batches_and_restarts(ddl: str, data: st.DataObject) -> None:
    calls = [
        AggregateCall("min", (0,), ddl),
        AggregateCall("max", (0,), ddl),
        AggregateCall("min_by", (1, 0), "int"),
        AggregateCall("max_by", (1, 0), "int"),
    ]
    shape = AggregateSpec(fields("k int"), fields(f"v {ddl}; n int"), tuple(calls), "update")
    rig = Rig(shape)
    seen: dict[int, list[Any]] = {}
    try:
        for batch in data.draw(batches(ddl)):
            rows = []
            for key, value in batch:
                seen.setdefault(key, []).append(value)
                rows.append({"k": key, "v": value, "n": len(seen[key])})
            for key, *found in as_rows(rig.batch(record_batch(shape, rows, ["k"]))):
                assert str(found) == str(extremes(seen[key], parse_type(ddl)))
            rig.restart()
    finally:
        rig.close()


def extremes(rows: list[Any], dtype: DataType) -> list[Any]:
    """The first of the least and greatest values, and the numbers of the last of them."""
    numbered = [(value, number) for number, value in enumerate(rows, 1) if value is not None]
    if not numbered:
        return [None] * 4
    key = cmp_to_key(lambda a, b: compared(a[0], b[0]))
    least, greatest = min(numbered, key=key), max(numbered, key=key)
    first = pa.array([least[0], greatest[0]], dtype.arrow).to_pylist()
    last = [max(n for value, n in numbered if not compared(value, best[0])) for best in (least, greatest)]
    return [*first, *last]


def batches(ddl: str) -> st.SearchStrategy[list[list[tuple[int, Any]]]]:
    """Some batches of keys and values."""
    return st.lists(
        st.lists(st.tuples(st.integers(0, 2), values(ddl)), min_size=1, max_size=12), min_size=1, max_size=4
    )


def test_of_counted_values_nothing_is_packed() -> None:
    array = pa.array([[1], None], pa.list_(pa.int32()))
    column = operand(array, parse_type("array<int>"), nulls_only=True)
    assert column.valid.tolist() == [1, 0]
    assert not column.values.size
    assert column.array is None

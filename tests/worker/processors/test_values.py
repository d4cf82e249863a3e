"""Conversion of the values that a user gives to state."""

from __future__ import annotations

import datetime as dt
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import Row

from millpond.spec.types import DataType, parse_type
from millpond.worker.processors.state.columns import from_stored, to_stored
from millpond.worker.processors.state.order import row_bytes
from millpond.worker.processors.state.values import Refused, ValueCodec

NAN = math.nan


class Plain:
    """An object with attributes, of a class that Spark does not know."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


NUMBERS = "struct<a:tinyint,b:smallint,c:int,d:bigint>"
NESTED = "struct<a:array<int>,b:map<string,bigint>,c:struct<x:int,y:string>>"
CASES: list[tuple[str, Any, Any]] = [
    (NUMBERS, (300, 70000, 2**33 + 5, 2**70), (44, 4464, 5, None)),
    (NUMBERS, (True, 1.0, "x", None), (None, None, None, None)),
    (NUMBERS, (np.int8(3), np.int64(5), np.float64(1.5), np.bool_(True)), (3, 5, None, None)),
    (NUMBERS, (-129, -(2**15) - 1, -(2**31) - 1, -(2**63)), (127, 32767, 2**31 - 1, -(2**63))),
    (NUMBERS, (2**63 - 1, 2**63, -(2**63) - 1, 0), (-1, None, None, 0)),
    ("struct<a:float,b:double>", (1.1, 1.1), (1.100000023841858, 1.1)),
    ("struct<a:float,b:double>", (1, 1), (None, None)),
    ("struct<a:float,b:double>", (1e300, Decimal(1)), (math.inf, None)),
    ("struct<a:float,b:double>", (np.float32(0.5), np.float32(0.5)), (0.5, 0.5)),
    ("struct<a:boolean,b:boolean>", (1, np.bool_(False)), (None, False)),
    ("struct<a:binary,b:binary>", ("é", bytearray(b"x")), (b"\xc3\xa9", b"x")),
    ("struct<a:binary,b:binary>", (1, b""), (None, b"")),
    (
        "struct<a:decimal(10,2),b:decimal(38,3)>",
        (Decimal("1.005"), Decimal("-1.0005")),
        (Decimal("1.01"), Decimal("-1.001")),
    ),
    ("struct<a:decimal(10,2),b:decimal(38,3)>", (1, 1.5), (None, None)),
    (
        "struct<a:date,b:timestamp_ntz>",
        (dt.datetime(2020, 1, 1, 5), dt.datetime(1900, 1, 1)),
        (dt.date(2020, 1, 1), dt.datetime(1900, 1, 1)),
    ),
    ("struct<a:timestamp_ntz>", (pd.Timestamp("2020-01-01 05:06:07.000008"),), (dt.datetime(2020, 1, 1, 5, 6, 7, 8),)),
    (NESTED, ((1, 2), {"a": None}, Row(x=1, y="b")), ([1, 2], {"a": None}, Row(x=1, y="b"))),
    (NESTED, ({1, 2}, {1: 2}, {"y": "z", "x": 3}), (None, {"1": 2}, Row(x=3, y="z"))),
    (NESTED, (["x", True, 2**40 + 1], {}, [5, 7]), ([None, None, 1], {}, Row(x=5, y="7"))),
    (NESTED, (None, None, None), (None, None, None)),
    (NESTED, (b"a\xff", {"a": object}, Plain(x=1, y="z")), ([97, -1], {"a": None}, Row(x=1, y="z"))),
    (NESTED, (object, len, None), (None, None, None)),
    (NESTED, (bytearray(), Plain(), {}), ([], {"__class__": None}, Row(x=None, y=None))),
    (NUMBERS, (Plain(x=1), object(), NotImplemented, pd.NA), (None, None, None, None)),
    ("struct<a:array<string>,b:array<double>>", (b"a\x80", b"xy"), (["97", "-128"], [None, None])),
    ("struct<a:decimal(5,2),b:decimal(38,3)>", (Decimal("-0.001"), Decimal("NaN")), (Decimal("0.00"), None)),
    ("struct<a:float,b:double>", (Decimal("NaN"), Decimal("1.5")), (NAN, None)),
    ("struct<a:map<int,int>,b:map<date,string>>", ({"a": 1}, {None: 1}), ({0: 1}, {dt.date(1970, 1, 1): "1"})),
    ("struct<a:map<double,int>,b:map<boolean,int>>", ({1: 2}, {None: 3}), ({0.0: 2}, {False: 3})),
    ("struct<a:binary,b:string>", ("\ud83d\ude00x", "é\udfffx"), ("\ufffd\ufffdx".encode(), "é\ufffdx")),
]
TEXTS = [
    (1, "1"), (1.0, "1.0"), (1e10, "1.0E10"), (1e-5, "1.0E-5"), (0.001, "0.001"), (123456789.125, "1.23456789125E8"),
    (1e7, "1.0E7"), (9999999.0, "9999999.0"), (0.1 + 0.2, "0.30000000000000004"), (-0.0, "-0.0"), (100.0, "100.0"),
    (math.nan, "NaN"), (-math.inf, "-Infinity"), (True, "true"), (Decimal("1.50"), "1.50"), (Decimal("1E+5"), "1E+5"),
    ([1, "a", None, 2.5], "[1, a, null, 2.5]"), ({"a": 1}, "{a=1}"), (2**70, str(2**70)), (None, None),
    (1.7976931348623157e308, "1.7976931348623157E308"), (12.5, "12.5"), (np.float64(2.5), "2.5"),
    (Decimal("-0.0"), "0.0"), ({1}, "[1]"), (set(), "[]"),
    (dt.time(1, 2), "Time: 1 hours, 2 minutes, 0 seconds, 0 microseconds"),
    (dt.timedelta(1, 2), "Timedelta: 1 days, 2 seconds, 0 microseconds (total: 86402 seconds)"),
    (dt.timedelta(-1, 5, 7), "Timedelta: -1 days, 5 seconds, 7 microseconds (total: -86394.999993 seconds)"),
    ([Plain()], "[{__class__=tests.worker.processors.test_values.Plain}]"),
]  # fmt: skip
WRONG = [
    (NUMBERS, (1, 2, 3), "STRUCT_ARRAY_LENGTH_MISMATCH"),
    (NESTED, ([], {}, (1,)), "STRUCT_ARRAY_LENGTH_MISMATCH"),
    ("struct<a:decimal(10,2)>", (Decimal("123456789"),), "The 123456789.00 rounded half up from 123456789 cannot"),
    ("struct<a:decimal(10,2)>", (Decimal("1e90"),), "NUMERIC_VALUE_OUT_OF_RANGE.WITHOUT_SUGGESTION"),
    ("struct<a:int>", (Decimal("Infinity"),), "decimal.Decimal is no value"),
    ("struct<a:map<string,int>>", ({None: 1},), "NULL_MAP_KEY"),
    ("struct<a:map<decimal(5,2),int>>", ({1: 1},), "NULL_MAP_KEY"),
    ("struct<a:int>", (Row(x=1),), "Row is no value"),
    ("struct<a:int>", (dt.datetime(2020, 1, 1, tzinfo=dt.UTC),), "datetime is no value"),
    ("struct<a:array<int>>", (np.array([1]),), "numpy.ndarray"),
    ("struct<a:string>", (Plain(x=1),), "dict has no text"),
    ("struct<a:string>", (object,), "a class or function has no text"),
    ("struct<a:string>", ({1, 2},), "set has no text"),
    ("struct<a:string>", (b"x",), "bytes has no text"),
    ("struct<a:string>", (dt.date(2020, 1, 1),), "date has no text"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "given", "wanted"), CASES + [("struct<a:string>", (one,), (text,)) for one, text in TEXTS]
)
def test_what_is_kept_is_what_spark_keeps(ddl: str, given: Any, wanted: Any) -> None:
    form = ValueCodec(parse_type(ddl))
    got = form.to_user(form.from_user(given))
    assert repr(got) == repr(wanted)
    assert list(map(type, got)) == list(map(type, wanted))
    assert repr(form.to_user(to_stored(from_stored([form.from_user(given)], form.arrow))[0])) == repr(got)


@pytest.mark.parametrize(("ddl", "given", "match"), WRONG)
def test_what_spark_refuses(ddl: str, given: Any, match: str) -> None:
    with pytest.raises(Refused, match=match):
        ValueCodec(parse_type(ddl)).from_user(given)


def test_what_pyspark_itself_refuses() -> None:
    with pytest.raises(AttributeError):
        ValueCodec(parse_type("struct<a:date>")).from_user(("2020-01-01",))
    with pytest.raises(TypeError):
        ValueCodec(parse_type("struct<a:int>")).from_user(None)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ValueCodec(parse_type("struct<a:int>")).from_user((lambda: 1,))


def test_rows_in_state_have_their_names() -> None:
    form = ValueCodec(parse_type("struct<a:array<struct<x:int,y:timestamp_ntz>>,m:map<int,struct<z:date>>>"))
    at = dt.datetime(2020, 1, 1)
    (rows, named) = form.to_user(form.from_user(([(1, at)], {1: (at,)})))
    assert rows[0].asDict() == {"x": 1, "y": at}
    assert named[1].z == at.date()


@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-(2**65), 2**65) | st.booleans() | st.floats(),
            st.none() | st.floats() | st.integers() | st.text(),
            st.none() | st.text(st.characters(exclude_categories=[])),
            st.none() | st.booleans() | st.integers(0, 1),
            st.none() | st.integers(-200, 200),
        )
    )
)
def test_what_is_told_quickly_is_true(values: list[Any]) -> None:
    form = ValueCodec(parse_type("struct<a:bigint,b:double,c:string,d:boolean,e:tinyint>"))
    for value in values:
        if form.is_stored_form(value):
            assert repr(form.from_user(value)) == repr(value)
    kept = [value for value in values if form.is_stored_form(value)]
    assert repr(to_stored(from_stored(kept, form.arrow))) == repr(kept)


# columns ---------------------------------------------------------------------------------------------------------


def of(dtype: DataType) -> st.SearchStrategy[Any]:
    """Values as they are kept."""
    name = dtype.name
    bits = {"tinyint": 8, "smallint": 16, "int": 32, "date": 32, "bigint": 64, "timestamp": 64, "timestamp_ntz": 64}
    if name in bits:
        found: Any = st.integers(-(1 << bits[name] - 1), (1 << bits[name] - 1) - 1)
    elif name == "struct":
        found = st.tuples(*(of(inner) for _, inner in dtype.fields))
    elif name == "array":
        found = st.lists(of(dtype.fields[0][1]), max_size=3)
    elif name == "map":
        keys = of(dtype.fields[0][1]).filter(lambda key: key is not None)
        found = st.lists(st.tuples(keys, of(dtype.fields[1][1])), max_size=3)
    elif name == "decimal":
        limit = 10**dtype.precision - 1
        found = st.integers(-limit, limit).map(lambda number: Decimal(f"{number}e-{dtype.scale}"))
    else:
        found = {
            "boolean": st.booleans(),
            "float": st.floats(width=32),
            "double": st.floats(),
            "string": st.text(max_size=10),
            "binary": st.binary(max_size=10),
        }[name]
    return st.none() | found


EVERY = parse_type(
    "struct<a:tinyint,b:string,c:decimal(9,2),d:array<struct<x:timestamp,y:array<string>>>,"
    "e:map<string,struct<z:boolean>>,f:date,g:binary,h:float,i:decimal(30,5),j:struct<k:map<int,array<double>>>>"
)


@given(st.lists(of(EVERY)), st.integers(0, 5), st.integers(0, 5))
def test_columns_there_and_back(values: list[Any], left: int, right: int) -> None:
    array = from_stored(values, EVERY.arrow)
    array.validate(full=True)
    assert array.type == EVERY.arrow
    assert repr(to_stored(array)) == repr(values)
    part = array.slice(left, max(0, len(values) - left - right))
    assert repr(to_stored(part)) == repr(values[left : left + len(part)])


@given(st.lists(st.integers(-(2**40), 2**40) | st.none()))
def test_bytes_of_numbers(values: list[Any]) -> None:
    order: Callable[[Any], bytes] = row_bytes(parse_type("struct<a:bigint>"))
    for value in values:
        expected = (24 - 8).to_bytes(4, "little") + (value is None).to_bytes(8, "little")
        assert order((value,)) == expected + (value or 0).to_bytes(8, "little", signed=True)


def test_bytes_of_texts() -> None:
    order = row_bytes(parse_type("struct<a:string,b:decimal(38,0)>"))
    assert order(("abc", Decimal(-129))) == b"".join(
        [
            (48).to_bytes(4, "little"),
            bytes(8),
            b"\3\0\0\0\x18\0\0\0",
            b"\2\0\0\0\x20\0\0\0",
            b"abc\0\0\0\0\0",
            b"\xff\x7f" + bytes(14),
        ]
    )


def test_a_column_of_nothing() -> None:
    kind = parse_type("array<struct<a:int>>").arrow
    assert to_stored(pa.nulls(3, kind)) == [None] * 3
    assert from_stored([], kind) == pa.array([], kind)

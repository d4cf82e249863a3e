"""Random values of every type, with those that go wrong most often among them."""

import datetime as dt
import math
from decimal import Context, Decimal
from typing import Any

import numpy as np
from hypothesis import strategies as st

from millpond.spec.types import DataType, parse_type

TYPES = [
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "decimal(5,2)",
    "decimal(18,0)",
    "decimal(20,3)",
    "decimal(38,10)",
    "decimal(38,36)",
    "string",
    "binary",
    "boolean",
    "date",
    "timestamp",
    "timestamp_ntz",
]
EXACT = Context(prec=200)
BITS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


def values(ddl: str) -> st.SearchStrategy[Any]:
    """Values of a type, null included."""
    return st.none() | some(parse_type(ddl))


def some(dtype: DataType) -> st.SearchStrategy[Any]:
    """Values of a type, never null."""
    if dtype.name in BITS:
        edge = 2 ** (BITS[dtype.name] - 1)
        return st.integers(-2, 2) | st.sampled_from([-edge, edge - 1]) | st.integers(-edge, edge - 1)
    if dtype.name in ("float", "double"):
        special = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, 1e-3, 0.1])
        return (special | st.floats(-1e6, 1e6)).map(float32 if dtype.name == "float" else float)
    if dtype.name == "decimal":
        edge = 10**dtype.precision - 1
        numbers = st.integers(-3, 3) | st.sampled_from([-edge, edge, edge // 2 + 1]) | st.integers(-edge, edge)
        return numbers.map(lambda n: Decimal(n).scaleb(-dtype.scale, EXACT))
    if dtype.name == "boolean":
        return st.booleans()
    if dtype.name == "date":
        return st.dates(dt.date(1, 1, 1), dt.date(9999, 12, 31))
    if dtype.name in ("timestamp", "timestamp_ntz"):
        zone = dt.UTC if dtype.name == "timestamp" else None
        return st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31)).map(lambda t: t.replace(tzinfo=zone))
    if dtype.name == "struct":
        names = [name for name, _ in dtype.fields]  # hypothesis may give them in another order
        drawn = st.fixed_dictionaries({name: st.none() | some(inner) for name, inner in dtype.fields})
        return drawn.map(lambda value: {name: value[name] for name in names})
    if dtype.name == "array":
        return st.lists(st.none() | some(dtype.fields[0][1]), max_size=4)
    if dtype.name == "map":
        (_, key), (_, value) = dtype.fields
        return st.dictionaries(some(key), st.none() | some(value), max_size=3).map(lambda d: list(d.items()))
    common = st.sampled_from(["", "a", "ab\0", "abcd", "abcde", "x" * 12, "x" * 13, "x" * 13 + "é", "x" * 40, "€uro"])
    texts = common | st.text(max_size=30).filter(lambda s: s.encode("utf-8", "replace").decode() == s)
    return texts if dtype.name == "string" else texts.map(str.encode) | st.binary(max_size=20)


def float32(value: float) -> float:
    """The nearest single-precision value."""
    return float(np.float32(value))

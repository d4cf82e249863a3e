"""Stored values, the values that users get, and the bytes that order them, against Spark's own code."""

from __future__ import annotations

import datetime as dt
import pickle
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from pyspark.serializers import CPickleSerializer
from pyspark.sql.streaming import stateful_processor_api_client as client

from millpond.spec.types import DataType, parse_type
from millpond.worker.processors.state.order import row_bytes
from millpond.worker.processors.state.schemas import spark_type
from millpond.worker.processors.state.values import ValueCodec
from tests.worker.processors.test_values import CASES, TEXTS

RANDOM = [
    "struct<a:string,b:tinyint,c:double,d:float,e:decimal(38,10),f:decimal(18,4),g:boolean,h:binary>",
    "struct<a:array<tinyint>,b:array<string>,c:array<decimal(30,2)>,d:array<boolean>,e:array<struct<x:int,y:string>>>",
    "struct<a:map<string,int>,b:date,c:timestamp,d:timestamp_ntz,e:array<array<float>>,f:smallint,g:int,h:bigint>",
    "struct<" + ",".join(f"c{n}:int" for n in range(70)) + ">",
]


def spark_keeps(spark: Any, dtype: DataType) -> Callable[[Any], tuple[Any, bytes]]:
    """Return Spark's result for a value that it has stored, and the row that it stores."""
    jvm = spark._jvm.org.apache.spark.sql
    utils, catalyst = jvm.api.python.PythonSQLUtils, jvm.catalyst
    schema: Any = spark_type(dtype)
    java = jvm.types.DataType.fromJson(schema.json())
    encoder = catalyst.encoders.ExpressionEncoder.apply(java)
    analyzer = getattr(getattr(catalyst.analysis, "SimpleAnalyzer$"), "MODULE$")
    bound = encoder.resolveAndBind(catalyst.types.DataTypeUtils.toAttributes(java), analyzer)
    deserializer, serializer = bound.createDeserializer(), encoder.createSerializer()
    pickler = CPickleSerializer()

    def keeps(value: Any) -> tuple[Any, bytes]:
        internal = schema.toInternal(tuple(map(client._normalize_state_value, value)))
        row = serializer.apply(utils.toJVMRow(bytearray(pickler.dumps(internal)), java, deserializer))
        return pickle.loads(bytes(utils.toPyRow(deserializer.apply(row)))), bytes(row.getBytes())

    return keeps


def same(spark: Any, ddl: str, values: list[Any]) -> None:
    dtype = parse_type(ddl)
    keeps, form, order = spark_keeps(spark, dtype), ValueCodec(dtype), row_bytes(dtype)
    for value in values:
        shown, row = keeps(value)
        kept = form.from_user(value)
        assert repr(_numbers(form.row(kept))) == repr(_numbers(shown)), value
        assert order(kept) == len(row).to_bytes(4, "little") + row, value


def _numbers(row: Any) -> Any:
    """A row without the exponents of its decimals, of which Spark makes others."""
    return [value.normalize() if isinstance(value, Decimal) else value for value in row]


@pytest.mark.parametrize("ddl", dict.fromkeys(ddl for ddl, _, _ in CASES))
def test_values(spark: Any, ddl: str) -> None:
    same(spark, ddl, [value for one, value, _ in CASES if one == ddl])


def test_texts(spark: Any) -> None:
    same(spark, "struct<a:string>", [(value,) for value, _ in TEXTS])


@pytest.mark.parametrize("ddl", RANDOM)
def test_random_values(spark: Any, ddl: str) -> None:
    chance = random.Random(5)
    dtype = parse_type(ddl)
    same(spark, ddl, [tuple(_any(inner, chance) for _, inner in dtype.fields) for _ in range(100)])


def _any(dtype: DataType, chance: random.Random) -> Any:
    if chance.random() < 0.15:
        return None
    bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
    if dtype.name in bits:
        return chance.getrandbits(bits[dtype.name]) - (1 << bits[dtype.name] - 1)
    inner = [one for _, one in dtype.fields]
    limit = 10 ** max(1, dtype.precision) - 1
    found: dict[str, Callable[[], Any]] = {
        "boolean": lambda: chance.random() < 0.5,
        "float": lambda: chance.choice([float("nan"), -0.0, 0.0, float("inf"), chance.gauss(0, 1e6)]),
        "string": lambda: "".join(chance.choices("abcäß😀z", k=chance.randrange(20))),
        "binary": lambda: chance.randbytes(chance.randrange(20)),
        "date": lambda: dt.date(1900, 1, 1) + dt.timedelta(days=chance.randrange(70_000)),
        "timestamp": lambda: dt.datetime(1950, 1, 1) + dt.timedelta(microseconds=chance.randrange(4 * 10**15)),
        "decimal": lambda: Decimal(f"{chance.choice([0, 1, -128, 127, chance.randint(-limit, limit)])}e-{dtype.scale}"),
        "struct": lambda: tuple(_any(one, chance) for one in inner),
        "array": lambda: [_any(inner[0], chance) for _ in range(chance.randrange(5))],
        "map": lambda: {"key": _any(inner[1], chance)} if chance.random() < 0.8 else {},
    }
    return found[{"double": "float", "timestamp_ntz": "timestamp"}.get(dtype.name, dtype.name)]()

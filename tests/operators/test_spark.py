"""Final values against Spark's batch SQL: every function, on random data of every type."""

import datetime as dt
import math
import random
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from millpond.plan.catalyst.function_options import sketch_tables
from millpond.spec.functions import sketch_precision
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.operators import AggregateCall
from millpond.spec.types import DataType, parse_type
from tests.operators.rig import Rig, Row, as_rows, record_batch, spec
from tests.operators.test_aggregate import calls_over, same
from tests.operators.values import BITS, TYPES, float32

ROWS = 400
EPOCH = dt.datetime(1970, 1, 1)


def value(dtype: DataType, rng: random.Random, room: int) -> Any:
    """A value of a type; small ones often, so that they repeat; decimals `room` digits short of their precision."""
    small = rng.random() < 0.5
    number = rng.randint(-3, 3) if small else rng.randint(-(10**6), 10**6)
    if dtype.name in BITS:
        edge = 2 ** (BITS[dtype.name] - 1)
        return max(-edge, min(edge - 1, number))
    if dtype.name in ("float", "double"):
        special = rng.choice([0.0, -0.0, float("nan"), float("inf"), 0.5, number / 8])
        return float32(special) if dtype.name == "float" else special
    if dtype.name == "decimal":
        digits = max(1, dtype.precision - room)
        return Decimal(number if small else rng.randint(-(10**digits), 10**digits)).scaleb(
            -dtype.scale, Context(prec=99)
        )
    if dtype.name == "boolean":
        return number % 2 == 0
    if dtype.name == "date":
        return (EPOCH + dt.timedelta(days=number % 20000)).date()
    if dtype.name in ("timestamp", "timestamp_ntz"):
        zone = dt.UTC if dtype.name == "timestamp" else None
        return (EPOCH + dt.timedelta(seconds=number, microseconds=number)).replace(tzinfo=zone)
    text = "" if number == 0 else f"{number}é" * (number % 4)
    return text if dtype.name == "string" else text.encode()


WITH_MORE = ("product", "regr_sxx", "percentile_approx", "count_min_sketch", "listagg")
"""Functions whose call in SQL has more than their inputs, or that have none there: whole streams compare them."""


def sql_of(shape: AggregateSpec, call: AggregateCall) -> str:
    """The call as SQL, with what decides between equals (`first`, ties) left open by the caller."""
    inputs = ", ".join(shape.inputs[position].name for position in call.inputs) or "*"
    nulls = " ignore nulls" if call.options.get("ignore_nulls") else ""
    condition = "" if call.filter is None else f" filter (where {shape.inputs[call.filter].name})"
    return f"{call.function}({'distinct ' if call.distinct else ''}{inputs}){nulls}{condition}"


def position(item: Any) -> Any:
    """Orders what may be in a set or list: −0.0 before 0.0, NaN last."""
    if isinstance(item, float):
        return (item != item, 0.0 if item != item else item, math.copysign(1.0, item))
    return item


def comparable(result: Any, dtype: DataType, function: str) -> Any:
    """Results as they can be compared: sets in order; timestamps as the instants that Spark's rows show."""
    if isinstance(result, list):
        items = [comparable(item, dtype.fields[0][1], "") for item in result]
        return sorted(items, key=position)
    if dtype.name == "timestamp" and result is not None and result.tzinfo is not None:
        return result.replace(tzinfo=None)
    if result == 0.0 and isinstance(result, float):  # which of two equal zeros comes first is open
        return 0.0
    return bytes(result) if isinstance(result, bytearray) else result


@pytest.mark.parametrize(
    ("ddl", "ansi"), [*((ddl, True) for ddl in TYPES), ("bigint", False), ("decimal(38,10)", False)]
)
def test_functions_equal_batch_sql(spark: SparkSession, ddl: str, ansi: bool) -> None:
    rng = random.Random(ddl)
    dtype = parse_type(ddl)
    order = ("first", "last", "any_value", "min_by", "max_by")  # depend on the order of rows: the model covers them
    calls = [call for call in calls_over(ddl) if call.function not in (*order, *WITH_MORE)]
    shape = spec("k int", f"v {ddl}; w bigint; b boolean", calls, "complete")
    rows: list[Row] = [
        {
            "k": rng.choice([None, 1, 2, 3, 4]),
            "v": None if rng.random() < 0.1 else value(dtype, rng, 8 if ansi else 3),
            "w": rng.choice([None, 1, 2]),
            "b": rng.choice([None, True, False]),
        }
        for _ in range(ROWS)
    ]
    batch = record_batch(shape, rows, ["k"])
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", str(ansi).lower())
    frame = session.createDataFrame(pa.Table.from_batches([batch]))
    frame.withColumn("v", frame.v.cast(ddl)).createOrReplaceTempView("t")  # Arrow's timestamps come with a zone
    columns = ", ".join(f"{sql_of(shape, call)} as c{i}" for i, call in enumerate(calls))
    native = session.sql(f"select k, {columns} from t group by k")
    for field, call in zip(native.schema.fields[1:], calls, strict=True):
        assert field.dataType.simpleString() == call.type, call
    wanted = {row[0]: row[1:] for row in native.collect()}

    rig = Rig(shape)
    for start in range(0, ROWS, 150):
        rig.batch(batch.slice(start, 150))
        rig.restart()
    out = rig.batch(batch.slice(0, 0))
    rig.close()
    got = {row[0]: row[1:] for row in as_rows(out)}
    assert got.keys() == wanted.keys()
    for key in wanted:
        for call, mine, theirs in zip(calls, got[key], wanted[key], strict=True):
            type_ = parse_type(call.type)
            mine, theirs = comparable(mine, type_, call.function), comparable(theirs, type_, call.function)
            assert same(mine, theirs), (key, call, mine, theirs)


@pytest.mark.parametrize("deviation", [0.2, 0.05, 0.01])
def test_sketch_equals_batch_sql(spark: SparkSession, deviation: float) -> None:
    """Cardinalities from one to far beyond the range where estimates are corrected."""
    registers = 1 << sketch_precision({"relative_sd": deviation})
    factors = (0.5, 1, 2, 2.6, 3, 3.5, 4, 4.7, 5.2, 9) if registers < 10_000 else (0.6, 2.6, 4, 5.2)
    sizes = [0, 1, 2, 10, *(int(registers * factor) for factor in factors)]
    selects = [
        f"select {i} as k, if(id = 0, null, id * 7919 + {i}) as v from range({n + 1})" for i, n in enumerate(sizes)
    ]
    spark.sql(" union all ".join(selects)).createOrReplaceTempView("t")
    native = spark.sql(f"select k, approx_count_distinct(v, {deviation}) as c from t group by k")
    wanted = {row.k: row.c for row in native.collect()}
    options = {"relative_sd": deviation} | sketch_tables(sketch_precision({"relative_sd": deviation}))
    call = AggregateCall("approx_count_distinct", (0,), "bigint", options=options)
    shape = spec("k int", "h bigint", [call], "complete")
    table = spark.sql("select xxhash64(k) as __hash, k, if(v is null, null, xxhash64(v)) as h from t").toArrow()
    rig = Rig(shape)
    for batch in table.combine_chunks().to_batches(max_chunksize=10_000):
        rig.batch(batch)
    rig.restart()
    assert dict(as_rows(rig.batch(batch.slice(0, 0)))) == wanted

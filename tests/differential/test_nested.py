"""Structs, arrays and maps of any depth: kept, compared, and as keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from tests.differential.data import write
from tests.differential.harness import (
    NULL_FLOATS_JOIN,
    ZEROS_DIFFER,
    Batches,
    assert_equal,
    compare,
    plain,
    run,
    stream,
)

SCHEMA = pa.schema(
    [
        ("k", pa.int32()),
        ("n", pa.int64()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("a", pa.list_(pa.float64())),
        ("t", pa.list_(pa.string())),
        ("st", pa.struct([("x", pa.int32()), ("l", pa.list_(pa.float32())), ("n", pa.struct([("s", pa.string())]))])),
        ("as", pa.list_(pa.struct([("d", pa.decimal128(20, 2)), ("b", pa.bool_()), ("z", pa.binary())]))),
        ("m", pa.map_(pa.string(), pa.list_(pa.int64()))),
        ("s", pa.string()),
    ]
)
DDL = (
    "k int, n bigint, ts timestamp, a array<double>, t array<string>, "
    "st struct<x:int,l:array<float>,n:struct<s:string>>, as array<struct<d:decimal(20,2),b:boolean,z:binary>>, "
    "m map<string,array<bigint>>, s string"
)
FLOATS = [0.0, 0.0 if ZEROS_DIFFER else -0.0, 1.5, -2.5, math.nan, math.inf, None]
TEXTS = ["", "a", "B", "ab\0", "x" * 12, "x" * 13 + "é", "long " * 30, None]


def _value(dtype: pa.DataType, rng: np.random.Generator) -> Any:
    """A value of few that there are, null among them."""
    if rng.random() < 0.15:
        return None
    if pa.types.is_map(dtype):
        keys = rng.permutation(["", "key", "k" * 20])[: rng.integers(0, 4)]
        return [(str(key), _value(dtype.item_type, rng)) for key in keys]
    if pa.types.is_list(dtype):
        return [_value(dtype.value_type, rng) for _ in range(rng.integers(0, 3))]
    if pa.types.is_struct(dtype):
        return {field.name: _value(field.type, rng) for field in dtype}
    if pa.types.is_floating(dtype):
        return FLOATS[rng.integers(len(FLOATS))]
    text = TEXTS[rng.integers(len(TEXTS))]
    if pa.types.is_string(dtype) or text is None:
        return text
    if pa.types.is_boolean(dtype):
        return bool(rng.integers(2))
    return text.encode() if pa.types.is_binary(dtype) else int(rng.integers(-1, 2))


def batch(seed: int, rows: int, *, once: bool = False, keys: int = 5) -> pa.Table:
    """A random batch; `once`: one row of each key `k`, where results depend on the order of rows."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {
        name: [_value(SCHEMA.field(name).type, rng) for _ in range(rows)] for name in SCHEMA.names[3:]
    }
    columns["k"] = rng.permutation(rows) if once else rng.integers(0, keys, rows)
    columns["n"] = rng.permutation(rows) + 1000 * seed
    columns["ts"] = 1_700_000_000_000_000 + 60_000_000 * (seed % 100) + rng.integers(0, 60_000_000, rows)
    return pa.Table.from_pydict(columns, schema=SCHEMA)


COLLATED = "s collate UTF8_LCASE"
NESTED = ["a", "t", "st", "as"]
KEPT = [*NESTED, "m", COLLATED, "array(m)", "map(k, st)", "struct(m, a)", "to_binary(s, 'utf-8')"]


def calls(function: str, values: list[str]) -> list[str]:
    """Each result as it is, and as text, which shows the order of elements and the signs of zeros."""
    made = [function.format(value) for value in values]
    return [*made, *(f"cast({call} as string)" for call in made)]


ONCE = {
    "first": calls("first({})", KEPT),
    "last": [*calls("last({})", KEPT), *calls("last({}) filter (where n % 3 > 0)", ["a", "m"])],
    "ignoring nulls": [*calls("first({}, true)", KEPT), *calls("last({}, true)", KEPT)],
    "any_value": calls("any_value({})", KEPT),
    "by a number": [*calls("max_by({}, n)", KEPT), *calls("min_by({}, n)", KEPT)],
    "by values": [*calls("max_by(n, {})", NESTED), *calls("min_by(m, {})", NESTED)],
    "least and greatest": [*calls("min({})", NESTED), *calls("max({})", NESTED)],
    "lists": calls("collect_list({})", KEPT),
}
"""Functions that depend on the order of rows, which Spark keeps only from batch to batch."""


@pytest.mark.parametrize("name", ONCE)
def test_functions_of_a_row_a_batch(spark: SparkSession, tmp_path: Path, name: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.groupBy("k").agg(*(F.expr(call).alias(f"c{i}") for i, call in enumerate(ONCE[name])))

    seed = 3 * sum(map(ord, name))
    rounds = [[batch(seed, 40, once=True), batch(seed + 1, 30, once=True)], [batch(seed + 2, 40, once=True)]]
    compare(spark, tmp_path, query, "update", rounds, ddl=DDL)


OF_ONE = ("min", "max", "collect_set", "count", "approx_count_distinct")
MANY = [f"{function}({value})" for function in OF_ONE for value in NESTED] + ["collect_list(m)", f"count({COLLATED})"]


def named(calls_: list[str]) -> list[Column]:
    return [F.expr(call).alias(f"c{i}") for i, call in enumerate(calls_)]


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_functions_of_many_rows(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.groupBy("k").agg(*named(MANY))

    out = compare(spark, tmp_path, query, mode, [[batch(1, 60), batch(2, 0)], [batch(3, 50)]], ddl=DDL)
    state = [plain(row) for row in millpond.read_state(spark, str(tmp_path / "ours")).collect()]
    newest = {row[0]: row for rows in out.values() for row in rows}
    assert_equal({0: state}, {0: list(newest.values())})


@pytest.mark.parametrize("grouping", ["window", "session_window"])
@pytest.mark.parametrize("whole", [True, False])
def test_functions_of_windows(spark: SparkSession, tmp_path: Path, grouping: str, whole: bool) -> None:
    """Windows whose rows are kept until they close, and others."""
    found = [call for call in MANY if whole or not call.startswith("collect")]
    found += [f"mode({value}, true)" for value in NESTED] if whole else []

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        time = F.expr(f"{grouping}(ts, '1 minute')")
        return df.withWatermark("ts", "0 seconds").groupBy(time, "k").agg(*named(found))

    rounds = [[batch(1, 60), batch(2, 40)], [batch(4, 50), batch(9, 30), batch(20, 3), batch(30, 3)]]
    out = compare(spark, tmp_path, query, "append", rounds, ddl=DDL)
    assert sum(map(len, out.values())) > 15


DISTINCT = [
    *(f"count(distinct {value})" for value in NESTED),
    *(f"collect_list(distinct {value})" for value in NESTED),
    "count(distinct a, st) filter (where n % 2 = 0)",
    "count(distinct a)",
    "max(st)",
]
KINDS = {"update": None, "complete": None, "append": "window", "sessions": "session_window"}


@pytest.mark.parametrize("kind", KINDS)
def test_distinct(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Spark refuses DISTINCT on streams: compared with a batch over all rows, of the groups that have been shown."""
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")

    time = [] if KINDS[kind] is None else [F.expr(f"{KINDS[kind]}(ts, '1 minute')").alias("time")]

    def query(df: DataFrame) -> DataFrame:
        return df.withWatermark("ts", "0 seconds").groupBy(*time, "k").agg(*named(DISTINCT))

    def batch_query(df: DataFrame) -> DataFrame:
        """In two steps: in one, Spark counts a value once for each row's own window before it merges sessions."""
        rows = df.groupBy(*time, "k").agg(F.expr("collect_list(struct(n, a, t, st, as)) as rows"))
        keys = ["k"] if KINDS[kind] is None else ["time", "k"]
        return rows.selectExpr(*keys, "inline(rows)").groupBy(*keys).agg(*named(DISTINCT))

    actual: Batches = {}
    mode = kind if kind != "sessions" else "append"
    for number, seed in enumerate([1, 2, 4, 9, 20, 30]):
        write(tmp_path / "in", number, batch(seed, 60))
        run(query(stream(session, tmp_path / "in", DDL)), mode, tmp_path / "ours", ours=True, into=actual)
    keys = 1 if KINDS[kind] is None else 2
    shown = {repr(row[:keys]): row for number in sorted(actual) for row in actual[number]}
    rows = session.read.schema(DDL).parquet(str(tmp_path / "in"))
    whole = [plain(row) for row in batch_query(rows).collect()]
    expected = [row for row in whole if KINDS[kind] is None or repr(row[:keys]) in shown]
    assert_equal({0: list(shown.values())}, {0: expected})
    assert len(shown) > (15 if KINDS[kind] else 4)


GROUPINGS = {
    "floats": ("a",),
    "strings": ("t",),
    "structs": ("st",),
    "arrays of structs": ("as", "k"),
    "arrays of arrays": ("array(a, array(n % 2))",),
    "in a struct": ("struct(k, array(st) as l)",),
    "all": ("a", "t", "st", "as"),
    "zeros": ("array(case when n % 3 = 0 then -0.0D when n % 3 = 1 then 0.0D else double('nan') end)",),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_keys(spark: SparkSession, tmp_path: Path, name: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        keys = [F.expr(key).alias(f"key{i}") for i, key in enumerate(GROUPINGS[name])]
        grouped = df.groupBy(*keys).agg(F.count("*").alias("c"), F.sum("n").alias("t"))
        return grouped.select("*", *(F.expr(f"cast(key{i} as string)") for i in range(len(keys))))

    mode = "complete" if name == "structs" else "update"
    compare(spark, tmp_path, query, mode, [[batch(5, 60), batch(6, 0)], [batch(7, 60)]], ddl=DDL)


@pytest.mark.parametrize("key", ["a", "st", "as"])
def test_deduplication(spark: SparkSession, tmp_path: Path, key: str) -> None:
    rounds = [[batch(5, 60)], [batch(7, 60)]]
    compare(spark, tmp_path, lambda df, _: df.dropDuplicates([key]).select(key), "append", rounds, ddl=DDL)


def test_what_is_carried(spark: SparkSession, tmp_path: Path) -> None:
    rounds = [[batch(5, 30, once=True)], [batch(7, 40, once=True)]]
    compare(spark, tmp_path, lambda df, _: df.dropDuplicates(["k"]), "append", rounds, ddl=DDL)


JOINS = {
    "keys and values": "select l.*, r.a, r.m, r.st from l join r on l.a = r.a and l.t <=> r.t",
    "structs": "select l.n, l.st, r.n, r.as, r.m from l join r on struct(l.t, l.st.x) = struct(r.t, r.st.x)",
    "outer": "select l.n, l.st, r.st, r.m from l left join r "
    "on l.a = r.a and l.ts between r.ts and r.ts + interval 1 minute",
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(spark: SparkSession, tmp_path: Path, name: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        marked = df.withWatermark("ts", "0 seconds")
        marked.filter("n % 2 = 0").createOrReplaceTempView("l")
        right = marked.filter("n % 2 = 1")
        if NULL_FLOATS_JOIN and name != "structs":
            right = right.filter("a is not null")
        right.createOrReplaceTempView("r")
        return session.sql(JOINS[name])

    rounds = [[batch(1, 40), batch(2, 30)], [batch(4, 30), batch(9, 3)]]
    out = compare(spark, tmp_path, query, "append", rounds, ddl=DDL)
    assert sum(map(len, out.values())) > 10


@pytest.mark.parametrize("engine", ["spark", "millpond"])
@pytest.mark.parametrize("key", ["a", "a[0]"])
def test_null_keys_of_floats(spark: SparkSession, tmp_path: Path, key: str, engine: str) -> None:
    """Null is not equal to null, also on Spark 4.2, where Spark itself takes it for equal."""
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    write(tmp_path / "in", 0, pa.table({"n": pa.array([1, 2], pa.int32()), "a": [[0.5], None]}))
    df = stream(session, tmp_path / "in", "n int, a array<double>")
    df.createOrReplaceTempView("l")
    out: Batches = {}
    joined = session.sql(f"select l.n from l join l as r on l.{key} = r.{key}")
    run(joined, "append", tmp_path / "state", ours=engine == "millpond", into=out)
    wrong = engine == "spark" and NULL_FLOATS_JOIN
    assert sorted(out[0]) == [(1,), (2,)][: 2 if wrong else 1]


@pytest.mark.parametrize("engine", ["spark", "millpond"])
@pytest.mark.parametrize("call", ["dropDuplicates", "collect_set"])
def test_zeros_are_equal(spark: SparkSession, tmp_path: Path, call: str, engine: str) -> None:
    """Also on Spark 4.1, where Spark itself distinguishes them."""
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    write(tmp_path / "in", 0, pa.table({"a": [[0.0], [-0.0]]}))
    df = stream(session, tmp_path / "in", "a array<double>")
    query = df.dropDuplicates(["a"]).select("a") if call == "dropDuplicates" else df.agg(F.collect_set("a"))
    out: Batches = {}
    mode = "append" if call == "dropDuplicates" else "update"
    run(query, mode, tmp_path / "state", ours=engine == "millpond", into=out)
    found = out[0] if call == "dropDuplicates" else out[0][0][0]
    assert len(found) == (2 if engine == "spark" and ZEROS_DIFFER else 1)

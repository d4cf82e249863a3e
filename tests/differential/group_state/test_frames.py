"""Frames that functions see, and frames that they give out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.differential.group_state import functions
from tests.differential.group_state.checks import grouped
from tests.differential.processors.checks import Turn, compare, script, values

MOMENT = dt.datetime(2024, 3, 10, 12, 30, 0, 5)
ALL_TYPES: dict[str, tuple[str, pa.DataType, Any]] = {
    "i8": ("tinyint", pa.int8(), 1),
    "i16": ("smallint", pa.int16(), 2),
    "i32": ("int", pa.int32(), 3),
    "i64": ("bigint", pa.int64(), 2**60 + 1),
    "f32": ("float", pa.float32(), 0.1),
    "f64": ("double", pa.float64(), 0.1),
    "b": ("boolean", pa.bool_(), True),
    "s": ("string", pa.string(), "ö"),
    "bin": ("binary", pa.binary(), b"\0\1"),
    "dec": ("decimal(20, 3)", pa.decimal128(20, 3), Decimal("1.250")),
    "day": ("date", pa.date32(), dt.date(2024, 2, 29)),
    "ts": ("timestamp", pa.timestamp("us", tz="UTC"), MOMENT.replace(tzinfo=dt.UTC)),
    "tsn": ("timestamp_ntz", pa.timestamp("us"), MOMENT),
    "a": ("array<int>", pa.list_(pa.int32()), [1, None]),
    "m": ("map<string, int>", pa.map_(pa.string(), pa.int32()), [("x", 1)]),
    "st": (
        "struct<x: int, y: array<string>>",
        pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))]),
        {"x": 1, "y": ["a"]},
    ),
}
TYPED_DDL = ", ".join(["k string", *(f"{name} {ddl}" for name, (ddl, _, _) in ALL_TYPES.items())])
SCHEMA = pa.schema([("k", pa.string()), *((name, kind) for name, (_, kind, _) in ALL_TYPES.items())])


def all_types(*rows: tuple[str, str]) -> pa.Table:
    """Rows of all types, by key: full, empty, or with nulls in every other column."""
    full = [value for _, _, value in ALL_TYPES.values()]
    kinds = {
        "full": full,
        "empty": [None] * len(full),
        "odd": [value if at % 2 else None for at, value in enumerate(full)],
        "even": [None if at % 2 else value for at, value in enumerate(full)],
    }
    columns = zip(*((key, *kinds[kind]) for key, kind in rows), strict=True)
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.table(arrays, schema=SCHEMA)


MIXED = [("a", "full"), ("a", "full"), ("b", "full"), ("b", "empty"), ("c", "empty"), ("d", "odd"), ("e", "even")]


@pytest.mark.parametrize("prefer_ext", ["false", "true"])
def test_types_of_frames(spark: SparkSession, tmp_path: Path, prefer_ext: str) -> None:
    """They depend on the nulls of the key's own rows, as in Spark; a key's frame may be changed."""
    conf = {"spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype": prefer_ext}
    query = grouped(functions.types)
    turn = Turn(query, [all_types(*MIXED), all_types(*MIXED[:3])], conf=conf)
    found = compare(spark, tmp_path, [turn], ddl=TYPED_DDL)
    assert len({row[2] for row in found[0]}) == 5


@pytest.mark.parametrize(
    "columns", [["i8", "i64", "b"], ["f32", "f64", "dec"], ["s", "bin", "day"], ["ts", "tsn", "st"]]
)
def test_types_of_keys(spark: SparkSession, tmp_path: Path, columns: list[str]) -> None:
    query = grouped(functions.types, by=columns)
    turn = Turn(query, [all_types(*MIXED[::-1])], conf={"spark.sql.session.timeZone": "Asia/Tokyo"})
    compare(spark, tmp_path, [turn], ddl=TYPED_DDL)


def test_without_keys(spark: SparkSession, tmp_path: Path) -> None:
    """Spark fails, and so does Millpond."""
    query = grouped(functions.count, shown=functions.COUNTED, by=())
    compare(spark, tmp_path, [Turn(query, [script(("a", ""))], fails="StatefulOpClusteredDistribution")])


def test_key_columns_in_any_order(spark: SparkSession, tmp_path: Path) -> None:
    tables = [script(("a", "x"), ("a", "y"), (None, "x")), script(("a", "x", 3), (None, "x"))]
    query = grouped(functions.count, shown=functions.COUNTED, by=("do", "k"))
    compare(spark, tmp_path, [Turn(query, tables[:1]), Turn(query, tables[1:])])


@pytest.mark.parametrize("api", ["all", "some", "none"])
def test_several_frames_of_a_key(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """All are read, some, or none; they are as large as Spark's where there is one key."""

    def chunks(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        import pandas as pd

        seen = state.getOption[0] if state.exists else 0
        for frame in frames if api != "none" else ():
            seen += 1
            yield pd.DataFrame({"k": [key[0]], "n": [len(frame)], "said": [str(frame.n.min())]})
            if api == "some" and seen % 3 == 2:
                break
        state.update((seen,))
        yield pd.DataFrame({"k": [key[0]], "n": [seen], "said": [None]})

    rows, size = ({f"spark.sql.execution.arrow.max{what}PerBatch": "3"} for what in ("Records", "Bytes"))
    table = script(*(("a", "") for _ in range(10)))
    turns = [Turn(grouped(chunks), [table], conf=rows), Turn(grouped(chunks), [table, table], conf=size)]
    compare(spark, tmp_path, turns)


def frames_of(kind: str) -> list[Any]:
    import numpy as np
    import pandas as pd

    rows = {"k": ["x", None], "n": [1, 2], "said": ["a", "b"]}
    return {
        "none": [],
        "empty": [pd.DataFrame(), pd.DataFrame(columns=["k", "n", "said"]), pd.DataFrame({"z": [], "y": [], "x": []})],
        "order": [pd.DataFrame(rows)[["said", "n", "k"]], pd.DataFrame(rows)],
        "names": [pd.DataFrame({"k": ["x"], "N": [1], "said": ["y"]})],
        "numbers": [pd.DataFrame({0: ["x"], 1: [1], 2: ["y"]})],
        "types": [
            pd.DataFrame({"k": ["x"], "n": [2.0], "said": ["y"]}),
            pd.DataFrame({"k": ["x"], "n": np.array([3], np.int8), "said": [None]}),
            pd.DataFrame({"k": ["x"], "n": [None], "said": ["z"]}),
            pd.DataFrame({"k": ["x"], "n": pd.array([None, 4], "Int64")[1:], "said": pd.Categorical(["z"])}),
        ],
        "no columns": [pd.DataFrame(index=[0, 1])],
        "many": [pd.DataFrame({"k": "m", "n": range(n), "said": str(n)}) for n in range(0, 12_000, 3_000)],
    }[kind]


def test_results_of_another_type(spark: SparkSession, tmp_path: Path) -> None:
    def function(key: Any, frames: Any, state: Any) -> Any:
        import pandas as pd

        return [pd.DataFrame({"k": [1], "n": [1], "said": ["x"]})]

    fails = "Cannot convert the output value of the column 'k'"
    compare(spark, tmp_path, [Turn(grouped(function), [script(("a", ""))], fails=fails)])


@pytest.mark.parametrize("kind", ["none", "empty", "order", "names", "numbers", "types", "no columns", "many"])
def test_results(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """Frames are taken by names, some columns may be missing, empty ones are nothing."""

    def function(key: Any, frames: Any, state: Any) -> Any:
        state.update((1,))
        return frames_of(kind)

    tables = [script(("a", ""), ("b", "")), script(("a", ""))]
    compare(spark, tmp_path, [Turn(grouped(function), tables)])


def test_results_by_position(spark: SparkSession, tmp_path: Path) -> None:
    def function(key: Any, frames: Any, state: Any) -> Any:
        return frames_of("order")[:1] if key[0] == "a" else frames_of("many")[1:2]

    conf = {"spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName": "false"}
    query = grouped(function, shown="x string, n int, y string")
    compare(spark, tmp_path, [Turn(query, [script(("a", "")), script(("b", ""))], conf=conf)])


def test_results_of_all_types(spark: SparkSession, tmp_path: Path) -> None:
    """A function returns its frames as they came."""

    def function(key: Any, frames: Any, state: Any) -> Any:
        return frames

    tables = [all_types(*MIXED), all_types(("a", "full"), ("b", "full"))]
    for zone in ("UTC", "Asia/Tokyo"):
        query = grouped(function, shown=TYPED_DDL)
        turn = Turn(query, tables, conf={"spark.sql.session.timeZone": zone})
        found = compare(spark, tmp_path / zone.replace("/", ""), [turn], ddl=TYPED_DDL)
        assert len(values(found)[0]) == len(MIXED)

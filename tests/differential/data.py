"""Random batches over every atomic type, written as the files of a stream: one file is one batch."""

from __future__ import annotations

import datetime as dt
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema(
    [
        ("k", pa.int32()),
        ("b", pa.bool_()),
        ("i8", pa.int8()),
        ("i16", pa.int16()),
        ("i32", pa.int32()),
        ("i64", pa.int64()),
        ("f32", pa.float32()),
        ("f64", pa.float64()),
        ("dec9", pa.decimal128(9, 2)),
        ("dec18", pa.decimal128(18, 4)),
        ("dec38", pa.decimal128(38, 10)),
        ("s", pa.string()),
        ("bin", pa.binary()),
        ("d", pa.date32()),
        ("ts", pa.timestamp("us", tz="UTC")),
        ("tsn", pa.timestamp("us")),
        ("st", pa.struct([("x", pa.int32()), ("y", pa.string())])),
    ]
)
DDL = (
    "k int, b boolean, i8 tinyint, i16 smallint, i32 int, i64 bigint, f32 float, f64 double, dec9 decimal(9,2), "
    "dec18 decimal(18,4), dec38 decimal(38,10), s string, bin binary, d date, ts timestamp, tsn timestamp_ntz, "
    "st struct<x:int,y:string>"
)
WORDS = ["", "a", "bb", "pond", "exactly-12-by", "a string that is longer than twelve bytes", "ÅÄÖ ünïcode ✓", "zz"]


def _column(kind: pa.DataType, name: str, rng: np.random.Generator, rows: int) -> list[Any]:
    if name == "k":  # skewed: most rows belong to few keys
        return [int(v) for v in np.minimum(rng.zipf(1.6, rows), 12)]
    if pa.types.is_boolean(kind):
        return [bool(v) for v in rng.integers(0, 2, rows)]
    if pa.types.is_integer(kind):
        width = {8: 100, 16: 300, 32: 1000, 64: 1 << 40}[kind.bit_width]
        return [int(v) for v in rng.integers(-width, width, rows) // rng.choice([1, width // 3], rows)]
    if pa.types.is_floating(kind):
        special = [float("nan"), -0.0, 0.0, 1.5, -2.25, float("inf")] if name == "f32" else [float("nan"), -0.0, 0.0]
        return [
            special[int(pick) % len(special)] if pick < 6 else float(np.float32(v))
            for v, pick in zip(rng.normal(0, 100, rows), rng.integers(0, 40, rows), strict=True)
        ]
    if pa.types.is_decimal(kind):
        digits = min(kind.precision, 25) - 2
        return [
            Decimal(int(v) * 10 ** max(0, digits - 15) + int(v) % 97).scaleb(-kind.scale)
            for v in rng.integers(-(10 ** min(digits, 15)), 10 ** min(digits, 15), rows)
        ]
    if pa.types.is_string(kind):
        return [WORDS[int(v)] for v in rng.integers(0, len(WORDS), rows)]
    if pa.types.is_binary(kind):
        return [WORDS[int(v)].encode() + b"\x00\xff" for v in rng.integers(0, len(WORDS), rows)]
    if pa.types.is_date(kind):
        return [dt.date(2024, 1, 1) + dt.timedelta(days=int(v)) for v in rng.integers(-20000, 20000, rows) // 1000]
    if pa.types.is_timestamp(kind):
        zone = dt.UTC if kind.tz else None
        return [
            dt.datetime(2024, 3, 1, tzinfo=zone) + dt.timedelta(microseconds=int(v))
            for v in rng.integers(-(10**13), 10**13, rows) // 10**12 * 10**12
        ]
    fields = [(f.name, _column(f.type, f.name, rng, rows)) for f in kind]
    return [{name: values[row] for name, values in fields} for row in range(rows)]


def batch(seed: int, rows: int, nulls: float = 0.15, *, once: bool = False) -> pa.Table:
    """One random batch.

    Args:
        seed: what it depends on.
        rows: how many.
        nulls: which part of the values is null.
        once: give each key `k` one row, for functions that depend on the order of rows, which Spark does not keep.
    """
    rng = np.random.default_rng(seed)
    columns = []
    for field in SCHEMA:
        values = _column(field.type, field.name, rng, rows)
        if field.name == "st":
            values = [
                None if n < 0.1 else {**v, "y": None if n > 0.9 else v["y"], "x": abs(v["x"]) % 2}
                for v, n in zip(values, rng.random(rows), strict=True)
            ]
        else:
            values = [None if n < nulls else v for v, n in zip(values, rng.random(rows), strict=True)]
        if once and field.name == "k":
            values = [int(key) for key in rng.permutation(rows)]
        columns.append(pa.array(values, field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def write(folder: Path, number: int, table: pa.Table) -> None:
    """Add a batch to a stream's folder; the file source reads files in the order of their times."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:04d}.parquet"
    hidden = folder / f".{path.name}"
    pq.write_table(table, hidden)
    os.utime(hidden, (1_700_000_000 + number * 10,) * 2)
    hidden.rename(path)

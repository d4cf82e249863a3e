"""Sums and averages at the edges of their types: plain ones as Spark has them batch by batch, and over changes."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.differential.data import write
from tests.differential.harness import Batches, compare, order, plain, run, same, stream

DDL = "k int, a decimal(38,0), b decimal(38,10), c decimal(30,2), d double, i bigint"
HIGH = 1.7e308


def rows(*found: tuple[Any, ...]) -> pa.Table:
    columns: list[Any] = list(zip(*found, strict=True))
    types = [
        pa.int32(),
        *(pa.decimal128(*each) for each in ((38, 0), (38, 10), (30, 2))),
        pa.float64(),
        pa.int64(),
    ]
    names = ["k", "a", "b", "c", "d", "i"]
    return pa.table({n: pa.array(c, t) for n, c, t in zip(names, columns, types, strict=True)})


def row(k: int, tens: int, d: float | None = None, i: int | None = None) -> tuple[Any, ...]:
    """`tens` times a tenth of what each decimal holds."""
    unit = Decimal(tens)
    return k, unit.scaleb(37), unit.scaleb(27), unit.scaleb(27), d, i


# By key: 1 leaves its precision within a batch, 2 when one ends, 3 in an average only, 4 has nulls, too.
BATCHES = [
    [rows(row(1, 9), row(2, 9), row(3, 1), row(4, -9), (4, None, None, None, None, None))],
    [
        rows(row(1, 3), row(1, -4), row(2, 2), row(3, -1), row(4, -5), row(4, 5), row(4, 1)),
        rows(row(1, 1), row(2, -5), row(3, 2), row(4, 8), row(1, -9)),
        rows(row(2, -5), row(1, -9), row(1, 5), row(1, -5), row(1, 9)),
    ],
]
PLAIN = "select k, sum(a), avg(a), sum(b), avg(b), sum(c), avg(c), try_sum(a), try_avg(b) from {events} group by k"


@pytest.mark.parametrize("text", [PLAIN, PLAIN.replace("select k,", "select").replace(" group by k", " where k <> 2")])
def test_decimals_near_their_limit(spark: SparkSession, tmp_path: Path, text: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", "false")
        return session.sql(text, events=df)

    compare(spark, tmp_path, query, "update", BATCHES, ddl=DDL)


@pytest.mark.parametrize(("call", "condition"), [("sum(a)", "k <> 2"), ("sum(a)", "k < 3"), ("avg(b)", "true")])
def test_decimals_near_their_limit_in_ansi_mode(spark: SparkSession, tmp_path: Path, call: str, condition: str) -> None:
    """The same batches come, and the same one fails, if one does."""
    text = f"select k, {call} from {{events}} where {condition} group by k"
    outs: list[tuple[Batches, str]] = []
    for ours in (False, True):
        session = spark.newSession()
        session.conf.set("spark.millpond.onUnsupported", "error")
        out: Batches = {}
        for number, table in enumerate(table for some in BATCHES for table in some):
            write(tmp_path / str(ours), number, table)
        df = session.sql(text, events=stream(session, tmp_path / str(ours), DDL))
        said = ""
        try:
            run(df, "update", tmp_path / f"state {ours}", ours=ours, into=out)
        except StreamingQueryException as error:
            said = str(error)
        outs.append(({number: sorted(found, key=order) for number, found in out.items()}, said))
    (native, spark_said), (actual, we_said) = outs
    assert actual == native
    for code in ("ARITHMETIC_OVERFLOW", "NUMERIC_VALUE_OUT_OF_RANGE"):
        assert (code in we_said) == (code in spark_said)
    assert bool(we_said) == bool(spark_said)


# By key: 1 leaves 64 bits within a batch and comes back, 2 is beyond when one ends, 3 has nulls, 4 touches the edge.
LONGS = [
    [
        rows(*((k, None, None, None, None, i) for k, i in ((1, 2**63 - 1), (2, 2**63 - 1), (3, None), (4, -(2**62))))),
        rows(*((k, None, None, None, None, i) for k, i in ((1, -5), (2, 1), (3, None), (4, -(2**62))))),
    ],
    [
        rows(*((k, None, None, None, None, i) for k, i in ((1, 5), (2, -5), (3, 8)))),
        rows(*((k, None, None, None, None, i) for k, i in ((2, -(2**62)), (4, 2**63 - 1)))),
    ],
]


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_try_sum_near_its_limit(spark: SparkSession, tmp_path: Path, mode: str) -> None:
    text = "select k, try_sum(i), try_sum(i) filter (where i < 0), try_avg(i) from {events} group by k"
    compare(spark, tmp_path, lambda df, session: session.sql(text, events=df), mode, LONGS, ddl=DDL)


LOWER = "select k, max(a) a, max(b) b, max(c) c, max(d) d, max(i) i from {events} group by k"
CHANGING = [
    rows(row(1, 9, HIGH, 2**62), row(2, 9, HIGH, 2**62), row(3, -9, 0.1, -1), row(4, 1, 1e20, 7)),
    rows(row(3, 9, HIGH, 2**62), row(5, 9, None, None), row(6, -8, -1e300, -(2**62))),
    rows(row(6, 1, float("inf"), 1)),
    rows(row(6, 2, float("nan"), 2)),
    rows(row(7, 3, 1.0, 3)),
]


@pytest.mark.parametrize("changes", ["upsert", "all"])
def test_over_changes(spark: SparkSession, tmp_path: Path, changes: str) -> None:
    """Groups leave the sums again, those with the largest values, too."""
    session = spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", "false")
    session.conf.set("spark.millpond.onUnsupported", "error")
    session.conf.set("spark.millpond.changes", changes)
    text = (
        "select sum(a), avg(a), sum(b), avg(b), sum(c), sum(d), avg(d), sum(cast(d as float)), sum(i), avg(i),"
        " try_sum(abs(i)), bit_xor(i), count(*)"
        " from (select k, max(a) a, max(b) b, max(c) c, max(d) d, max(i) i, count(*) n from {events} group by k)"
        " where n < 2"
    )
    # A second row of a group takes the group out of the sums.
    tables = [*CHANGING, *(rows(*(row(k, 1, 1.0, 1) for k in keys)) for keys in ([1, 2], [3], [5]))]
    held: Any = None
    for number, table in enumerate(tables):
        write(tmp_path / "in", number, table)
        out: Batches = {}
        run(
            session.sql(text, events=stream(session, tmp_path / "in", DDL)),
            "update",
            tmp_path / "s",
            ours=True,
            into=out,
        )
        shown = [found for found in out[number] if changes == "upsert" or found[-1] != "D"]
        held = shown[0][: None if changes == "upsert" else -1] if shown else held
        so_far = session.read.schema(DDL).parquet(str(tmp_path / "in"))
        (wanted,) = session.sql(text, events=so_far).collect()
        assert same(held, plain(wanted)), (number, held, wanted)

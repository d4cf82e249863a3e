"""Statistics of one and two arguments against native Spark, in windows and at their edges."""

from __future__ import annotations

import datetime as dt
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from millpond.plan.catalyst.versions import merges_empty_moments
from tests.differential.data import write
from tests.differential.harness import Batches, allow_equal_values, compare, run, stream

DDL = "ts timestamp, k int, x double, y double"
NAN, INF = float("nan"), float("inf")

CALLS = ["skewness(x)", "kurtosis(x)", "var_samp(x)", "corr(x, y)", "covar_pop(x, y)", "covar_samp(y, x)"]
CALLS += [f"regr_{name}(y, x)" for name in ("count", "avgx", "avgy", "sxx", "syy", "sxy", "slope", "intercept", "r2")]


def table(*rows: tuple[int, Any, Any, Any]) -> pa.Table:
    """Rows of seconds, key, x and y."""
    times = [dt.datetime(2024, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=row[0]) for row in rows]
    columns = [[row[at] for row in rows] for at in (1, 2, 3)]
    types = [pa.int32(), pa.float64(), pa.float64()]
    arrays = [pa.array(times, pa.timestamp("us", "UTC")), *map(pa.array, columns, types)]
    return pa.Table.from_arrays(arrays, names=["ts", "k", "x", "y"])


# Keys: 1 ordinary, 2 nulls only, 3 one value, 4 equal values, 5 NaN, 6 infinite, 7 large, 8 tiny, 9 one side null.
ROWS = [
    [
        table((1, 1, 1.0, 2.0), (2, 1, 4.0, -3.0), (3, 1, 9.0, 1.5), (1, 2, None, None), (2, 3, 0.5, 0.25)),
        table((4, 4, 0.1, 0.3), (5, 4, 0.1, 0.3), (6, 5, NAN, 1.0), (7, 5, 2.0, 3.0), (8, 6, INF, 1.0)),
        table(),
        table((9, 7, 1e200, 1e200), (9, 8, 1e-120, 3e-120), (9, 8, 2e-120, 1e-120), (9, 9, 1.0, None)),
    ],
    [
        table((3, 1, -2.5, 7.0), (12, 1, 3.25, 1.0), (5, 4, 0.1, 0.3), (2, 2, None, 1.0), (4, 9, None, 5.0)),
        table((31, 1, 1.0, 1.0), (31, 7, 1e200, 1e200), (31, 6, 1.0, -INF)),
        table((2, 1, 100.0, 100.0), (32, 1, 2.0, 5.0), (33, 1, 4.0, 4.5)),  # the first is late
        table((90, 1, 1.0, 1.0)),
        table((91, 1, 2.0, None)),
    ],
]


@pytest.mark.parametrize("settings", [{}, {"spark.sql.legacy.statisticalAggregate": "true"}], ids=["", "legacy"])
@pytest.mark.parametrize("mode", ["update", "complete"])
def test_groups(spark: SparkSession, tmp_path: Path, mode: str, settings: dict[str, str]) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        for name, value in {"spark.sql.ansi.enabled": "false", **settings}.items():
            session.conf.set(name, value)
        return session.sql(f"select k, {', '.join(CALLS)} from {{rows}} group by k", rows=df)

    compare(spark, tmp_path, query, mode, ROWS, ddl=DDL)


@pytest.mark.parametrize("keys", ["window(ts, '10 seconds')", "window(ts, '20 seconds', '10 seconds')", ""])
def test_windows_sessions_and_all_rows(spark: SparkSession, tmp_path: Path, keys: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        df = df.where("k not in (7, 8)").withWatermark("ts", "5 seconds")
        grouping = keys or "session_window(ts, '5 seconds'), k"
        allow_equal_values(session)
        return session.sql(f"select {grouping}, {', '.join(CALLS)} from {{rows}} group by {grouping}", rows=df)

    compare(spark, tmp_path, query, "append", ROWS, ddl=DDL)


# Keys: powers of 1 overflow from the fourth on, of 2 from the third, of 3 from the second; of 4 and 5 one side's.
LARGE = [
    [
        table((1, 1, 1e80, 1.0), (1, 2, 1e110, 1.0), (1, 3, 1e160, 1.0), (1, 4, 1.0, 1e200), (1, 5, 1e200, 1e-50)),
        table((2, 1, 1e80, 2.0), (2, 2, 1e110, 2.0), (2, 3, 1e160, 2.0), (2, 4, 2.0, 1e200), (2, 5, 1e200, 1e-40)),
    ],
    [table((3, 1, 0.0, 2.0), (3, 2, 0.0, 2.0), (3, 3, 0.0, 2.0), (3, 4, 0.0, 0.0), (3, 5, 0.0, 0.0))],
]


def test_powers_beyond_a_double(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        session.conf.set("spark.sql.ansi.enabled", "false")
        return session.sql(f"select k, {', '.join(CALLS)} from {{rows}} group by k", rows=df)

    compare(spark, tmp_path, query, "update", LARGE, ddl=DDL)


@pytest.mark.parametrize("engine", ["spark", "millpond"])
def test_corr_of_equal_values_in_ansi_mode(spark: SparkSession, tmp_path: Path, engine: str) -> None:
    """An error before Spark 4.3, as soon as a group has two of them."""
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    for number, rows in enumerate([table((1, 1, 0.1, 1.0)), table((2, 1, 0.1, 2.0))]):
        write(tmp_path / "in", number, rows)
    out: Batches = {}
    df = stream(session, tmp_path / "in", DDL).groupBy("k").agg(F.corr("x", "y"))
    fails = pytest.raises(StreamingQueryException, match="DIVIDE_BY_ZERO") if merges_empty_moments() else nullcontext()
    with fails:
        run(df, "update", tmp_path / "state", ours=engine == "millpond", into=out)
    assert out == {number: [(1, None)] for number in range(1 if merges_empty_moments() else 2)}


def test_without_keys(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return session.sql(f"select {', '.join(CALLS)} from {{rows}} where k < 5", rows=df)

    compare(spark, tmp_path, query, "update", ROWS, ddl=DDL)


def test_products(spark: SparkSession, tmp_path: Path) -> None:
    """Products, which only the DataFrame API has."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.groupBy("k").agg(F.product("x"), F.product(F.col("k")), F.product(F.col("k").cast("decimal(9,2)")))

    compare(spark, tmp_path, query, "update", ROWS, ddl=DDL)

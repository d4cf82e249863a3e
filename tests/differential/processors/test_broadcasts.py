"""User code with broadcast variables, and user code so large that Spark sends it as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from millpond.plan.decide import decide
from tests.differential.data import write
from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import COUNTED
from tests.differential.harness import Batches, on_millpond, run, stream
from tests.differential.processors.broadcasts import Large, Weighted, large, weighted
from tests.differential.processors.checks import APIS, DDL, ROCKSDB, Turn, compare, script, transformed, values

WEIGHTS = {"a": 10, "b": 1}
TABLES = [script(*((key, "") for key in keys)) for keys in ("aba", "ab")]
COUNTS = [[("('a',)", 20, 20), ("('b',)", 1, 1)], [("('a',)", 30, 10), ("('b',)", 2, 1)]]


@pytest.mark.parametrize("api", APIS)
def test_a_processor_with_a_broadcast_variable(spark: SparkSession, tmp_path: Path, api: str) -> None:
    """On Millpond alone: the process in which Spark's driver learns a processor's state has no broadcast variables."""
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    weights = spark.sparkContext.broadcast(WEIGHTS)
    found: Batches = {}
    for number, table in enumerate(TABLES):
        write(tmp_path / "in", number, table)
        df = transformed(stream(session, tmp_path / "in", DDL), Weighted(weights).using(api))
        on_millpond(df, "update")
        run(df, "update", tmp_path / "ours", ours=True, into=found)
    assert values(found) == COUNTS


def test_a_function_over_groups_with_a_broadcast_variable(spark: SparkSession, tmp_path: Path) -> None:
    query = grouped(weighted(spark.sparkContext.broadcast(WEIGHTS)), shown=COUNTED)
    found = compare(spark, tmp_path, [Turn(query, TABLES[:1]), Turn(query, TABLES[1:])])
    assert values(found) == COUNTS


LARGE: dict[str, Callable[[DataFrame], DataFrame]] = {
    "transformWithState": lambda df: transformed(df, Large()),
    "transformWithStateInPandas": lambda df: transformed(df, Large().using("pandas")),
    "applyInPandasWithState": grouped(large(), shown=COUNTED),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_user_code_stays_on_spark(spark: SparkSession, tmp_path: Path, name: str) -> None:
    write(tmp_path / "in", 0, TABLES[0])
    df = LARGE[name](stream(spark.newSession(), tmp_path / "in", DDL))
    (operator,) = decide(df, "update").operators
    assert operator.reason is not None
    assert operator.reason.code == "MP-PROCESSOR"
    on_millpond(df, "update", "spark")


def test_a_large_function_over_groups_runs_on_spark(spark: SparkSession, tmp_path: Path) -> None:
    query = grouped(large(), shown=COUNTED)
    found = compare(spark, tmp_path, [Turn(query, TABLES[:1])], ours_on="spark")
    assert values(found) == [[("('a',)", 2, 2), ("('b',)", 1, 1)]]

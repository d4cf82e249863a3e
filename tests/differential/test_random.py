"""Random queries over random batches, with restarts at random places."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from tests.differential.data import batch
from tests.differential.harness import compare

NUMBERS = ["i8", "i16", "i32", "i64", "f32", "f64", "dec9", "dec18"]
ATOMIC = [*NUMBERS, "dec38", "b", "s", "bin", "d", "ts", "tsn"]
KEYS = [*ATOMIC, "k", "st", "k % 3", "upper(s)", "i32 > 0"]

calls = st.one_of(
    st.builds("{}({})".format, st.sampled_from(["count", "min", "max", "collect_list"]), st.sampled_from(ATOMIC)),
    st.builds("{}({})".format, st.sampled_from(["sum", "avg"]), st.sampled_from(NUMBERS)),
    st.builds("{}({})".format, st.sampled_from(["stddev", "var_pop"]), st.sampled_from(NUMBERS[:6])),
    st.builds("approx_count_distinct({})".format, st.sampled_from(ATOMIC)),
    st.sampled_from(["count(*)", "bool_and(b)", "count_if(i32 > 3)", "count(i8, s)"]),
)
filtered = st.builds(
    "{}{}".format, calls, st.sampled_from(["", "", " filter (where b)", " filter (where i32 > 0 or s is null)"])
)
batches = st.tuples(st.integers(0, 10_000), st.sampled_from([0, 1, 20, 60]), st.sampled_from([0.0, 0.2, 0.9]))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    keys=st.lists(st.sampled_from(KEYS), min_size=0, max_size=3, unique=True),
    functions=st.lists(filtered, min_size=1, max_size=6, unique=True),
    mode=st.sampled_from(["update", "complete"]),
    rounds=st.lists(st.lists(batches, min_size=1, max_size=2), min_size=1, max_size=3),
    exchange=st.sampled_from(["local", "spark"]),
)
def test_random_queries(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    functions: list[str],
    mode: str,
    rounds: list[list[tuple[int, int, float]]],
    exchange: str,
) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        df.createOrReplaceTempView("events")
        grouping = f"group by {', '.join(keys)}" if keys else ""
        return session.sql(f"select {', '.join(keys + functions)} from events {grouping}")

    tables = [[batch(seed, rows, nulls) for seed, rows, nulls in some] for some in rounds]
    # Not a folder that is removed at once: the last commit may come after the last batch.
    compare(spark, tmp_path_factory.mktemp("random"), query, mode, tables, exchange=exchange)

"""One query of each kind of operator, compared with Spark, with a restart: the core that runs on every version."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.functions import pandas_udf
from pyspark.sql.group import GroupedData
from pyspark.sql.types import DoubleType

import millpond
from millpond.errors import UnsupportedError, UsageError
from millpond.plan.catalyst.versions import calls_user_code
from millpond.testing import ProcessorTester
from tests.differential import test_changes, test_joins, test_windows
from tests.differential.data import write
from tests.differential.group_state.checks import grouped
from tests.differential.group_state.functions import Script as GroupScript
from tests.differential.harness import Batches, Query, compare, run, stream
from tests.differential.processors import checks
from tests.differential.processors.processors import Count
from tests.differential.test_windows import marked
from tests.smoke.tables import Squares

ENGINE = "millpond" if calls_user_code() else "spark"
"""What runs processors of the user."""


def functions(df: DataFrame, session: SparkSession) -> DataFrame:
    return df.groupBy("k").agg(
        *(F.count("*"), F.sum("v"), F.avg("v"), F.min("s"), F.max("ts"), F.stddev("v"), F.skewness("v")),
        *(F.collect_set("s"), F.approx_count_distinct("v"), F.percentile_approx("v", 0.5), F.bit_xor("v")),
        *(F.bool_or(F.col("v") > 40), F.count_if(F.col("v") > 0), F.regr_slope("v", "k"), F.product("k")),
    )


def windows(length: str, slide: str | None = None) -> Query:
    return lambda df, _: (
        marked(df).groupBy(F.window("ts", length, slide), "k").agg(F.count("*"), F.sum("v"), F.max("s"))
    )


def sessions(df: DataFrame, session: SparkSession) -> DataFrame:
    return marked(df).groupBy(F.session_window("ts", "2 seconds"), "k").agg(F.count("*"), F.sum("v"), F.max("s"))


def whole_windows(df: DataFrame, session: SparkSession) -> DataFrame:
    shares = F.array(*(F.lit(share / 20) for share in range(1, 20)))
    beside_infinity = F.when(F.col("v") < 0, float("-inf")).otherwise(F.col("v"))  # the versions interpolate otherwise
    return (
        marked(df)
        .groupBy(F.window("ts", "10 seconds"))
        .agg(F.median("v"), F.percentile(beside_infinity, shares), F.mode("s", deterministic=True))
    )


def clocks(df: DataFrame, session: SparkSession) -> DataFrame:
    """Conditions with each clock, all true: the times of the rows are long past."""
    counts = marked(df).groupBy(F.window("ts", "10 seconds"), "k").count()
    later = ("current_timestamp() > window.end", "now() > window.end", "localtimestamp() > window.end")
    return counts.where(" and ".join(later)).where("current_date() > to_date('2000-01-01') or k = 0")


def enriched(df: DataFrame, session: SparkSession) -> DataFrame:
    return millpond.enrich(df, Squares(4), on={"k": "number"}, columns="square bigint")


def cte(df: DataFrame, session: SparkSession) -> DataFrame:
    return session.sql(
        "with c as (select k, count(*) n from {df} group by rollup(k)) select k, n from c union all select n, k from c",
        df=df,
    )


QUERIES: dict[str, tuple[Query, str]] = {
    "functions": (functions, "update"),
    "complete, sorted, limited": (
        lambda df, _: df.groupBy("s").agg(F.sum("v").alias("n")).orderBy("s").limit(3),
        "complete",
    ),
    "common table expression": (cte, "update"),
    "tumbling windows": (windows("10 seconds"), "append"),
    "tumbling windows, updated": (windows("10 seconds"), "update"),
    "sliding windows": (windows("20 seconds", "5 seconds"), "append"),
    "sliding windows, updated": (windows("20 seconds", "5 seconds"), "update"),
    "session windows": (sessions, "append"),
    "whole windows": (whole_windows, "append"),
    "chained windows": (test_windows.chained, "append"),
    "deduplicated": (lambda df, _: df.select("k", "s").dropDuplicates(), "append"),
    "deduplicated by time": (lambda df, _: marked(df).select("ts", "k").dropDuplicates(), "append"),
    "deduplicated within the watermark": (
        lambda df, _: marked(df).select("ts", "k", "s").dropDuplicatesWithinWatermark(["k", "s"]).select("k", "s"),
        "append",
    ),
    "conditions with clocks": (clocks, "append"),
    "enriched": (enriched, "append"),
}


@pytest.mark.parametrize("name", QUERIES)
def test_query(spark: SparkSession, tmp_path: Path, name: str) -> None:
    query, mode = QUERIES[name]
    first, second, third = test_windows.rounds()
    out = compare(spark, tmp_path, query, mode, [[*first[:2]], [*second, *third[1:]]], ddl=test_windows.DDL)
    assert any(out.values())


@pytest.mark.parametrize("name", ["inner, range", "left", "full", "semi", "left, condition"])
def test_join(spark: SparkSession, tmp_path: Path, name: str) -> None:
    query, mode = test_joins.QUERIES[name]
    tables = [test_joins.events(number, minute) for number, minute in enumerate([0, 3, 9, 20])]
    allowed = {"onWrongInSpark": "warn"} if name in test_joins.WRONG_IN_SPARK else {}
    out = compare(spark, tmp_path, query, mode, [tables[:2], tables[2:]], ddl=test_joins.DDL, **allowed)
    assert any(out.values())


BEYOND_SPARK = {
    "distinct": ("select k, count(distinct g) n, sum(distinct v) s from {events} group by k", ["k"]),
    "first rows": test_changes.CASES["first rows"],
    "aggregate over aggregate": test_changes.CASES["aggregate over aggregate"],
    "aggregate over first rows": test_changes.CASES["aggregate over first rows"],
    "over last rows": test_changes.CASES["over rows of all keys"],
}
"""What Spark runs in batch only, with the columns that identify its rows."""


@pytest.mark.parametrize("name", BEYOND_SPARK)
def test_beyond_spark(spark: SparkSession, tmp_path: Path, name: str) -> None:
    text, keys = BEYOND_SPARK[name]
    session = spark.newSession()
    session.conf.set("spark.millpond.onUnsupported", "error")
    test_changes.check(session, tmp_path, lambda df: session.sql(text, events=df), keys, "update", "upsert")


@pytest.mark.parametrize("api", checks.APIS)
def test_processor(spark: SparkSession, tmp_path: Path, api: str) -> None:
    def query(df: DataFrame) -> DataFrame:
        return checks.transformed(df, Count().using(api))

    first, second = (checks.script(*((key, "") for key in batch)) for batch in ("abacab", "cad"))
    found = checks.compare(spark, tmp_path, [checks.Turn(query, [first]), checks.Turn(query, [second])], ours_on=ENGINE)
    assert checks.values(found)[1] == [("('a',)", 4, 1), ("('c',)", 2, 1), ("('d',)", 1, 1)]


def test_group_state(spark: SparkSession, tmp_path: Path) -> None:
    first = checks.script(("a", "state.update((1,)), state.get"), ("b", "state.update((2,))"))
    second = checks.script(("a", "state.exists"), ("b", "state.exists"), ("c", "state.exists"))
    query = grouped(GroupScript())
    found = checks.compare(spark, tmp_path, [checks.Turn(query, [first]), checks.Turn(query, [second])], ours_on=ENGINE)
    assert checks.spoken(found, "c") == [[], ["False"]]


@pandas_udf(DoubleType())
def mean(v: pd.Series) -> float:
    return v.mean()


def test_user_functions(spark: SparkSession, tmp_path: Path) -> None:
    if calls_user_code():
        from tests.differential.test_user_functions import check, rows_of, tumbling  # needs Spark 4.3 to be imported

        def apply(groups: GroupedData) -> DataFrame:
            return groups.agg(mean("v").alias("mean"))

        check(spark, tmp_path, tumbling, apply, lambda groups: rows_of(apply(groups)), runs=2)
        return
    write(tmp_path / "in", 0, test_windows.rows(1, 10, 0, 10))
    df = marked(stream(spark, tmp_path / "in", test_windows.DDL)).groupBy(F.window("ts", "10 seconds")).agg(mean("v"))
    with pytest.raises(UnsupportedError, match="MP-VERSION"):
        run(df, "append", tmp_path / "ours", ours=True, into={})


class Totals(millpond.AsyncStatefulProcessor):
    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n bigint")

    async def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> AsyncIterator[Row]:
        ((n,),) = [await self.total.get() or (0,)]
        n += len(list(rows))
        await self.total.update((n,))
        yield Row(k=key[0], n=n)


def test_asynchronous_processor(spark: SparkSession, tmp_path: Path) -> None:
    """A processor that only Millpond runs is refused by name where Millpond cannot run it."""
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.stateStore.providerClass", checks.ROCKSDB)
    write(tmp_path / "in", 0, checks.script(("a", ""), ("b", ""), ("a", "")))
    groups = stream(session, tmp_path / "in", checks.DDL).groupBy("k")
    df = groups.transformWithState(Totals(), "k string, n bigint", "update", "none")
    out: Batches = {}
    if calls_user_code():
        run(df, "update", tmp_path / "ours", ours=True, into=out)
        assert sorted(out[0]) == [("a", 2), ("b", 1)]
        return
    (operator,) = millpond.explain(df, "update", as_dict=True)["operators"]
    assert operator["reason"]["code"] == "MP-VERSION"
    with pytest.raises(UnsupportedError, match=r"MP-VERSION.* Spark does not run asynchronous processors"):
        run(df, "update", tmp_path / "ours", ours=True, into=out)


def test_every_module_is_importable() -> None:
    """No module needs a name at its import that only some versions of PySpark have."""
    for module in pkgutil.walk_packages(millpond.__path__, "millpond."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.skipif(calls_user_code(), reason="the tester runs here, and has tests of its own")
def test_tester_is_refused() -> None:
    with pytest.raises(UsageError, match="Processors need PySpark"):
        ProcessorTester(Count(), "k string", "n int", Count.ddl)

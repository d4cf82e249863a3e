"""Rows that Spark combines before the exchange give what they give one by one, for every function, type and window."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.plan.catalyst.exchange.forms import ExchangeForms, Form
from millpond.query.running.forms import exchange_id
from millpond.tasks.operator_task import OperatorTask
from tests.differential.data import DDL, batch, write
from tests.differential.harness import Batches, assert_equal, compare, plain, run

INTEGERS, FLOATS, DECIMALS = ["i8", "i16", "i32", "i64"], ["f32", "f64"], ["dec9", "dec18"]
NUMBERS = INTEGERS + FLOATS + DECIMALS
FIXED = [*NUMBERS, "b", "d", "ts", "tsn"]


def each(function: str, columns: list[str]) -> list[str]:
    return [function.format(column) for column in columns]


CALLS = {
    "counts": ["count(*)", "count(i64, s)", *each("count({})", [*FIXED, "s", "st"]), "count_if(i32 > 10)"],
    "sums": [*each("sum({})", NUMBERS), *each("try_sum({})", DECIMALS)],
    "averages": [*each("avg({})", NUMBERS), *each("try_avg({})", ["i64", "dec18"])],
    "extremes": [*each("min({})", FIXED), *each("max({})", FIXED)],
    "limits": [
        "sum(if(b, 99999999999999999999999999.99BD, -0.01BD))",
        "avg(if(b, 99999999999999999999999999.99BD, -99999999999999999999999999.99BD))",
        "try_sum(if(b, 99999999999999999999999999.99BD, 0.01BD))",
    ],
    "booleans": ["bool_and(b)", "bool_or(b)", "every(i32 > 0)", "some(i32 > 900)"],
    "bits": [f"bit_{operation}({column})" for operation in ("and", "or", "xor") for column in INTEGERS],
    "moments": [f"{name}({x})" for name in ("stddev", "var_pop", "skewness", "kurtosis") for x in ("i32", "f64")],
    "pairs": [
        f"{name}(f64, i16)"
        for name in (
            *("corr", "covar_pop", "covar_samp", "regr_count", "regr_avgx", "regr_avgy"),
            *("regr_slope", "regr_intercept", "regr_r2", "regr_sxx", "regr_syy", "regr_sxy"),
        )
    ],
    "sketches": [
        "approx_count_distinct(s)",
        "approx_count_distinct(i32, 0.2)",
        "approx_count_distinct(i8) filter (where b)",
    ],
    "values": ["min(s)", "max(s)", "min(bin)", "max(bin) filter (where b)", "max(s) filter (where i32 > 0)"],
    "filters": [
        "count(*) filter (where i32 > 0)",
        "sum(i64) filter (where b)",
        "avg(dec9) filter (where f64 > 0)",
        "max(ts) filter (where s is not null)",
        "count(s) filter (where b)",
        "sum(i64 + i32 * 2) filter (where i16 % 2 = 0)",
    ],
}
KEYS = {"one key": "k", "many keys": "k, b, s, d, ts, f64, dec9, st", "no key": ""}
ROUNDS = [[batch(1, 200), batch(2, 0), batch(3, 150)], [batch(4, 200), batch(5, 120, nulls=0.6)], [batch(6, 80)]]


def grouped(calls: Sequence[str], keys: str, modes: Iterator[str] | None = None):
    """A query over calls; each start of Millpond's takes the next of some values of `spark.millpond.combine`."""

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        if modes is not None:
            session.conf.set("spark.millpond.combine", next(modes))
        df.createOrReplaceTempView("rows")
        shown = [f"{call} as c{number}" for number, call in enumerate(calls)]
        group = f"group by {keys}" if keys else ""
        return session.sql(f"select {', '.join([*([keys] if keys else []), *shown])} from rows {group}")

    return query


def combined(df: DataFrame, mode: str = "update") -> list[bool]:
    return [operator["combined"] for operator in millpond.explain(df, mode, as_dict=True)["operators"]]


def test_the_strategy_is_compiled(spark: SparkSession) -> None:
    """Without it, all tests here would pass on rows."""
    assert ExchangeForms.install(spark) is not None


@pytest.mark.parametrize("name", CALLS)
def test_functions(spark: SparkSession, tmp_path: Path, name: str) -> None:
    query = grouped(CALLS[name], KEYS["one key"])
    stream = spark.readStream.schema(DDL).parquet(str(tmp_path))
    assert combined(query(stream, spark)) == [True]
    compare(spark, tmp_path, query, "update", ROUNDS, combine="on")


@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize("name", KEYS)
def test_keys(spark: SparkSession, tmp_path: Path, name: str, mode: str) -> None:
    calls = ["count(*)", "sum(i64)", "avg(f64)", "min(dec18)", "max(ts)"]
    compare(spark, tmp_path, grouped(calls, KEYS[name]), mode, ROUNDS, combine="on")


@pytest.mark.parametrize("first", ["on", "off"])
def test_a_restart_goes_from_one_form_to_the_other(spark: SparkSession, tmp_path: Path, first: str) -> None:
    modes = cycle(["on", "off"] if first == "on" else ["off", "on"])
    calls = ["count(*)", "sum(i64)", "avg(dec9)", "stddev(f64)", "min(d)"]
    compare(spark, tmp_path, grouped(calls, "k", modes), "update", ROUNDS)


@pytest.mark.parametrize("exchange", ["local", "spark"])
def test_through_either_exchange(spark: SparkSession, tmp_path: Path, exchange: str) -> None:
    calls = ["count(*)", "sum(i64) filter (where b)", "avg(dec9 + 1)", "max(i32 * 2)", "count(s, bin)"]
    compare(spark, tmp_path, grouped(calls, "k, i8 % 3"), "update", ROUNDS, combine="on", exchange=exchange)


@pytest.mark.parametrize("how", ["on", "switching"])
def test_groups_over_groups(spark: SparkSession, tmp_path: Path, how: str) -> None:
    """The lower aggregate gives changes, which are not combined."""
    modes = cycle(["on", "off", "auto"])

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        if how == "switching":
            session.conf.set("spark.millpond.combine", next(modes))
        lower = df.groupBy("k", "b").agg(F.count("*").alias("n"), F.sum("i64").alias("s"))
        return lower.groupBy("b").agg(F.count("*"), F.sum("n"), F.sum("s"))

    stream = spark.readStream.schema(DDL).parquet(str(tmp_path))
    assert combined(query(stream, spark)) == [True, False]
    into: Batches = {}
    ours = spark.newSession()
    (tmp_path / "in").mkdir()
    number = 0
    for tables in ROUNDS:
        for table in tables:
            write(tmp_path / "in", number, table)
            number += 1
        if how == "on":
            ours.conf.set("spark.millpond.combine", "on")
        df = ours.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        run(query(df, ours), "update", tmp_path / "c", ours=True, into=into)
    shown = {row[0]: row for batch_ in sorted(into) for row in into[batch_]}
    whole = query(spark.read.parquet(str(tmp_path / "in")), spark.newSession())
    assert shown == {row[0]: tuple(row) for row in whole.collect()}


def test_arguments_that_python_computes(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        doubled = F.udf(lambda value: None if value is None else 2 * value, "bigint")
        return df.groupBy("k").agg(F.sum(doubled("i32")), F.max(doubled("i8")), F.product("i8"))

    compare(spark, tmp_path, query, "update", ROUNDS, combine="on")


def test_a_sum_that_overflows_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    query = rows.groupBy().agg(F.sum(F.expr("value + 9223372036854775000")))
    writer = millpond.writeStream(query).outputMode("update").format("noop")
    running = writer.option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(StreamingQueryException, match="ARITHMETIC_OVERFLOW"):
        running.awaitTermination()


@pytest.mark.parametrize("first", ["on", "off"])
def test_a_batch_that_failed_is_run_again_in_another_form(spark: SparkSession, tmp_path: Path, first: str) -> None:
    """Its state may be durable already, of other partial results."""
    modes = cycle(["on", "off"] if first == "on" else ["off", "on"])
    query = grouped(["count(*)", "sum(i64)", "avg(dec9)", "count(distinct i8)"], "k", modes)
    shown: dict[object, tuple[object, ...]] = {}
    failing = {2, 4}

    def take(rows: DataFrame, number: int) -> None:
        found = rows.collect()
        if number in failing:
            failing.remove(number)
            raise RuntimeError("the sink fails")
        shown.update({row[0]: tuple(row) for row in found})

    for number in range(6):
        write(tmp_path / "in", number, batch(number + 1, 100))
    for _ in range(3):
        session = spark.newSession()
        stream = session.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        writer = millpond.writeStream(query(stream, session)).outputMode("update").foreachBatch(take)
        running = writer.option("checkpointLocation", str(tmp_path / "c")).trigger(availableNow=True).start()
        with suppress(StreamingQueryException):
            running.awaitTermination()
    assert not failing
    session = spark.newSession()
    whole = query(session.read.schema(DDL).parquet(str(tmp_path / "in")), session)
    assert shown == {row[0]: tuple(row) for row in whole.collect()}


def test_a_start_that_fails_leaves_no_form_behind(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = ExchangeForms.install(spark)
    assert forms is not None
    before = set(forms._forms.keySet())
    started = []

    def fail(*arguments: object, **more: object) -> None:
        started.append(set(forms._forms.keySet()) - before)
        raise RuntimeError("the plan is odd")

    monkeypatch.setattr("millpond.query.launch.rewrite_plan", fail)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load().groupBy("value").count()
    writer = millpond.writeStream(rows).outputMode("update").format("noop")
    with pytest.raises(RuntimeError, match="the plan is odd"):
        writer.option("checkpointLocation", str(tmp_path)).start()
    assert started[0]
    assert set(forms._forms.keySet()) <= before


_NUMBERS = st.sampled_from([None, 0, 1, -1, 127, -128])
_DRAWN = st.fixed_dictionaries(
    {
        "k": st.sampled_from([None, 0, 1]),
        "i8": _NUMBERS,
        "i64": st.one_of(_NUMBERS, st.integers(-(2**55), 2**55)),
        "f64": st.sampled_from([None, 0.0, -0.0, math.nan, math.inf, 0.1, -3.5, 1e15]),
        "dec9": st.decimals(-9999999, 9999999, places=2) | st.none(),
        "s": st.sampled_from([None, "", "a", "b", "aé"]),
        "b": st.sampled_from([None, True, False]),
    }
)
_TYPES = pa.schema(
    [
        ("k", pa.int64()),
        ("i8", pa.int8()),
        ("i64", pa.int64()),
        ("f64", pa.float64()),
        ("dec9", pa.decimal128(9, 2)),
        ("s", pa.string()),
        ("b", pa.bool_()),
    ]
)
_MERGED = [
    *(
        "count(*)",
        "count(f64)",
        "sum(i64)",
        "sum(dec9)",
        "sum(i8) filter (where b)",
        "avg(i64)",
        "avg(dec9)",
        "avg(i8)",
    ),
    *(
        "min(f64)",
        "max(f64)",
        "min(dec9)",
        "max(i64)",
        "min(s)",
        "max(s) filter (where b)",
        "bool_and(b)",
        "bool_or(b)",
    ),
    *("bit_and(i64)", "bit_or(i8)", "bit_xor(i64)", "stddev(i8)", "var_pop(dec9)", "skewness(i8)", "kurtosis(i8)"),
    *("covar_pop(i8, dec9)", "regr_slope(i8, dec9)", "regr_count(i8, f64)", "approx_count_distinct(i64)"),
]


@given(batches=st.lists(st.lists(_DRAWN, max_size=12), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_partial_results_are_merged_as_spark_merges_them(spark: SparkSession, batches: list[list[dict]]) -> None:
    """Each batch is combined by Spark; what the slots make of several is what Spark makes of all rows."""
    with tempfile.TemporaryDirectory() as folder:
        for number, rows in enumerate(batches):
            Path(folder, "in").mkdir(exist_ok=True)
            table = pa.Table.from_pylist(rows, schema=_TYPES)
            for part in range(2):  # two map tasks
                pq.write_table(
                    table.take(pa.array(range(part, len(rows), 2), pa.int64())), f"{folder}/in/{number}-{part}.parquet"
                )
        session = spark.newSession()
        session.conf.set("spark.millpond.combine", "on")
        whole = session.read.parquet(f"{folder}/in")
        stream = session.readStream.schema(whole.schema).option("maxFilesPerTrigger", 2).parquet(f"{folder}/in")
        query = grouped(_MERGED, "k")
        into: Batches = {}
        run(query(stream, session), "complete", Path(folder, "c"), ours=True, into=into)
        expected = [plain(row) for row in query(whole, session).collect()]
        assert_equal({0: into[max(into)]}, {0: expected})


def test_distinct_rows(spark: SparkSession, tmp_path: Path) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.select("b", "d", "s", "f32").distinct()

    compare(spark, tmp_path, query, "update", ROUNDS, combine="on")


@pytest.mark.parametrize("name", ["__BLOCK_REFERENCE__", "block_reference", "Block_Reference"])
def test_columns_with_names_of_our_own(spark: SparkSession, tmp_path: Path, name: str) -> None:
    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        return df.withColumnRenamed("k", name).groupBy(f"`{name}`").count()

    compare(spark, tmp_path, query, "update", ROUNDS)


WINDOWS = {
    "tumbling": "window(ts, '10 seconds')",
    "sliding": "window(ts, '20 seconds', '5 seconds')",
    "odd slide": "window(ts, '10 seconds', '4 seconds')",
    "time itself": "ts",
}


def timed(*rows: tuple[int, int, int]) -> pa.Table:
    """Rows of seconds, key and value."""
    times = pa.array([1_700_000_000_000_000 + row[0] * 1_000_000 for row in rows], pa.timestamp("us", "UTC"))
    return pa.table({"ts": times, "k": [row[1] for row in rows], "v": [row[2] for row in rows]})


TIMED = [
    [
        timed((1, 1, 5), (2, 1, 7), (3, 2, 1), (11, 1, 2), (12, 2, 9)),
        timed((21, 1, 1), (4, 1, 100), (22, 2, 3)),
        timed(),
        timed((35, 1, 1), (2, 1, 1000), (3, 2, 1000), (34, 2, 8)),  # two rows are late
    ],
    [timed((36, 1, 4), (41, 3, 1), (9, 1, 5000), (36, 1, 6)), timed((80, 1, 1)), timed((81, 2, 2))],
]


@pytest.mark.parametrize("mode", ["append", "update"])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("how", ["on", "switching"])
def test_windows_and_late_rows(spark: SparkSession, tmp_path: Path, name: str, mode: str, how: str) -> None:
    modes = cycle(["on", "off", "auto"])

    def query(df: DataFrame, session: SparkSession) -> DataFrame:
        if how == "switching":
            session.conf.set("spark.millpond.combine", next(modes))
        groups = df.withWatermark("ts", "5 seconds").groupBy(F.expr(WINDOWS[name]), "k")
        text = F.col("v").cast("string")
        return groups.agg(F.count("*"), F.sum("v"), F.avg("v"), F.max("v"), F.max(text), F.min(F.reverse(text)))

    conf = {"combine": "on"} if how == "on" else {}
    compare(spark, tmp_path, query, mode, TIMED, ddl="ts timestamp, k bigint, v bigint", **conf)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("first(i64)", "first depends on single rows"),
        ("sum(i64), collect_list(i64)", "collect_list depends on single rows"),
        ("approx_count_distinct(i64, 0.01)", "partial results of approx_count_distinct are large at this precision"),
        ("approx_count_distinct(i64), max(s)", "partial results of approx_count_distinct would come with each value"),
        ("max(st)", "partial results of max(struct<x:int,y:string>) cannot be merged"),
        ("sum(dec38)", "a partial sum of decimal(38,10) may exceed 38 digits where the whole does not"),
        ("try_sum(i64)", "partial results of try_sum(bigint) cannot be merged"),
        ("count(distinct i64), first(i64)", "first depends on single rows"),
    ],
)
def test_what_is_not_combined_says_why(spark: SparkSession, tmp_path: Path, calls: str, reason: str) -> None:
    stream = spark.readStream.schema(DDL).parquet(str(tmp_path))
    (operator,) = millpond.explain(grouped([calls], "k")(stream, spark), "update", as_dict=True)["operators"]
    assert not operator["combined"]
    assert operator["combined_reason"] == reason


def test_forms_change_from_batch_to_batch(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver may choose them: combined, rows, files, and round again."""
    forms: list[ExchangeForms] = []
    started: list[OperatorTask] = []

    def begin(chosen: ExchangeForms, tasks: Sequence[OperatorTask]) -> None:
        forms[:], started[:] = [chosen], tasks
        chosen.choose(exchange_id(tasks[0]), "combined")

    monkeypatch.setattr("millpond.query.launch.choose_first_forms", begin)
    monkeypatch.setattr("millpond.query.launch.watch_forms", lambda *arguments, **more: None)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).load()
    rows.createOrReplaceTempView("numbers")
    query = spark.sql(
        "select value % 7 as k, count(*) as n, sum(value) as s, max(string(value % 3)) as m,"
        " count(distinct value % 2) as d from numbers group by value % 7"
    )
    order: Iterator[Form] = cycle(("rows", "files", "combined", "files", "combined", "rows"))
    shown: dict[int, tuple[int, ...]] = {}
    last = [-1]

    def take(batch_: DataFrame, number: int) -> None:
        shown.update({row.k: (row.n, row.s, int(row.m), row.d) for row in batch_.collect()})
        last[0] = number
        forms[0].choose(exchange_id(started[0]), next(order))

    writer = millpond.writeStream(query).outputMode("update").option("checkpointLocation", str(tmp_path / "c"))
    running = writer.foreachBatch(take).start()
    sent = {}
    while last[0] < 12 and running.isActive:
        progress = running.lastProgress
        if progress is not None:
            figures = progress.observedMetrics["millpond"]
            assert figures.input_rows == 1000
            sent[progress.batchId] = figures.exchanged_rows
        running.awaitTermination(0.02)
    running.stop()
    assert running.exception() is None
    values = range(1000 * (last[0] + 1))
    assert shown == {k: (len(values[k::7]), sum(values[k::7]), 2, 2) for k in range(7)}
    assert 1000 in sent.values(), sent
    assert min(sent.values()) <= 2 * 7 * (3 + 2), sent

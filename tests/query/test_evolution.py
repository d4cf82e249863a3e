"""A query that is changed between two starts, with a state that follows: compared with Spark in batch.

What stays is computed over all rows, what is new over the rows since the restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.errors import StateIncompatibleError

SCHEMA = "k int, v bigint, s string, d decimal(10,2), t timestamp"


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    session = spark.newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    session.conf.set("spark.millpond.onChangedState", "evolve")
    return session


class Job:
    """A query over files: what it reads first, and what behind each change."""

    def __init__(self, session: SparkSession, folder: Path, schema: str = SCHEMA) -> None:
        self.session = session
        self.folder = folder
        self.schema = schema
        self.parts = 0

    def put(self, begin: int, end: int, keys: int = 7) -> str:
        """Rows `begin` to `end` (excluded), some with nulls, some with long strings; returns where they are."""
        at = f"{self.folder}/in/part={self.parts}"
        self.parts += 1
        rows = self.session.range(begin, end).selectExpr(
            f"cast(if(id % 11 = 5, null, id % {keys}) as int) as k",
            "if(id % 5 = 0, null, id * 3) as v",
            "if(id % 4 = 1, null, repeat(concat('s', id), 1 + cast(id % 9 as int))) as s",
            "if(id % 6 = 2, null, cast(id as decimal(10,2)) / 4) as d",
            "timestamp_seconds(1700000000 + id) as t",
        )
        rows.select(F.expr("k"), "v", "s", F.col("d").cast("decimal(10,2)"), "t").coalesce(1).write.parquet(at)
        return at

    def stream(self) -> DataFrame:
        return self.session.readStream.schema(self.schema).parquet(f"{self.folder}/in/part=*")

    def rows(self, first: int = 0) -> DataFrame:
        """All rows from some part on, in batch."""
        paths = [f"{self.folder}/in/part={number}" for number in range(first, self.parts)]
        return (
            self.session.read.schema(f"{self.schema}, part int").option("basePath", f"{self.folder}/in").parquet(*paths)
        )

    def run(self, df: DataFrame, mode: str = "complete") -> list[tuple[Any, ...]]:
        """Rows that the sink gets with the last batch that has any."""
        shown: list[list[tuple[Any, ...]]] = []
        writer = millpond.writeStream(df).outputMode(mode)
        writer = writer.option("checkpointLocation", f"{self.folder}/checkpoint")
        writer.foreachBatch(lambda batch, _: shown.append(sorted(map(tuple, batch.collect()), key=repr)))
        writer.trigger(availableNow=True).start().awaitTermination()
        return [row for rows in shown for row in rows] if mode == "append" else shown[-1]


FUNCTIONS: dict[str, Callable[[], Column]] = {
    "n": lambda: F.count("*"),
    "nv": lambda: F.count("v"),
    "sum": lambda: F.sum("v"),
    "avg": lambda: F.avg("v"),
    "low": lambda: F.min("s"),
    "high": lambda: F.max("s"),
    "dec": lambda: F.sum("d"),
    "least": lambda: F.min("d"),
    "spread": lambda: F.stddev("v"),
    "some": lambda: F.expr("sum(v) filter (where v % 2 = 0)"),
}


def agg(df: DataFrame, names: list[str]) -> DataFrame:
    return df.groupBy("k").agg(*[FUNCTIONS[name]().alias(name) for name in names])


def check(job: Job, names: list[str], births: dict[str, int], shown: list[tuple[Any, ...]]) -> None:
    """Each function is over the rows since the part that it was born with."""
    wanted: dict[Any, list[Any]] = {row.k: [row.k] for row in job.rows().select("k").distinct().collect()}
    for name in names:
        found = {row.k: row[1] for row in agg(job.rows(births[name]), [name]).collect()}
        for key, values in wanted.items():
            values.append(found.get(key, 0 if name in ("n", "nv") else None))
    assert len(shown) == len(wanted)
    for row in shown:
        assert list(row) == pytest.approx(wanted[row[0]]), row


CHANGES = [
    [["n", "sum"], ["sum", "n"]],
    [["n", "sum", "low"], ["high", "sum", "nv"]],
    [["low", "dec"], ["n", "low", "avg", "dec", "spread", "least", "high"]],
    [["sum", "n"], ["n"], ["sum", "n"], ["low", "sum", "some"]],
    [["some", "sum", "high"], ["high", "avg"], ["avg", "high", "n", "some"]],
]


@pytest.mark.parametrize("steps", CHANGES, ids=[" - ".join("+".join(one) for one in steps) for steps in CHANGES])
def test_functions_come_go_and_move(session: SparkSession, tmp_path: Path, steps: list[list[str]]) -> None:
    job = Job(session, tmp_path)
    births: dict[str, int] = {}
    for number, names in enumerate(steps):
        session.conf.set("spark.millpond.partitions", str(2 + number % 2))  # rescaled with the change
        births = {name: births.get(name, job.parts) for name in names}
        job.put(1000 * number, 1000 * number + 700, keys=7 + 50 * (number % 2))
        check(job, names, births, job.run(agg(job.stream(), names)))
        session.conf.set("spark.millpond.onChangedState", "error")  # the new shape is what is pinned now
        job.put(1000 * number + 700, 1000 * number + 1000)
        check(job, names, births, job.run(agg(job.stream(), names)))
        session.conf.set("spark.millpond.onChangedState", "evolve")
        state = millpond.read_state(session, f"{tmp_path}/checkpoint")
        check(job, names, births, [tuple(row) for row in state.collect()])


def test_a_state_larger_than_memory_is_read_as_it_was_written(
    session: SparkSession, own_slots: None, tmp_path: Path
) -> None:
    session.conf.set("spark.millpond.slot.memory", "16m")
    session.conf.set("spark.millpond.slots", "1")
    job = Job(session, tmp_path)
    job.put(0, 400_000, keys=150_000)
    births = dict.fromkeys(("n", "low", "sum"), 0)
    job.run(agg(job.stream(), ["n", "low", "sum"]), "update")
    assert list((tmp_path / "checkpoint" / "millpond" / "files").iterdir()), "it is in files"
    births |= {"high": job.parts, "avg": job.parts}
    names = ["high", "low", "avg", "n"]
    for _ in range(3):
        job.put(300_000, 500_000, keys=170_000)
        job.run(agg(job.stream(), names), "update")
        state = millpond.read_state(session, f"{tmp_path}/checkpoint")
        check(job, names, births, [tuple(row) for row in state.collect()])


def test_without_the_setting_it_is_refused(session: SparkSession, tmp_path: Path) -> None:
    job = Job(session, tmp_path)
    session.conf.unset("spark.millpond.onChangedState")
    job.put(0, 10)
    job.run(agg(job.stream(), ["n", "sum"]))
    with pytest.raises(StateIncompatibleError, match=r"the query computes avg\(v\); its checkpoint does not"):
        job.run(agg(job.stream(), ["n", "sum", "avg"]))
    session.conf.set("spark.millpond.onChangedState", "evolve")
    job.put(10, 20)
    job.run(agg(job.stream(), ["n", "sum", "avg"]))
    session.conf.set("spark.millpond.onChangedState", "error")
    with pytest.raises(StateIncompatibleError, match=r"the query does not compute avg\(v\); its checkpoint does"):
        job.run(agg(job.stream(), ["n", "sum"]))


def test_functions_that_change_places_are_refused_or_followed(
    session: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(session, tmp_path)
    job.put(0, 100)
    rows = lambda df, *names: df.groupBy("k").agg(*[F.sum(name) for name in names])  # noqa: E731
    twice = lambda df: df.withColumn("w", F.col("v") * 10)  # noqa: E731
    job.run(rows(twice(job.stream()), "v", "w"))
    job.put(100, 200)
    session.conf.set("spark.millpond.onChangedState", "error")
    with pytest.raises(StateIncompatibleError, match="the query computes its functions in the order"):
        job.run(rows(twice(job.stream()), "w", "v"))
    session.conf.set("spark.millpond.onChangedState", "evolve")
    shown = job.run(rows(twice(job.stream()), "w", "v"))
    assert shown == sorted(map(tuple, rows(twice(job.rows()), "w", "v").collect()), key=repr)
    assert any(
        "its state follows:\n  aggregate by k: its functions are in another order" in one for one in caplog.messages
    )


def test_the_state_stays_when_a_view_is_renamed(
    session: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def query(df: DataFrame, view: str) -> DataFrame:
        functions = F.expr(f"sum({view}.v)"), F.expr(f"count(nullif({view}.v, 3))")
        return df.alias(view).groupBy(F.expr(f"{view}.k % 3").alias("part")).agg(*functions)

    job = Job(session, tmp_path)
    for setting in ("error", "evolve", "keep", "error"):
        session.conf.set("spark.millpond.onChangedState", setting)
        view = f"events_{job.parts}"
        job.put(100 * job.parts, 100 * job.parts + 100)
        shown = job.run(query(job.stream(), view))
        assert shown == sorted(map(tuple, query(job.rows(), view).collect()), key=repr)
    assert not any("the query has changed" in message for message in caplog.messages)


ODD = "sum(v) FILTER (WHERE v % 2 = 1)"
EVEN = "sum(v) FILTER (WHERE v % 2 = 0)"


def two(df: DataFrame, one: str, other: str) -> DataFrame:
    return df.groupBy("k").agg(F.expr(one).alias("one"), F.expr(other).alias("other"))


@pytest.mark.parametrize("now", [("sum(v)", ODD), ("sum(-v)", EVEN), ("try_sum(v)", EVEN), ("count(v)", EVEN)], ids=str)
def test_functions_that_are_called_with_something_else_are_refused(
    session: SparkSession, tmp_path: Path, now: tuple[str, str]
) -> None:
    """Spark's state does not know what they are called with: it goes on with what it has, without a word."""
    session.conf.set("spark.millpond.onChangedState", "error")
    job = Job(session, tmp_path)
    job.put(0, 100)
    job.run(two(job.stream(), "sum(v)", EVEN))
    job.put(100, 200)
    with pytest.raises(
        StateIncompatibleError,
        match=r"the query computes .*; its checkpoint computes sum\(v\).*[\s\S]*spark.millpond.onChangedState",
    ):
        job.run(two(job.stream(), *now))
    # What stands below may change, as in Spark.
    shown = job.run(two(job.stream().where("v > 200"), "sum(v)", EVEN))
    rows = job.rows().where("part = 0 or v > 200")
    assert shown == sorted(map(tuple, two(rows, "sum(v)", EVEN).collect()), key=repr)


def test_functions_that_are_called_with_something_else_go_on_if_asked_to(session: SparkSession, tmp_path: Path) -> None:
    job = Job(session, tmp_path)
    job.put(0, 100)
    job.run(two(job.stream(), "sum(v)", EVEN))
    job.put(100, 200)
    session.conf.set("spark.millpond.onChangedState", "keep")
    for now, reason in (
        ((EVEN, "sum(v)"), "stands at another place than before"),
        (("try_sum(v)", EVEN), r"the query computes try_sum\(v\); its checkpoint computes sum\(v\)"),
        (("count(v)", EVEN), r"the query computes count\(v\); its checkpoint computes sum\(v\)"),
    ):
        with pytest.raises(StateIncompatibleError, match=reason):
            job.run(two(job.stream(), *now))
    shown = job.run(two(job.stream(), "sum(v)", ODD))
    mixed = "sum(v) FILTER (WHERE if(part = 0, v % 2 = 0, v % 2 = 1))"
    assert shown == sorted(map(tuple, two(job.rows(), "sum(v)", mixed).collect()), key=repr)
    # From now on it is called so, and nothing is new to any setting.
    for setting in ("error", "evolve", "keep"):
        session.conf.set("spark.millpond.onChangedState", setting)
        job.put(200, 300)
        shown = job.run(two(job.stream(), "sum(v)", ODD))
        assert shown == sorted(map(tuple, two(job.rows(), "sum(v)", mixed).collect()), key=repr)
    session.conf.set("spark.millpond.onChangedState", "evolve")
    job.put(300, 400)
    shown = job.run(two(job.stream(), "sum(v)", EVEN))
    last = {row.k: row.other for row in two(job.rows(job.parts - 1), "sum(v)", EVEN).collect()}
    assert {row[0]: row[2] for row in shown} == last, "what it had before was another function's by then"


WIDER = [
    ("v", "int", "bigint", "min", "sum"),
    ("v", "smallint", "int", "max", "avg"),
    ("d", "decimal(10,2)", "decimal(16,2)", "min", "avg"),
    ("d", "decimal(12,2)", "decimal(25,2)", "max", "sum"),
    ("f", "float", "double", "sum", "max"),
]


@pytest.mark.parametrize(("column", "before", "now", "one", "other"), WIDER)
def test_wider_types(
    session: SparkSession, tmp_path: Path, column: str, before: str, now: str, one: str, other: str
) -> None:
    def put(part: int, type_: str, rows: str) -> None:
        frame = session.range(60).selectExpr("cast(id % 4 as int) as k", f"cast({rows} as {type_}) as {column}")
        frame.coalesce(1).write.parquet(f"{tmp_path}/in{part}")

    def query(df: DataFrame) -> DataFrame:
        return df.groupBy("k").agg(F.expr(f"{one}({column})"), F.expr(f"{other}({column})"), F.count(column))

    job = Job(session, tmp_path)
    put(0, before, "if(id % 7 = 0, null, 5 - id)")
    first = session.readStream.schema(f"k int, {column} {before}").parquet(f"{tmp_path}/in*")
    job.run(query(first))
    put(1, now, "id * 1000")
    second = session.readStream.schema(f"k int, {column} {now}").parquet(f"{tmp_path}/in*")
    shown = job.run(query(second))
    rows = session.read.parquet(f"{tmp_path}/in0").select("k", F.col(column).cast(now))
    batch = query(rows.union(session.read.parquet(f"{tmp_path}/in1")))
    assert shown == sorted(map(tuple, batch.collect()), key=repr)
    with pytest.raises(StateIncompatibleError, match="which is no narrower number of that kind"):
        job.run(query(first))


@pytest.mark.parametrize("size", ["10 seconds", "session"])
def test_windows_that_are_open_at_the_change(session: SparkSession, tmp_path: Path, size: str) -> None:
    def query(df: DataFrame, *names: str) -> DataFrame:
        window = F.session_window("t", "2 seconds") if size == "session" else F.window("t", size)
        rows = df.groupBy(window.alias("w"), "k").agg(*[FUNCTIONS[name]().alias(name) for name in names])
        return rows.select("w.start", "k", *names)

    job = Job(session, tmp_path)
    job.put(0, 95)
    marked = lambda: job.stream().withWatermark("t", "3 seconds")  # noqa: E731
    shown = job.run(query(marked(), "n"), "append")
    done = {row[:2] for row in shown}
    job.put(95, 200)
    shown = job.run(query(marked(), "low", "n"), "append")
    whole = {tuple(row)[:2]: row.n for row in query(job.rows(), "n").collect()}
    since = {tuple(row)[:2]: row.low for row in query(job.rows(1), "low").collect()}
    assert shown
    assert any(row[0].timestamp() < 1_700_000_095 for row in shown)
    for row in shown:
        values = dict(zip(("low", "n"), row[2:], strict=True))
        assert row[:2] not in done
        assert values["n"] == whole[row[:2]]
        assert values["low"] == since.get(row[:2])


def test_a_sum_that_is_beyond_its_type_is_so_in_read_state(session: SparkSession, tmp_path: Path) -> None:
    job = Job(session, tmp_path, "k int, v bigint")
    functions = ["try_sum(v)", "count(v)"]
    for value in (1 << 62, 1 << 62, 5, 6):
        frame = session.createDataFrame([(1, value), (2, 7)], job.schema)
        frame.coalesce(1).write.parquet(f"{tmp_path}/in/part={job.parts}")
        job.parts += 1
        functions.reverse()
        shown = job.run(two(job.stream(), *functions))
        state = millpond.read_state(session, f"{tmp_path}/checkpoint")
        assert sorted(map(tuple, state.collect())) == shown
    assert shown == [(1, None, 4), (2, 28, 4)]


REFUSED = [
    (
        lambda df: df.groupBy("k").agg(F.count("*")),
        lambda df: df.groupBy("s").agg(F.count("*"), F.sum("v")),
        "the query groups by",
    ),
    (
        lambda df: df.groupBy("k").agg(F.countDistinct("v")),
        lambda df: df.groupBy("k").agg(F.countDistinct("v"), F.expr("sum(distinct v)")),
        "distinct inputs",
    ),
    (
        lambda df: df.groupBy("k").agg(F.count("*").alias("n")).groupBy("n").agg(F.count("*")),
        lambda df: df.groupBy("k").agg(F.count("*").alias("n")).groupBy("n").agg(F.count("*"), F.sum("k")),
        "may be taken back",
    ),
    (
        lambda df: df.groupBy("k").agg(F.max("v")),
        lambda df: df.withColumn("v", F.col("v").cast("string")).groupBy("k").agg(F.max("v")),
        "is of string; its checkpoint's of bigint",
    ),
    (
        lambda df: df.groupBy("k").agg(F.collect_list("v")),
        lambda df: df.withColumn("v", F.col("v").cast("int")).groupBy("k").agg(F.collect_list("v")),
        "of int; its checkpoint",
    ),
]


@pytest.mark.parametrize(("before", "now", "reason"), REFUSED)
def test_what_cannot_be_followed_is_refused(
    session: SparkSession, tmp_path: Path, before: Callable[..., DataFrame], now: Callable[..., DataFrame], reason: str
) -> None:
    job = Job(session, tmp_path)
    job.put(0, 20)
    shown = job.run(before(job.stream()), "update")
    job.put(20, 30)
    with pytest.raises(StateIncompatibleError, match=reason):
        job.run(now(job.stream()), "update")
    assert job.run(before(job.stream()), "update") != shown, "the attempt does it no harm"

"""Expressions, conditions and subqueries between operators where rows change: refused by name, or as in batch SQL.

`MILLPOND_SCHEDULES=200` draws 200 combinations.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.errors import StateIncompatibleError, UnsupportedError
from millpond.plan.decide import decide
from tests.differential.between import LOWER, PLACES, SETTINGS, STABLE, UNSTABLE, UPPER, query
from tests.differential.harness import Batches, order, plain, run, same, stream
from tests.differential.test_changes import keyed, write

DDL = "k bigint, g string, v int, t timestamp"
DRAWN = int(os.environ.get("MILLPOND_SCHEDULES", "12"))
LOOKS = [x for several in UNSTABLE.values() for x in several]


def table(number: int, rows: int = 25) -> pa.Table:
    rng = np.random.default_rng(number)
    hours = 1_700_000_000 + 3600 * rng.integers(0, 60, rows) + np.arange(rows) + 100 * number
    return pa.table(
        {
            "k": pa.array([int(n) for n in rng.integers(0, 5, rows)], pa.int64()),
            "g": pa.array(["ab"[n] * (20 * n + 1) for n in rng.integers(0, 2, rows)], pa.string()),
            "v": pa.array([None if n % 7 == 0 else int(n) for n in rng.integers(0, 200, rows)], pa.int32()),
            "t": pa.array([int(n) * 1_000_000 for n in hours], pa.timestamp("us", "UTC")),
        }
    )


@pytest.fixture(scope="module")
def session(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> SparkSession:
    folder = tmp_path_factory.mktemp("tables")
    spark.range(3).withColumnRenamed("id", "a").write.parquet(str(folder / "files"))
    own = spark.newSession()
    prepare(own, folder)
    return own


def prepare(own: SparkSession, folder: Path) -> None:
    """Create the tables and functions that the expressions name."""
    own.conf.set("spark.millpond.changes", "all")
    own.read.parquet(str(folder / "files")).createOrReplaceTempView("files")
    own.sparkContext.parallelize([(1,), (2,)]).toDF(["a"]).createOrReplaceTempView("rows")
    own.udf.register("bigger", lambda n: n + 1, "bigint")
    own.udf.register("any_number", F.udf(lambda n: n, "bigint").asNondeterministic())
    own.sql("declare or replace variable least_size bigint default 2")


def reasons(session: SparkSession, folder: Path, text: str) -> list[str]:
    """Why operators of a query stay on Spark, each with its code; what is left since others are, aside."""
    operators = millpond.explain(session.sql(text, events=stream(session, folder, DDL)), "update", as_dict=True)[
        "operators"
    ]
    found = [operator["reason"]["text"] for operator in operators if "reason" in operator]
    return [text for text in found if not text.startswith("MP-ABOVE")]


@pytest.mark.parametrize("what", UNSTABLE)
def test_what_may_be_another_is_refused_by_name(session: SparkSession, tmp_path: Path, what: str) -> None:
    for number, x in enumerate(UNSTABLE[what]):
        places = sorted(PLACES)
        text, _ = query("an aggregate", places[number % len(places)], x, "an aggregate without keys")
        found = reasons(session, tmp_path, text)
        assert [reason.split(":")[0] for reason in found] == ["MP-BETWEEN"], (x, found)


@pytest.mark.parametrize("lower", LOWER)
@pytest.mark.parametrize("upper", UPPER)
def test_it_is_refused_whatever_takes_it_up(session: SparkSession, tmp_path: Path, lower: str, upper: str) -> None:
    text, _ = query(lower, "a column", "unix_timestamp() + n", upper)
    assert any(reason.startswith("MP-BETWEEN") for reason in reasons(session, tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "select g, count(*) c from (select k, g, count(*) + unix_timestamp() n from {events} group by k, g) group by g",
        "select g, sum(n - unix_timestamp()) s from (select k, g, count(*) n from {events} group by k, g) group by g",
        "select g, count(*) filter (where n > day(now())) s from (select k, g, count(*) n from {events} group by k, g)"
        " group by g",
        "select n + day(now()) d, count(*) c from (select k, g, count(*) n from {events} group by k, g)"
        " group by n + day(now())",
        "select g, count(*) c from (select k, g, count(*) n from {events} group by k, g)"
        " where k > unix_timestamp() group by g",  # Spark moves it below the lower aggregate
        "select * from (select *, row_number() over (partition by g, n + day(now()) order by k) rn"
        " from (select k, g, count(*) n from {events} group by k, g)) where rn = 1",
    ],
)
def test_what_belongs_to_an_operator_is_looked_at(session: SparkSession, tmp_path: Path, text: str) -> None:
    (found,) = reasons(session, tmp_path, text)
    assert found.startswith("MP-BETWEEN")


@pytest.mark.parametrize(
    "text",
    [
        "select g, count(*) c, now() seen from (select k, g, count(*) n from {events} group by k, g) group by g",
        "select g, count(*) c from (select k, g, max(now()) n from {events} group by k, g) group by g",
        "select d, count(*) c from (select k, current_date() d, count(*) n from {events} where v > rand()"
        " group by k, current_date()) group by d",
    ],
)
def test_what_is_evaluated_once_is_not_refused(session: SparkSession, tmp_path: Path, text: str) -> None:
    """Below the lowest operator, by which values are kept; above the topmost, if its deletions are not shown."""
    assert not reasons(session, tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "select g, count(*) c, now() seen from {events} group by g",
        "select g, count(*) c from {events} group by g having c > 5 * rand()",
        "select * from (select k, count(*) c from {events} group by k) where k in (select a from files)",
        "select * from (select k, count(*) c from {events} group by k) where k > unix_timestamp()",
    ],
)
def test_all_changes_are_not_shown_through_it(session: SparkSession, tmp_path: Path, text: str) -> None:
    df = session.sql(text, events=stream(session, tmp_path, DDL))
    with pytest.raises(UnsupportedError, match="MP-BETWEEN"):
        decide(df, "update", "all")


def test_expressions_over_nothing(session: SparkSession, tmp_path: Path) -> None:
    """Every function of Spark's that needs no argument: it is refused, or gives the same in every session."""
    refused = 0
    for (name,) in session.sql("show system functions").collect():
        try:
            said = f"select cast({name}() as string) x"  # not every type of Spark's has a value in Python
            value, again = session.sql(said), session.newSession().sql(said)
        except Exception:
            continue
        text, _ = query("an aggregate", "a condition", f"{name}()", "an aggregate without keys")
        try:
            found = reasons(session, tmp_path, text)
        except Exception:  # no aggregate or window function goes there
            continue
        refused += bool(found)
        assert found or plain(value.collect()[0]) == plain(again.collect()[0]), name
    assert refused > 20


class Reader:
    """A reader that applies all changes, with the rows that it holds."""

    def __init__(self, session: SparkSession, folder: Path, text: str, keys: list[str]) -> None:
        self.session = session
        self.folder = folder
        self.text = text
        self.keys = keys
        self.held: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.written = 0

    def run(self, batches: int) -> None:
        """Run batches, and hold what there is after each against the batch query."""
        first = self.written
        for number in range(first, first + batches):
            write(self.folder / "in", number, table(number))
        out: Batches = {}
        df = self.session.sql(self.text, events=stream(self.session, self.folder / "in", DDL))
        run(df, "update", self.folder / "state", ours=True, into=out)
        self.written += batches
        assert sorted(out) == list(range(first, self.written))
        for number in sorted(out):
            files = [str(self.folder / "in" / f"{n:04d}.parquet") for n in range(number + 1)]
            df = self.session.sql(self.text, events=self.session.read.schema(DDL).parquet(*files))
            key = keyed(df.columns, self.keys)
            for row in out[number]:
                if row[-1] == "D":
                    assert same(self.held.pop(key(row)), row[:-1])
            for row in out[number]:
                if row[-1] != "D":
                    assert (key(row) in self.held) == (row[-1] == "U")
                    self.held[key(row)] = row[:-1]
            wanted = sorted((plain(row) for row in df.collect()), key=order)
            kept = sorted(self.held.values(), key=order)
            assert len(kept) == len(wanted), number
            assert all(same(a, b) for a, b in zip(kept, wanted, strict=True)), number

    def refused(self) -> str:
        """Run one batch more; why its start is refused, if it is."""
        try:
            self.run(1)
        except StateIncompatibleError as error:
            return str(error)
        return ""


@settings(
    max_examples=DRAWN,
    deadline=None,
    phases=[Phase.generate],  # to look for a smaller example takes many starts
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_rows_are_those_of_batch_sql(
    session: SparkSession, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Three batches with a restart, at which a setting may change: by name refused, or right."""
    x = data.draw(st.sampled_from(STABLE) | st.sampled_from(STABLE) | st.sampled_from(LOOKS), label="expression")
    lower, upper = data.draw(st.sampled_from(sorted(LOWER))), data.draw(st.sampled_from(sorted(UPPER)))
    place = data.draw(st.sampled_from(sorted(PLACES)))
    text, keys = query(lower, place, x, upper)
    folder = tmp_path_factory.mktemp("drawn")
    found = reasons(session, folder, text)
    assert bool(found) == (x in LOOKS), found
    if found:
        assert any(reason.startswith("MP-BETWEEN") for reason in found)
        return
    setting = data.draw(st.none() | st.sampled_from(sorted(SETTINGS)), label="setting")
    reader = Reader(session, folder, text, keys)
    before = {name: session.conf.get(name) for name in SETTINGS}
    try:
        for name, (first, _) in SETTINGS.items():
            session.conf.set(name, first)
        reader.run(2)
        if setting is not None:
            session.conf.set(setting, SETTINGS[setting][1])
        said = reader.refused()
        if said:
            assert setting not in (None, "spark.sql.shuffle.partitions"), said
            assert ("time zone" if setting == "spark.sql.session.timeZone" else setting) in said
            session.conf.set(setting, SETTINGS[setting][0])
            assert not reader.refused()
    finally:
        for name, value in before.items():
            session.conf.set(name, value)


def test_the_clock_does_not_count_among_rows_that_are_taken_back(session: SparkSession, tmp_path: Path) -> None:
    """A clock between operators is refused: rows that were taken back too late would be counted for good."""
    text = (
        "select count(*) c from (select k, max(t) last from {events} group by k)"
        " where last > current_timestamp() - interval 20 seconds"
    )
    df = session.sql(text, events=stream(session, tmp_path, DDL))
    session.conf.set("spark.millpond.onUnsupported", "error")
    try:
        with pytest.raises(UnsupportedError, match=r"MP-BETWEEN: .*current_timestamp\(\)"):
            run(df, "update", tmp_path / "state", ours=True, into={})
    finally:
        session.conf.unset("spark.millpond.onUnsupported")


AGAIN = "select count(*) c, sum(n) s from (select k, g, count(*) n, max(t) last from {events} group by k, g) where "


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (AGAIN + "n >= 1", AGAIN + "n >= 2", r"n >= .*2.*; its checkpoint has .*n >= .*1"),
        (AGAIN + "k >= 1", AGAIN + "k >= 2", r"k >= .*2.*; its checkpoint has .*k >= .*1"),
        (AGAIN + "n >= least_size", AGAIN + "n >= least_size", "least_size=3.*least_size=2"),
        (
            "select k, c from (select k, count(*) c from {events} group by k) where c > 1",
            "select k, c from (select k, count(*) c from {events} group by k) where c > 2",
            "c > ",
        ),
    ],
)
def test_a_change_of_it_is_refused_at_the_start(
    session: SparkSession, tmp_path: Path, first: str, then: str, said: str
) -> None:
    write(tmp_path / "in", 0, table(0))
    for text, refused in ((first, False), (then, True)):
        if refused and "least_size" in text:
            session.sql("set variable least_size = 3")
        df = session.sql(text, events=stream(session, tmp_path / "in", DDL))
        try:
            if refused:
                with pytest.raises(StateIncompatibleError, match=f"(?s){said}"):
                    run(df, "update", tmp_path / "state", ours=True, into={})
            else:
                run(df, "update", tmp_path / "state", ours=True, into={})
        finally:
            session.sql("set variable least_size = 2")


def test_other_code_of_a_function_is_refused_at_the_start(session: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "in", 0, table(0))

    def start(least: int) -> None:
        session.udf.register("enough", lambda n: n >= least, "boolean")
        df = session.sql(AGAIN + "enough(n)", events=stream(session, tmp_path / "in", DDL))
        run(df, "update", tmp_path / "state", ours=True, into={})

    start(1)
    start(1)
    with pytest.raises(StateIncompatibleError, match="function enough has other code than its checkpoint"):
        start(2)


def test_what_changes_nothing_is_no_change(session: SparkSession, tmp_path: Path) -> None:
    """Another name of a subquery, and what the lowest operator is given."""
    write(tmp_path / "in", 0, table(0))
    below = "(select k, count(*) n, sum(v) v from (select k, {v} v from {{events}}) group by k)"
    text = "select n, count(*) c from " + below + " {name} where n > 0 and v + 1 > 3 group by n"
    for v, name in (("v", "a"), ("v * 2", "b")):
        df = session.sql(
            text.format(v=v, name=name).replace("{{", "{").replace("}}", "}"),
            events=stream(session, tmp_path / "in", DDL),
        )
        run(df, "update", tmp_path / "state", ours=True, into={})


def joined(session: SparkSession, folder: Path, condition: str) -> DataFrame:
    """A left outer join of the stream with itself by a key, the time, and a condition."""
    sides = {
        side: stream(session, folder, DDL)
        .withWatermark("t", "1 hour")
        .selectExpr(*(f"{column} as {side}{column}" for column in "kgtv"))
        for side in ("l", "r")
    }
    return session.sql(f"select lk, lv, rv from {{l}} left join {{r}} on lk = rk and lt = rt and {condition}", **sides)


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ("lv * 2 <= rv", "lv * 3 <= rv", r"lv \* .*3.*; its checkpoint has .*lv \* .*2"),
        ("scaled(lv) <= rv", "scaled(lv) <= rv", "function scaled has other code than its checkpoint"),
        ("upper(lg) = upper(rg)", "lower(lg) = lower(rg)", "lower.*; its checkpoint has .*upper"),
    ],
)
def test_a_change_of_what_a_join_stores_is_refused_at_the_start(
    session: SparkSession, tmp_path: Path, first: str, then: str, said: str
) -> None:
    """Stored rows have the operands of its condition, and its keys, as they were computed then."""

    def start(condition: str, factor: int) -> None:
        session.udf.register("scaled", lambda v: None if v is None else v * factor, "int")
        run(joined(session, tmp_path / "in", condition), "append", tmp_path / "state", ours=True, into={})

    for number in range(2):  # the same query goes on
        write(tmp_path / "in", number, table(number))
        start(first, 2)
    write(tmp_path / "in", 2, table(2))
    with pytest.raises(StateIncompatibleError, match=f"(?s)between 'the left side' and 'left outer join': .*{said}"):
        start(then, 3)
    start(first, 2)

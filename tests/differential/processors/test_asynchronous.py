"""An asynchronous processor on Millpond and its synchronous twin on Spark."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import millpond
from millpond.errors import UnsupportedError, UsageError
from tests.differential.data import write
from tests.differential.harness import run, stream
from tests.differential.processors.checks import DDL, ONCE, ROCKSDB, Turn, compare, script, values
from tests.differential.processors.processors import START_MS
from tests.worker.processors.asynchronous.twins import Async, Single, Sync

KEYS = ["a", "a", "a", "b", "b", "c", "d", "e", "f", "g", ""]


def transformed(df: DataFrame, processor: Any, time: str = "none") -> DataFrame:
    groups = df.groupBy("k")
    call = groups.transformWithStateInPandas if processor.pandas else groups.transformWithState
    return call(processor, processor.ddl, "update", time)


def twins(kind: type[Async], time: str = "none", pandas: bool = False, **more: Any) -> Any:
    """A query with an asynchronous processor, and with its twin in the session that has no settings of Millpond's."""

    def query(df: DataFrame) -> DataFrame:
        ours = df.sparkSession.conf.get("spark.millpond.partitions", None)
        processor = (kind if ours else Sync)(start=START_MS, unit=1000, **more)
        processor.pandas = pandas
        return transformed(df.withWatermark("ts", "3 seconds"), processor, time)

    return query


def operation(rng: random.Random, timed: bool) -> Any:
    n, word, name = rng.randint(-3, 300), rng.choice("xyz"), rng.choice(["value", "list", "map"])
    reads: list[Any] = [("get",), ("list",), ("entries",), ("keys",), ("values",), ("at", word), ("has", word)]
    writes: list[Any] = [
        ("update", n),
        ("append", n),
        ("put", n),
        ("extend", n),
        ("set", word, n),
        ("set", word, n + 1),
    ]
    some: list[Any] = [
        ("remove", word),
        ("clear", name),
        ("exists", name),
        ("gather", rng.sample(reads, 3)),
        ("say", 2),
    ]
    if timed:
        some += [
            ("timer", rng.randint(0, 60)),
            ("timer", rng.randint(0, 60)),
            ("no timer", rng.randint(0, 60)),
            ("timers",),
        ]
    return rng.choice(rng.choice([reads, writes, some]))


def batch(rng: random.Random, number: int, timed: bool) -> pa.Table:
    lines = []
    for _ in range(rng.choice([0, 40, 150])):
        do = [operation(rng, timed) for _ in range(rng.randint(1, 3))]
        lines.append((rng.choice(KEYS), repr(do), number * 10 + rng.randint(-5, 10)))
    return script(*lines)


@pytest.mark.parametrize(
    ("seed", "kind", "time", "pandas", "ttl"),
    [
        (1, Async, "none", False, 0),
        (2, Async, "eventTime", True, 0),
        (3, Single, "eventTime", False, 0),
        (4, Single, "processingTime", False, 10**8),
        (5, Async, "processingTime", False, 1),
    ],
)
def test_twins(spark: SparkSession, tmp_path: Path, seed: int, kind: Any, time: str, pandas: bool, ttl: int) -> None:
    rng = random.Random(seed)
    timed = time == "eventTime"
    due = [
        ("gather", [("get",), ("entries",)]),
        ("timers",),
        ("update", 1),
        ("remove", "x"),
        ("timer", 77),
        ("append", 5),
    ]
    query = twins(kind, time, pandas, ttl=ttl, due=due)
    tables = [batch(rng, number, timed) for number in range(6)]
    conf = {"spark.millpond.async.inFlight": "3"}
    if time == "processingTime":
        turns = [Turn(query, [table], trigger=ONCE, conf=conf) for table in tables[:3]]
    else:
        turns = [Turn(query, tables[:3], conf=conf), Turn(query, tables[3:])]
    found = compare(spark, tmp_path, turns)
    rows = [row for some in found.values() for row in some]
    assert len(rows) > 100
    assert any(row[1] < 0 for row in rows) == timed


def test_a_processor_may_become_asynchronous(spark: SparkSession, tmp_path: Path) -> None:
    def synchronous(df: DataFrame) -> DataFrame:
        return transformed(df.withWatermark("ts", "3 seconds"), Sync())

    table = script(("a", "[('update', 1), ('set', 'x', 2)]"), ("b", "[('append', 3)]"))
    again = script(("a", "[('get',), ('entries',)]"), ("b", "[('list',)]"))
    found = compare(spark, tmp_path, [Turn(synchronous, [table]), Turn(twins(Async), [again])])
    assert values(found)[-1] == [("a", 0, "[(('x',), (2,))]"), ("a", 0, "(1,)"), ("b", 1, "[(3,)]")]


def test_it_is_explained(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = spark.newSession()
    write(tmp_path, 0, script(("a", "[]")))
    df = transformed(stream(session, tmp_path, DDL), Async())
    millpond.explain(df, "update")
    assert "asynchronous, with at most 6,000 keys in flight" in capsys.readouterr().out
    session.conf.set("spark.millpond.async.inFlight", "7")
    (operator,) = millpond.explain(df, "update", as_dict=True)["operators"]
    assert operator["functions"] == [
        "value: value",
        "list: list",
        "map: map",
        "asynchronous, with at most 7 keys in flight",
    ]


def test_half_an_asynchronous_processor_is_refused_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    class Half(Sync):
        async def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any: ...

    write(tmp_path, 0, script(("a", "[]")))
    with pytest.raises(UsageError, match=r"Derive it from millpond\.AsyncStatefulProcessor"):
        millpond.explain(transformed(stream(spark.newSession(), tmp_path, DDL), Half()))


def test_errors_name_operator_and_key(spark: SparkSession, tmp_path: Path) -> None:
    class Failing(Async):
        async def record(self, key: Any, at: int, program: Any) -> Any:
            await self.value.get()
            if program:
                import asyncio

                await asyncio.sleep(1)
            yield None

    session = spark.newSession()
    session.conf.set("spark.millpond.partitions", "1")
    write(tmp_path / "in", 0, script(("wrong", "[1]")))
    df = transformed(stream(session, tmp_path / "in", DDL), Failing())
    with pytest.raises(StreamingQueryException) as raised:
        run(df, "update", tmp_path / "ours", ours=True, into={})
    for said in (
        "awaits asyncio.tasks.sleep for key ('wrong',)",
        "operator 0",
        "millpond.gather",
        "await asyncio.sleep(1)",
    ):
        assert said in str(raised.value)


def test_what_stays_on_spark_is_refused_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would call its `init` in the first batch only."""
    session = spark.newSession()
    write(tmp_path / "in", 0, script(("a", "[]")))
    groups = stream(session, tmp_path / "in", DDL).groupBy("k")
    df = groups.transformWithState(Async(), Async.ddl, "complete", "processingTime")
    with pytest.raises(UnsupportedError, match=r"MP-PROCESSOR.* Spark does not run asynchronous processors"):
        run(df, "complete", tmp_path / "ours", ours=True, into={})


def test_spark_itself_says_what_is_needed(spark: SparkSession, tmp_path: Path) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    write(tmp_path / "in", 0, script(("a", "[]")))
    df = transformed(stream(session, tmp_path / "in", DDL), Async())
    with pytest.raises(StreamingQueryException) as raised:
        run(df, "update", tmp_path / "native", ours=False, into={})
    assert "Async is an asynchronous processor, which Spark cannot run" in str(raised.value._stackTrace)

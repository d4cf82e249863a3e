"""Stages of the user's plan that announce keys: which operators', when, and that they are read ahead."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType

import millpond
from millpond.errors import UsageError
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.plan.replay.fingerprint import fingerprint
from millpond.plan.rewriter import with_hints
from millpond.tasks.operator_task import OperatorTask
from millpond.worker.exchange import ExchangeWrite
from tests.support.hint_requests import requesting_hints

Figures = list[dict[str, float]]

KEYS = 300_000
ROWS = 60_000


@pytest.fixture
def session(spark: SparkSession, own_slots: None) -> SparkSession:
    session = spark.newSession()
    for name, value in {"slot.memory": "16m", "slots": "1", "partitions": "2"}.items():
        session.conf.set(f"spark.millpond.{name}", value)
    return session


@pytest.fixture
def keyed(spark: SparkSession) -> DataFrame:
    return keyed_rows(spark)


def keyed_rows(session: SparkSession) -> DataFrame:
    numbers = session.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    return numbers.withColumn("k", F.expr(f"value * 7919 % {KEYS}"))


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(0.3)
        yield batch


def elsewhere(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Keys of which none has come."""
    for batch in slowly(batches):
        keys = pa.array(batch.column("k").to_numpy() + KEYS)
        yield batch.set_column(batch.schema.get_field_index("k"), "k", keys)


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").count()


def run(df: DataFrame, checkpoint: Path, shown: dict[int, int], last: int) -> tuple[int, Figures]:
    """Run a query until a batch is done; the number of the last one, and the figures of those that were seen."""
    done = [-1]
    figures: dict[int, dict[str, float]] = {}

    def take(rows: DataFrame, number: int) -> None:
        shown.update((row.k, row["count"]) for row in rows.collect())
        done.append(number)

    writer: Any = millpond.writeStream(df).outputMode("update").option("checkpointLocation", str(checkpoint))
    query = writer.foreachBatch(take).start()
    deadline = time.monotonic() + 200
    try:
        while query.isActive and done[-1] < last:
            assert time.monotonic() < deadline, list(figures.values())
            time.sleep(0.05)
            progress = query.lastProgress  # `recentProgress` takes the driver longer with each batch
            if progress is not None and "millpond" in progress.observedMetrics:
                figures[progress.batchId] = progress.observedMetrics["millpond"].asDict()
    finally:
        query.stop()
    assert query.exception() is None
    return done[-1], list(figures.values())


def added(figures: Figures, name: str) -> float:
    return sum(one[name] for one in figures)


@pytest.mark.parametrize("right", [True, False])
def test_keys_are_read_ahead_where_the_stage_sees_them(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """No other source gives hints: exactly the keys that the stage sees are prefetched, asked for or not."""

    def silent(task: OperatorTask) -> ExchangeWrite:
        return ExchangeWrite(msgspec.structs.replace(task, lookaheads=()))

    monkeypatch.setattr("millpond.query.launch.ExchangeWrite", silent)
    rows = millpond.lookahead(keyed_rows(session), "k")
    query = counts(rows.mapInArrow(slowly if right else elsewhere, rows.schema))
    shown: dict[int, int] = {}
    with requesting_hints(["lookahead(k)"], operators=1, partitions=1):
        run(query, tmp_path, shown, 6)
        last, figures = run(query, tmp_path, shown, 12)
        for _ in range(6):  # on a busy machine hints come too late for some batches, and then rest for many
            if added(figures, "prefetched_keys"):
                break
            last, figures = run(query, tmp_path, shown, last + 6)
    numbers = session.range(ROWS * (last + 1)).selectExpr(f"id * 7919 % {KEYS} + {0 if right else KEYS} as k")
    assert shown == {row.k: row["count"] for row in counts(numbers).collect()}
    read, used = added(figures, "prefetched_keys"), added(figures, "prefetched_used")
    if right:
        assert used > 0.9 * read
    else:
        assert used == 0


def told(df: DataFrame) -> list[list[str]]:
    operators = millpond.explain(df, "update", as_dict=True)["operators"]
    return [operator["lookaheads"] for operator in operators]


def why(df: DataFrame) -> list[str]:
    return [
        reason
        for stage in millpond.explain(df, "update", as_dict=True)["stages"]
        for reason in stage["reasons"].values()
    ]


def test_stages_replacement_the_order_of_the_plan(keyed: DataFrame) -> None:
    number = F.udf(lambda value: value, LongType())
    one = millpond.lookahead(keyed, "k")
    two = millpond.lookahead(one.withColumn("n", number("value")).where("n > 3"), "K", "value")
    assert told(counts(two)) == [
        ["lookahead(k)", "lookahead(k, value)", "exchange"]
    ]  # a function of the user is not repeated
    again = millpond.lookahead(two.where("value > 1"), "k")
    assert told(counts(again))[0][:3] == ["lookahead(k)", "lookahead(k, value)", "lookahead(k) #2"]
    assert told(counts(one.union(keyed.where("k > 7")))) == [["source", "lookahead(k)", "exchange"]]
    assert told(counts(one.union(millpond.lookahead(keyed, "k", "value")))) == [
        ["source", "lookahead(k) + lookahead(k, value)", "exchange"]
    ]
    chain = one.dropDuplicates(["value", "k"]).groupBy("k").agg(F.max("value").alias("count"))
    assert told(chain) == [["source", "exchange"], ["lookahead(k)", "exchange"]]


def test_keys_that_expressions_of_spark_compute(keyed: DataFrame) -> None:
    one = millpond.lookahead(keyed, "k", "timestamp")
    assert told(one.withColumn("m", F.expr("k % 10 + 1")).groupBy("m").count())[0] == [
        "source",
        "lookahead(k, timestamp)",
        "exchange",
    ]
    windows = one.withWatermark("timestamp", "1 minute").groupBy(F.window("timestamp", "10 seconds", "5 seconds"), "k")
    assert told(windows.count()) == [["lookahead(k, timestamp)", "exchange"]]


def test_sides_of_joins_are_told_apart_and_their_times_where_they_are_named(keyed: DataFrame) -> None:
    """Without its time a row may meet what there is of any: its key is announced all the same."""
    number = F.udf(lambda value: value, LongType())
    rows = keyed.withColumn("n", number("value"))
    for columns, named in ((("k",), False), (("k", "timestamp"), True)):
        left, right = (
            millpond.lookahead(rows.select(F.col("k").alias("k"), "timestamp", "n"), *columns)
            .withWatermark("timestamp", "1 minute")
            .select(F.col("k").alias(f"k{side}"), F.col("timestamp").alias(f"t{side}"), "n")
            for side in (0, 1)
        )
        on = F.expr("k0 = k1 and t1 >= t0 - interval 1 minute and t1 <= t0 + interval 1 minute")
        decision = decide(left.join(right, on).select("k0", "t1"), "append")
        title = f"lookahead({', '.join(columns)})"
        announces = [one.hints[0] for one in decision.stages]
        assert [one.name for one in announces] == [title, title]
        for one in announces:
            assert len(one.columns) == 3
            assert any(part.kind == "AttributeReference" for part in one.columns[2].walk()) == named


def test_why_a_stage_announces_nothing(keyed: DataFrame, capsys: pytest.CaptureFixture[str]) -> None:
    one = millpond.lookahead(keyed, "k")
    number = F.udf(lambda value: value, LongType())
    changed = counts(one.withColumn("k", number("k")))
    assert told(changed) == [["exchange"]]
    assert why(changed) == ["its key depends on k, which is <lambda>(k)"]
    called = one.where("k <> 5").groupBy(number("k")).count()  # not for rows that are filtered out
    assert told(called) == [["exchange"]]
    assert why(called) == ["its key depends on <lambda>(k)"]
    assert why(one.groupBy(F.expr("k + (select max(id) from range(5))")).count())[0].startswith("its key depends on ")
    assert why(one.groupBy("value", "k").count()) == ["its key depends on value, which the stage does not name"]
    assert why(one.groupBy(F.rand().alias("r")).count())[0].startswith("its key depends on ")
    assert why(one.groupBy().count()) == ["all its rows have one key"]
    assert why(one.mapInArrow(slowly, "other bigint").groupBy("other").count()) == [
        "its key depends on other, made by MapInArrow"
    ]
    millpond.explain(changed, "update")
    assert "lookahead(k) announces nothing (aggregate by k: its key depends on k" in capsys.readouterr().out


def test_what_is_no_column(keyed: DataFrame) -> None:
    for names, said in (
        (["nobody"], "no column 'nobody'"),
        ([], "no column to look at"),
        ([F.col("k")], "no name of a column"),
        ([["k"]], r"\['k'\] is no name of a column. Name each: lookahead\(df, 'key', 'other'\)"),
    ):
        with pytest.raises(UsageError, match=said):
            millpond.lookahead(keyed, *names)
    with pytest.raises(UsageError, match="Two columns"):
        millpond.lookahead(keyed.select("k", "k"), "k")


def all_pass(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
    for batch in batches:
        yield pa.repeat(pa.scalar(True), len(batch))


def test_columns_may_be_called_what_a_stage_adds(spark: SparkSession) -> None:
    rows = spark.range(3).selectExpr("id as __ahead", "id + 1 as __AHEAD0", "id + 2 as `__ahead_`")
    catalyst = Catalyst(spark)
    below = catalyst.analyzed(rows)
    passed = catalyst.dataframe(with_hints(catalyst, below, below.output[2:], all_pass, "stage"))
    assert passed.columns == rows.columns
    assert sorted(passed.collect()) == sorted(rows.collect())


def test_a_query_is_the_same_with_and_without(keyed: DataFrame) -> None:
    """So that one may come and go between two starts, whatever batch has to be run again."""
    catalyst = Catalyst(keyed.sparkSession)
    ways: list[Callable[[DataFrame], DataFrame]] = [lambda df: df, lambda df: millpond.lookahead(df, "k")]
    decisions = [decide(counts(way(keyed).where("value > 3")), "update") for way in ways]
    one, other = decisions
    assert one.specs == other.specs
    assert [operator.title for operator in one.operators] == [operator.title for operator in other.operators]
    assert fingerprint(catalyst, one) == fingerprint(catalyst, other)
    assert one.staged is None
    assert other.staged is not None

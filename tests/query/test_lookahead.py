"""Keys are announced while rows are on their way to slots, and a batch before the source gives them."""

import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.files.locations.opening import open_filesystem
from millpond.plan.catalyst.jvm import Catalyst
from millpond.plan.decide import decide
from millpond.plan.lookahead.source import prefetch_sources
from millpond.query.lookahead.runner import _Runner, lookaheads
from millpond.query.lookahead.sources import Files, upcoming_rows
from millpond.query.starting import start
from millpond.slot.process import client
from millpond.tasks.operator_task import OperatorTask

KEYS = 300_000
ROWS = 60_000


def counted(spark: SparkSession) -> DataFrame:
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    return numbers.where("value % 7 > 0").groupBy(F.expr(f"value * 7919 % {KEYS}").alias("k")).count()


@pytest.fixture
def session(spark: SparkSession, own_slots: None) -> SparkSession:
    session = spark.newSession()
    for name, value in {"slot.memory": "16m", "slots": "1", "partitions": "2"}.items():
        session.conf.set(f"spark.millpond.{name}", value)
    return session


class Shown:
    """A query's last count of each key, by foreachBatch, and what it said of each batch."""

    def __init__(self, session: SparkSession, checkpoint: Path) -> None:
        self.session = session
        self.checkpoint = checkpoint
        self.rows: dict[int, int] = {}
        self.last = -1
        self.figures: dict[int, dict[str, float]] = {}

    def run(self, batches: int, pause: float = 0.0) -> None:
        """Start, and stop after the batch of this number."""
        over = threading.Event()

        def take(rows: DataFrame, number: int) -> None:
            found = {row.k: row["count"] for row in rows.collect()}
            self.rows |= found
            self.last = number
            if number >= batches:
                over.set()
            time.sleep(pause)

        query = (
            millpond.writeStream(counted(self.session))
            .outputMode("update")
            .option("checkpointLocation", str(self.checkpoint))
            .foreachBatch(take)
            .start()
        )
        try:
            while not over.wait(0.01) and query.isActive:
                for progress in query.recentProgress:
                    if "millpond" in progress.observedMetrics:
                        self.figures[progress.batchId] = progress.observedMetrics["millpond"].asDict()
        finally:
            query.stop()
        assert query.exception() is None

    def check(self) -> None:
        """The counts are those of what was read."""
        numbers = self.session.range(ROWS * (self.last + 1))
        rows = numbers.where("id % 7 > 0").groupBy(F.expr(f"id * 7919 % {KEYS}").alias("k")).count()
        assert self.rows == {row.k: row["count"] for row in rows.collect()}


def test_keys_are_announced_from_the_exchange(session: SparkSession, tmp_path: Path) -> None:
    shown = Shown(session, tmp_path)
    shown.run(9)
    shown.check()
    read = [one["prefetched_keys"] for one in shown.figures.values()]
    used = [one["prefetched_used"] for one in shown.figures.values()]
    assert sum(read) > 0
    assert sum(used) > 0.9 * sum(read)
    shown.run(13)
    shown.check()


def test_keys_are_announced_a_batch_before_the_source_gives_them(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a slot had found that hints of the exchange come too late."""
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            for file in Path(tempfile.gettempdir()).glob("millpond-*/*/hints/*/*,exchange"):
                with suppress(FileNotFoundError):
                    file.rename(file.with_name(f"{file.name.partition(',')[0]},source"))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        shown = Shown(session, tmp_path)
        shown.run(12, pause=1.0)
    finally:
        over.set()
        asking.join()
    shown.check()
    read = sum(one["prefetched_keys"] for one in shown.figures.values())
    used = sum(one["prefetched_used"] for one in shown.figures.values())
    assert read > 0
    assert used > 0.9 * read


def test_whatever_opens_state_knows_who_may_announce_keys(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that a restart opened early used to ask for hints from a source without a lookahead, and the exchange."""
    opened: list[OperatorTask] = []
    open_ahead = client.open_partitions

    def noted(tasks: list[OperatorTask], *others: Any) -> None:
        opened.extend(tasks)
        open_ahead(tasks, *others)

    monkeypatch.setattr(start, "open_partitions", noted)
    rates = session.readStream.format("rate").load().groupBy("value").count()
    for _ in range(2):
        writer = millpond.writeStream(rates).outputMode("update").format("noop")
        query = writer.option("checkpointLocation", str(tmp_path)).trigger(once=True).start()
        query.awaitTermination()
    assert [task.lookaheads for task in opened] == [("exchange",)]


class Looking:
    """A lookahead that looks `batches` times, some of which fail."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fails: set[int], batches: int, error: type[Exception] = FileNotFoundError
    ) -> None:
        self.looked: list[int] = []
        self.rests: list[float] = []
        self._fails, self._batches, self._batch, self._error = fails, batches, -1, error
        runner = object.__new__(_Runner)
        runner._query, runner._tasks = self, [SimpleNamespace()]
        monkeypatch.setattr(runner, "_wants_hints", lambda task: True)
        monkeypatch.setattr(runner, "_send_hints", self._look)
        runner.run()

    def awaitTermination(self, seconds: float) -> bool:
        self.rests.append(seconds)
        self._batch += 1
        return self._batch >= self._batches

    def _look(self, asked: Sequence[OperatorTask]) -> None:
        self.looked.append(self._batch)
        if self._batch in self._fails:
            raise self._error(self._batch)


@pytest.mark.parametrize("error", [FileNotFoundError, KeyError, TypeError, AttributeError])
def test_a_look_that_fails_costs_its_hints(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """A file is gone, an offset has another form, a topic is new, the application ends."""
    assert Looking(monkeypatch, {1, 2, 5, 6}, 9, error).looked == list(range(9))


def test_looks_in_vain_are_ever_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is away for a while is asked again when it is back, and not all the time until then."""
    looking = Looking(monkeypatch, set(range(2, 20)), 23)
    assert looking.looked == list(range(23))
    away, back = looking.rests[3:21], looking.rests[21:]
    assert all(before < after or before == after == 60 for before, after in pairwise(away))
    assert away[-1] == 60
    assert max(back) < 60


def test_files_that_come_next(spark: SparkSession, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "in coming", tmp_path / "checkpoint"

    def arrive(*numbers: int) -> None:
        folder.mkdir(exist_ok=True)
        for number in numbers:
            part = folder / f"part-{number}.parquet"
            pq.write_table(pa.table({"k": range(number * 10, number * 10 + 10)}), part)
            os.utime(part, (1_700_000_000 + number, 1_700_000_000 + number))

    arrive(0, 1)
    (folder / "_hidden.parquet").write_bytes(b"no file")
    stream = spark.readStream.schema("k bigint").option("maxFilesPerTrigger", 2).parquet(str(folder))
    writer = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    writer.trigger(once=True).start().awaitTermination()
    node = next(one for one in Catalyst(spark).analyzed(stream).walk() if one.kind == "StreamingRelation")
    ahead = upcoming_rows(node, open_filesystem(str(checkpoint)))
    assert isinstance(ahead, Files)
    assert ahead.after(spark, '{"logOffset":0}') is None
    arrive(5, 2, 4, 3)
    rows = ahead.after(spark, '{"logOffset":0}')
    assert rows is not None
    assert sorted(row.k for row in rows.collect()) == list(range(20, 40))
    arrive(6)
    assert ahead.after(spark, '{"logOffset":0}') is None  # the next batch has been announced
    for number in (0, 1):
        (folder / f"part-{number}.parquet").unlink()
    assert ahead.after(spark, '{"logOffset":1}') is not None
    assert not [path for path in ahead._known if "part-0" in path or "part-1" in path]  # what is gone is forgotten


def test_files_are_told_of_as_they_come(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "coming"
    folder.mkdir()

    def arrive(number: int) -> None:
        pq.write_table(pa.table({"k": [number]}), folder / f"part-{number}.parquet")

    stream = spark.readStream.schema("k bigint").parquet(str(folder))
    node = next(one for one in Catalyst(spark).analyzed(stream).walk() if one.kind == "StreamingRelation")
    ahead = upcoming_rows(node, open_filesystem(str(tmp_path / "checkpoint")))
    assert ahead is not None
    for numbers in ([1], [2, 3], [], [4]):
        for number in numbers:
            arrive(number)
        rows = ahead.after(spark, "{}")
        assert (None if rows is None else sorted(row.k for row in rows.collect())) == (numbers or None)


def test_numbers_are_told_of_once(spark: SparkSession) -> None:
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    node = next(one for one in Catalyst(spark).analyzed(stream).walk() if one.kind.startswith("StreamingRelation"))
    ahead = upcoming_rows(node, open_filesystem("/tmp"))
    assert ahead is not None
    rows = ahead.after(spark, '{"offset":5,"timestamp":0}')
    assert rows is not None
    assert sorted(row.value for row in rows.collect()) == list(range(5, 10))
    assert ahead.after(spark, '{"offset":5,"timestamp":0}') is None
    assert ahead.after(spark, '{"offset":10,"timestamp":0}') is not None


@pytest.mark.parametrize("option", ["latestFirst", "maxBytesPerTrigger", "cleanSource"])
def test_files_of_which_it_is_not_known_what_comes_next(spark: SparkSession, tmp_path: Path, option: str) -> None:
    value = {"latestFirst": "true", "maxBytesPerTrigger": "1m", "cleanSource": "delete"}[option]
    stream = spark.readStream.schema("k bigint").option(option, value).parquet(str(tmp_path))
    node = next(one for one in Catalyst(spark).analyzed(stream).walk() if one.kind == "StreamingRelation")
    assert upcoming_rows(node, open_filesystem(str(tmp_path))) is None


def test_the_source_is_looked_at_only_where_listing_the_checkpoint_is_free(spark: SparkSession) -> None:
    decision = decide(counted(spark), "update")

    def announcing(checkpoint: str) -> list[tuple[str, ...]]:
        offsets, both = f"{checkpoint}/offsets", ("source", "exchange")
        return lookaheads(
            decision, OperatorTask("app", "q", "r", 0, decision.specs[0], 1, 1, "memory:", 0, offsets, lookaheads=both)
        )

    assert announcing("file:///checkpoint") == [("source", "exchange")]
    assert announcing("s3a://bucket/checkpoint") == [("exchange",)]


@pytest.mark.parametrize("kind", ["filtered", "function of the user", "key of the user", "batches", "chance", "table"])
def test_only_what_spark_itself_computes_is_computed_ahead(spark: SparkSession, kind: str) -> None:
    """Functions of the user may do more than compute, and tables are not read another time."""
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()
    twice = F.udf(lambda value: 2 * value, "bigint")
    rows = {
        "filtered": lambda: numbers.where("value > 3").withColumn("k", F.explode(F.array("value", F.lit(1)))),
        "function of the user": lambda: numbers.where(twice("value") > 3).withColumn("k", F.col("value")),
        "key of the user": lambda: numbers.withColumn("k", twice("value")),
        "batches": lambda: numbers.select(F.col("value").alias("k")).mapInArrow(lambda batches: batches, "k bigint"),
        "chance": lambda: numbers.where("rand() < 0.5").withColumn("k", F.col("value")),
        "table": lambda: numbers.join(spark.range(5).toDF("value"), "value").withColumn("k", F.col("value")),
    }[kind]()
    decision = decide(rows.groupBy("k").count(), "update")
    assert prefetch_sources(decision) == {0: ("source", "exchange") if kind == "filtered" else ("exchange",)}

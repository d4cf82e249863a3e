"""`millpond.writeStream`: Spark's writer in every respect but where the state lives."""

from __future__ import annotations

import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import AnalysisException, PySparkValueError, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import millpond
from millpond.checkpoint.generation import Restart
from millpond.errors import SettingError, StateIncompatibleError, UnsupportedError, UsageError
from millpond.plan.decide import decide
from millpond.plan.decision.decision import Decision
from millpond.query.launch import Launch
from millpond.query.writer import StreamWriter
from millpond.slot.process.messages import QueryStatus
from tests.differential.data import batch, write
from tests.differential.harness import stream


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    return spark.newSession()


@pytest.fixture
def events(session: SparkSession, tmp_path: Path) -> DataFrame:
    for number in range(2):
        write(tmp_path / "in", number, batch(number, 30))
    return stream(session, tmp_path / "in")


@pytest.fixture
def counts(events: DataFrame) -> DataFrame:
    return events.groupBy("k").agg(F.count("*").alias("n"), F.sum("i32").alias("t"))


@pytest.fixture
def settings(session: SparkSession) -> Iterator[Any]:
    return session.conf


def once(writer: Any, mode: str = "update") -> Any:
    return writer.outputMode(mode).trigger(availableNow=True)


def total(session: SparkSession, tmp_path: Path) -> list[tuple[Any, ...]]:
    table = session.read.parquet(str(tmp_path / "in"))
    return sorted(map(tuple, table.groupBy("k").agg(F.count("*"), F.sum("i32")).collect()), key=str)


def test_memory_sink_in_complete_mode(session: SparkSession, counts: DataFrame, tmp_path: Path) -> None:
    query = once(millpond.writeStream(counts).format("memory").queryName("totals"), "complete").start()
    query.awaitTermination()
    assert sorted(map(tuple, session.table("totals").collect()), key=str) == total(session, tmp_path)


def test_arguments_of_start(session: SparkSession, events: DataFrame, tmp_path: Path) -> None:
    query = (
        millpond.writeStream(events.dropDuplicates(["k"]))
        .trigger(availableNow=True)
        .start(
            str(tmp_path / "out"),
            format="parquet",
            outputMode="append",
            partitionBy=["b"],
            queryName="firsts",
            checkpointLocation=str(tmp_path / "checkpoint"),
        )
    )
    assert query.name == "firsts"
    query.awaitTermination()
    out = session.read.parquet(str(tmp_path / "out"))
    assert any(path.name.startswith("b=") for path in (tmp_path / "out").iterdir())
    assert out.count() == session.read.parquet(str(tmp_path / "in")).select("k").distinct().count()
    assert (tmp_path / "checkpoint" / "millpond" / "query.json").exists()


def test_to_table(session: SparkSession, events: DataFrame, tmp_path: Path) -> None:
    session.sql(f"create table firsts_{tmp_path.name} (k int) using parquet location '{tmp_path / 'table'}'")
    try:
        (
            millpond.writeStream(events.select("k").dropDuplicates())
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .toTable(f"firsts_{tmp_path.name}")
            .awaitTermination()
        )
        wanted = session.read.parquet(str(tmp_path / "in")).select("k").distinct().count()
        assert session.table(f"firsts_{tmp_path.name}").count() == wanted
    finally:
        session.sql(f"drop table firsts_{tmp_path.name}")


def test_each_start_of_a_writer_has_its_own_sink(events: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks: list[tuple[str, str | None]] = []
    monkeypatch.setattr(StreamWriter, "_launch", lambda writer, _: sinks.append((writer._sink(), writer._path)))
    writer = millpond.writeStream(events)
    for path in ("/out", None):
        writer.toTable("firsts")
        writer.start(path)
    writer.start(format="csv")
    assert sinks == [("", None), ("parquet", "/out"), ("", None), ("parquet", None), ("csv", None)]


def test_foreach(counts: DataFrame, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    out.mkdir()

    def keep(row: Any) -> None:
        (out / f"{row.k}-{row.n}").touch()

    once(millpond.writeStream(counts).foreach(keep)).start().awaitTermination()
    assert list(out.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: w.trigger(),
        lambda w: w.trigger(once=True, availableNow=True),
        lambda w: w.queryName(" "),
        lambda w: w.outputMode(""),
        lambda w: w.trigger(processingTime=""),
    ],
)
def test_wrong_calls_fail_as_in_spark(counts: DataFrame, wrong: Any) -> None:
    with pytest.raises(PySparkValueError) as theirs:
        wrong(counts.writeStream)
    with pytest.raises(PySparkValueError) as ours:
        wrong(millpond.writeStream(counts))
    assert ours.value.getCondition() == theirs.value.getCondition()


@pytest.mark.parametrize(
    "start",
    [
        lambda w, p: w.format("noop").start(),  # append without watermark
        lambda w, p: w.format("parquet").outputMode("update").option("checkpointLocation", f"{p}/c").start(f"{p}/o"),
        lambda w, p: w.format("parquet").outputMode("update").start(f"{p}/o"),  # no checkpoint location
        lambda w, p: w.format("nowhere").outputMode("update").option("checkpointLocation", f"{p}/c").start(),
    ],
)
def test_what_spark_refuses_is_refused_in_its_words(counts: DataFrame, tmp_path: Path, start: Any) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011 — whatever Spark raises
        start(counts.writeStream, tmp_path)
    with pytest.raises(type(theirs.value)) as ours:
        start(millpond.writeStream(counts), tmp_path)
    said = [
        re.sub(r"\bo\d+\.", "", str(caught.value)).split("\n")[0] for caught in (ours, theirs)
    ]  # py4j counts objects
    assert said[0] == said[1]


def test_updates_above_updates_are_refused(events: DataFrame) -> None:
    twice = events.groupBy("k").agg(F.count("*").alias("n")).agg(F.min("n"))
    with pytest.raises(AnalysisException, match="correctness"):
        millpond.writeStream(twice).format("noop").outputMode("update").start()


def test_session_settings_are_put_back(session: SparkSession, counts: DataFrame) -> None:
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "123")
    before = session.conf.getAll
    once(millpond.writeStream(counts).format("noop")).start().awaitTermination()
    assert session.conf.getAll == before
    with pytest.raises(AnalysisException):
        millpond.writeStream(counts).format("parquet").outputMode("update").start("/nowhere")
    assert session.conf.getAll == before


def test_another_start_has_the_settings_of_the_first(
    session: SparkSession, counts: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a lost host: the user may have changed the session's settings since."""
    names = ("spark.sql.session.timeZone", "spark.test.before", "spark.test.after", "spark.executor.memory")
    launches: list[Launch] = []
    seen: list[list[str | None]] = []
    supervise = Launch.supervise

    def noted(launch: Launch) -> Any:
        launches.append(launch)
        return supervise(launch)

    def note(df: DataFrame, number: int) -> None:
        seen.append([df.sparkSession.conf.get(name, None) for name in names])

    monkeypatch.setattr(Launch, "supervise", noted)
    session.conf.set(names[0], "Europe/Paris")
    session.conf.set(names[1], "first")
    writer = millpond.writeStream(counts).outputMode("update").foreachBatch(note)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    query.processAllAvailable()
    query.stop()
    session.conf.set(names[0], "Asia/Tokyo")
    session.conf.unset(names[1])
    session.conf.set(names[2], "second")
    # As `getOrCreate` does it with a session that is there already; `spark.conf` refuses it.
    session._jsparkSession.sessionState().conf().setConfString(names[3], "7g")
    before, batches = session.conf.getAll, len(seen)
    write(tmp_path / "in", 2, batch(2, 30))
    (launch,) = launches
    again = launch.run(Restart(1, "run_failed", ("host",)), launch.tasks[0].generation)
    again.processAllAvailable()
    assert [active.runId for active in session.streams.active] == [again.runId]
    again.stop()
    assert session.conf.getAll == before
    assert len(seen) == batches + 1
    assert seen == [seen[0]] * len(seen)
    assert seen[0][:3] == ["Europe/Paris", "first", None]
    assert seen[0][3] != "7g"


@pytest.mark.parametrize("native", [False, True])
def test_a_start_sees_no_settings_of_another_threads_start(
    session: SparkSession, events: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """Spark's start of a query that closes windows is slow here; the other query is started meanwhile."""
    within = threading.Event()
    decided: list[str] = []
    started: list[str] = []
    start = DataStreamWriter.start

    def allows_multiple() -> str:
        return str(session.conf.get("spark.sql.streaming.statefulOperator.allowMultiple"))

    def noted(df: DataFrame, *arguments: Any) -> Decision:
        decided.append(allows_multiple())
        return decide(df, *arguments)

    def slow(writer: DataStreamWriter, *arguments: Any) -> StreamingQuery:
        started.append(allows_multiple())
        if not within.is_set():
            within.set()
            time.sleep(1.0)  # the other start would read the settings meanwhile
        return start(writer, *arguments)

    def begin(name: str, frame: DataFrame) -> StreamingQuery:
        writer = millpond.writeStream(frame).format("noop").option("checkpointLocation", str(tmp_path / name))
        return once(writer, "append").start()

    monkeypatch.setattr("millpond.query.writer.decide", noted)
    monkeypatch.setattr(DataStreamWriter, "start", slow)
    windows = events.withWatermark("ts", "1 minute").groupBy(F.window("ts", "1 minute")).count()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(begin, "first", windows)
        assert within.wait(60)
        second = begin("second", events.select("k") if native else windows)
        for query in (first.result(60), second):
            query.awaitTermination()
    assert decided == ["true", "true"]
    assert started == ["false", "true" if native else "false"]
    assert (tmp_path / "second" / "millpond").exists() != native


def test_the_query_is_known_to_the_session_and_its_listeners(session: SparkSession, counts: DataFrame) -> None:
    seen: list[Any] = []

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:
            pass

        def onQueryProgress(self, event: Any) -> None:
            seen.append(event.progress)

        def onQueryTerminated(self, event: Any) -> None:
            pass

    listener = Listener()
    session.streams.addListener(listener)
    try:
        query = millpond.writeStream(counts).format("noop").outputMode("update").start()
        assert [active.id for active in session.streams.active] == [query.id]
        query.processAllAvailable()
        query.stop()
    finally:
        session.streams.removeListener(listener)
    assert query.lastProgress is not None
    metrics = query.recentProgress[0].observedMetrics["millpond"]
    assert metrics.input_rows == 30


def test_foreach_batch_that_reads_it_all_twice(counts: DataFrame, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def twice(df: DataFrame, number: int) -> None:
        assert not df.isEmpty()
        seen.append((number, len(df.collect())))
        assert df.count() == seen[-1][1]

    once(millpond.writeStream(counts).foreachBatch(twice)).start().awaitTermination()
    assert [number for number, _ in seen] == [0, 1]


def test_foreach_batch_that_only_asks_whether_there_is_anything(counts: DataFrame) -> None:
    seen: list[bool] = []
    once(millpond.writeStream(counts).foreachBatch(lambda df, _: seen.append(df.isEmpty()))).start().awaitTermination()
    assert seen == [False, False]


@pytest.mark.parametrize("peek", [lambda df: df.first(), lambda df: df.limit(1).collect(), lambda df: None])
def test_what_a_foreach_batch_leaves_out_is_done(
    session: SparkSession, counts: DataFrame, tmp_path: Path, peek: Any
) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    writer = millpond.writeStream(counts).foreachBatch(lambda df, _: peek(df)).option("checkpointLocation", checkpoint)
    once(writer).start().awaitTermination()
    assert sorted(map(tuple, millpond.read_state(session, checkpoint).collect()), key=str) == total(session, tmp_path)


def test_slots_on_other_hosts_are_not_asked(
    session: SparkSession, counts: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a consumer stopped early on another host, it is not known whether the partition has run: it runs again."""
    asked: list[str] = []

    def nothing_here(directory: object, query: str, silence: float) -> QueryStatus:
        asked.append(query)
        return QueryStatus()

    monkeypatch.setattr("millpond.query.running.batches.query_status", nothing_here)
    checkpoint = str(tmp_path / "checkpoint")
    writer = millpond.writeStream(counts).foreachBatch(lambda df, _: df.isEmpty())
    once(writer.option("checkpointLocation", checkpoint)).start().awaitTermination()
    assert asked
    assert sorted(map(tuple, millpond.read_state(session, checkpoint).collect()), key=str) == total(session, tmp_path)


def test_a_deleted_checkpoint_begins_anew(
    session: SparkSession, events: DataFrame, counts: DataFrame, tmp_path: Path
) -> None:
    """The same place, another query: what slots and late tasks of the first one hold is not taken for its state."""
    checkpoint, claims = tmp_path / "checkpoint", []
    for frame in (counts, events.select("k").distinct(), counts):
        shutil.rmtree(checkpoint, ignore_errors=True)
        query = once(millpond.writeStream(frame).format("noop").option("checkpointLocation", str(checkpoint))).start()
        query.awaitTermination()
        claims.append(max(path.name for path in (checkpoint / "millpond" / "generations").iterdir()))
    assert claims == sorted(set(claims))
    assert sorted(map(tuple, millpond.read_state(session, str(checkpoint)).collect()), key=str) == total(
        session, tmp_path
    )


def test_what_is_no_stream_is_refused(counts: DataFrame) -> None:
    with pytest.raises(UsageError, match="not str"):
        millpond.writeStream("counts")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="The DataFrame is not a stream"):
        millpond.explain(counts.sparkSession.range(3))
    with pytest.raises(UsageError, match="no output mode 'sometimes'"):
        millpond.explain(counts, "sometimes")


def test_stateless_queries_pass_through(events: DataFrame, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    query = millpond.writeStream(events.select("k")).format("noop").option("checkpointLocation", str(checkpoint))
    once(query, "append").start().awaitTermination()
    assert not (checkpoint / "millpond").exists()


def test_unsupported_operators_stay_on_spark_with_one_line(
    events: DataFrame, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    df = events.groupBy("k").agg(F.expr("percentile(i32, 0.5)"))
    with caplog.at_level(logging.WARNING, "millpond"):
        once(millpond.writeStream(df).format("noop")).start().awaitTermination()
    (line,) = [record.getMessage() for record in caplog.records if "MP-" in record.getMessage()]
    assert "MP-WHOLE" in line
    assert "percentile" in line


TAGGED = "select *, row_number() over (partition by k order by ts) r from (select *, make_dt_interval(k) d from {df})"
NOWHERE = {
    "a type": (f"select * from ({TAGGED}) where r <= 3", "update", "MP-INPUT-TYPE", "Select the columns"),
    "no bound": (
        "select k, row_number() over (partition by k order by ts) r from {df}",
        "update",
        "MP-UNBOUNDED",
        "<= 3",
    ),
    "the output mode": ("select k, count(*) from {df} group by k", "append", "MP-WATERMARK", "withWatermark"),
    "over rows that change": (
        "select n, percentile(n, 0.5) from (select k, count(*) n from {df} group by k) group by n",
        "update",
        "MP-WHOLE",
        "millpond docs functions",
    ),
}


@pytest.mark.parametrize("name", NOWHERE)
def test_what_spark_does_not_run_either_is_said_to_run_nowhere(
    session: SparkSession, events: DataFrame, caplog: pytest.LogCaptureFixture, settings: Any, name: str
) -> None:
    text, mode, code, advice = NOWHERE[name]
    writer = millpond.writeStream(session.sql(text, df=events)).format("noop").outputMode(mode)
    with caplog.at_level(logging.WARNING, "millpond"), pytest.raises(AnalysisException) as spark_says:
        writer.start()
    (line,) = [record.getMessage() for record in caplog.records if "MP-" in record.getMessage()]
    assert code in line
    assert line in spark_says.value.__notes__
    assert "Spark does not run it on streams either" in line
    assert "stays on Spark" not in line
    assert advice in line
    settings.set("spark.millpond.onUnsupported", "error")
    with pytest.raises(UnsupportedError) as error:
        writer.start()
    assert "Spark does not run it" in error.value.action
    assert "onUnsupported" not in error.value.action


def test_functions_of_the_user_that_run_nowhere_are_refused_at_once(events: DataFrame) -> None:
    """Spark's own check lets them pass: their first batch would fail."""

    @F.pandas_udf("double")  # type: ignore[call-overload]
    def mean(x: pd.Series) -> float:
        return float(x.mean())

    df = events.groupBy("k").agg(mean("i32"))
    for mode, code in (("update", "MP-WHOLE"), ("append", "MP-WATERMARK")):
        with pytest.raises(UnsupportedError, match=code) as error:
            millpond.writeStream(df).format("noop").outputMode(mode).start()
        assert "atermark" in error.value.action


def test_unsupported_operators_can_be_an_error(events: DataFrame, settings: Any) -> None:
    settings.set("spark.millpond.onUnsupported", "error")
    df = events.groupBy("k").agg(F.expr("percentile(i32, 0.5)"))
    with pytest.raises(UnsupportedError, match="MP-WHOLE"):
        millpond.writeStream(df).format("noop").outputMode("update").start()


def test_continuous_triggers_stay_on_spark(session: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    df = session.readStream.format("rate").load().dropDuplicates(["value"])
    with caplog.at_level(logging.WARNING, "millpond"), pytest.raises(AnalysisException):
        millpond.writeStream(df).format("noop").trigger(continuous="1 second").start()
    assert any("MP-TRIGGER" in record.getMessage() for record in caplog.records)


def test_disabled(counts: DataFrame, settings: Any, tmp_path: Path) -> None:
    settings.set("spark.millpond.enabled", "false")
    writer = millpond.writeStream(counts).format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    once(writer).start().awaitTermination()
    assert (tmp_path / "checkpoint" / "state").exists()
    assert not (tmp_path / "checkpoint" / "millpond").exists()


def test_settings_are_checked(counts: DataFrame, settings: Any) -> None:
    settings.set("spark.millpond.comit.mode", "sync")
    with pytest.raises(SettingError, match=r"Did you mean spark\.millpond\.commit\.mode\?"):
        millpond.writeStream(counts).format("noop").outputMode("update").start()


def test_asynchronous_progress_is_refused(counts: DataFrame) -> None:
    writer = millpond.writeStream(counts).format("noop").outputMode("update")
    with pytest.raises(UsageError, match="asyncProgressTrackingEnabled"):
        writer.option("asyncprogresstrackingENABLED", True).start()


def test_too_few_retained_batches_are_refused(counts: DataFrame, settings: Any) -> None:
    settings.set("spark.sql.streaming.minBatchesToRetain", "1")
    with pytest.raises(SettingError, match="minBatchesToRetain"):
        millpond.writeStream(counts).format("noop").outputMode("update").start()


def test_the_default_checkpoint_location_is_sparks(counts: DataFrame, settings: Any, tmp_path: Path) -> None:
    settings.set("spark.sql.streaming.checkpointLocation", str(tmp_path / "base"))
    once(millpond.writeStream(counts).format("noop").queryName("named")).start().awaitTermination()
    assert (tmp_path / "base" / "named" / "millpond" / "query.json").exists()
    assert (tmp_path / "base" / "named" / "commits" / "1").exists()


@pytest.mark.parametrize(
    ("fails", "forced", "stays"), [(False, False, False), (True, False, True), (True, True, False)]
)
def test_a_temporary_checkpoint_is_announced_and_goes_with_its_query(
    counts: DataFrame, settings: Any, caplog: pytest.LogCaptureFixture, fails: bool, forced: bool, stays: bool
) -> None:
    settings.set("spark.sql.streaming.forceDeleteTempCheckpointLocation", str(forced).lower())

    def write(df: DataFrame, number: int) -> None:
        assert df.count() >= 0
        assert not fails

    with caplog.at_level(logging.WARNING, "millpond"):
        query = once(millpond.writeStream(counts).foreachBatch(write)).start()
    (said,) = [record.args for record in caplog.records if "no checkpointLocation" in record.msg]
    assert isinstance(said, tuple)
    folder = Path(str(said[0]))
    assert said[1] == "there, too"
    assert folder.exists()
    with pytest.raises(StreamingQueryException) if fails else nullcontext():
        query.awaitTermination()
    (deleting,) = [t for t in threading.enumerate() if t.name == "millpond-temporary"] or [None]
    if deleting is not None:
        deleting.join(60)
    assert folder.exists() == stays


def test_the_state_of_a_temporary_checkpoint_goes_with_it(
    counts: DataFrame, settings: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    states = tmp_path / "states"
    settings.set("spark.millpond.state.location", str(states))
    with caplog.at_level(logging.WARNING, "millpond"):
        once(millpond.writeStream(counts).format("noop")).start().awaitTermination()
    assert f"its state in a folder at {states}; both are deleted" in caplog.text
    for thread in threading.enumerate():
        if thread.name == "millpond-temporary":
            thread.join(60)
    assert list(states.iterdir()) == []


def test_commits_wait_where_the_source_forgets(
    session: SparkSession, events: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    df = events.withColumn("r", F.rand()).groupBy("k").agg(F.max("r"))
    with caplog.at_level(logging.WARNING, "millpond"):
        once(millpond.writeStream(df).format("noop")).start().awaitTermination()
    assert any("commit.mode=sync" in record.getMessage() for record in caplog.records)


def test_install(session: SparkSession, counts: DataFrame, tmp_path: Path) -> None:
    other = session.newSession()
    millpond.install(session)
    millpond.install(session)
    writer = counts.writeStream
    assert type(writer).__module__ == "millpond.query.writer"
    assert type(other.readStream.format("rate").load().writeStream).__module__.startswith("pyspark.")
    once(writer.format("noop").option("checkpointLocation", str(tmp_path / "c"))).start().awaitTermination()
    assert (tmp_path / "c" / "millpond" / "query.json").exists()


def test_a_session_with_millpond_refuses_checkpoints_of_sparks_state(
    session: SparkSession, events: DataFrame, counts: DataFrame, tmp_path: Path
) -> None:
    """A query without state goes on with its own."""

    def run(name: str, frame: DataFrame) -> None:
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / name))
        once(writer).start().awaitTermination()

    run("stateful", counts)
    run("stateless", events)
    millpond.install(session)
    run("stateless", events)
    with pytest.raises(StateIncompatibleError, match=r"\[STATE_INCOMPATIBLE\].*millpond.import_checkpoint"):
        run("stateful", counts)
    session.conf.set("spark.millpond.enabled", "false")
    run("stateful", counts)


def test_spark_connect_is_refused_by_name() -> None:
    class ConnectSession:
        readStream = None

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    class ConnectFrame:
        sparkSession = ConnectSession()

    with pytest.raises(UsageError, match="Spark Connect"):
        millpond.writeStream(ConnectFrame())  # type: ignore[arg-type]


def test_other_versions_of_spark_are_refused_by_name(counts: DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(counts.sparkSession), "version", property(lambda _: "3.5.1"))
    with pytest.raises(UsageError, match=r"4\.1\.x, 4\.2\.x, 4\.3\.x"):
        millpond.writeStream(counts)


def test_what_is_no_session_is_said_so(tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(UsageError, match="A SparkSession is wanted, not NoneType"):
        millpond.install(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="A SparkSession is wanted, not str"):
        millpond.read_state(str(tmp_path), spark)  # type: ignore[arg-type]

"""Starts in every state that a crash can leave: Spark's logs, the state and the sink at different batches."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import millpond
from millpond.checkpoint.formats.documents import write_document
from millpond.checkpoint.generation import claim_name
from millpond.checkpoint.state_schema import read_schema
from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError, TransientError, UsageError
from millpond.files.locations.opening import open_filesystem
from millpond.query.logs.query_logs import _RollBack
from millpond.query.running.runs import await_commits
from millpond.query.starting.start import VERIFY_METADATA, _Startup
from millpond.query.writer import StreamWriter
from millpond.state_reader.reader import StateReader
from tests.differential.processors.processors import Count

SCHEMA = "key bigint, amount bigint"
JOURNAL = "millpond/rolled-back/pending-000000000000001.json"


class Job:
    """A query over files, one a batch, whose checkpoint the tests tamper with between runs."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.source = folder / "in"
        self.sink = folder / "out"
        self.checkpoint = folder / "checkpoint"
        self.source.mkdir(exist_ok=True)
        self.prefix = ""
        self.written: list[list[int]] = []
        self.emitted: dict[int, set[tuple[Any, ...]]] = {}

    def write(self, *batches: list[int]) -> None:
        """Add one file a batch; every row has amount 1."""
        for keys in batches:
            path = self.source / f"{self.prefix}{len(self.written):03d}.parquet"
            hidden = self.source / f".{path.name}"  # a query that runs takes no file half written
            pq.write_table(pa.table({"key": pa.array(keys, pa.int64()), "amount": pa.array([1] * len(keys))}), hidden)
            stamp = 1_700_000_000 + len(self.written)
            os.utime(hidden, (stamp, stamp))
            hidden.rename(path)
            self.written.append(keys)

    def stream(self) -> DataFrame:
        return self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.source))

    def aggregate(self, rows: DataFrame | None = None) -> None:
        """Read all files, or `rows` of them; `emitted` gets each batch's rows (key, count, sum)."""
        self.collect((self.stream() if rows is None else rows).groupBy("key").agg(F.count("*"), F.sum("amount")))

    def collect(self, rows: DataFrame) -> None:
        """Run a query over all files; `emitted` gets each batch's rows."""

        def remember(batch: DataFrame, number: int) -> None:
            self.emitted[number] = {tuple(row) for row in batch.collect()}

        self._run(millpond.writeStream(rows).outputMode("update").foreachBatch(remember))

    def deduplicate(self, rows: DataFrame | None = None) -> list[int]:
        """Read all files, or `rows` of them, into a Parquet sink, which skips batches it has; returns its rows."""
        rows = (self.stream() if rows is None else rows).dropDuplicates(["key"]).select("key")
        self._run(millpond.writeStream(rows).format("parquet").option("path", str(self.sink)))
        return sorted(row.key for row in self.spark.read.parquet(str(self.sink)).collect())

    def _run(self, writer: StreamWriter) -> None:
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    def expected(self, batch: int) -> set[tuple[int, int, int]]:
        seen = [key for keys in self.written[: batch + 1] for key in keys]
        return {(key, seen.count(key), seen.count(key)) for key in self.written[batch]}

    def forget_state(self, version: int) -> None:
        """As if the slots had died before `version` became durable, which they are let do first."""
        patience = time.monotonic() + 60
        while not StateReader(str(self.checkpoint)).is_complete(
            version
        ):  # older ones, of which it reads, may be forgotten
            assert time.monotonic() < patience, version
            time.sleep(0.02)
        for path in (self.checkpoint / "millpond" / "commits").glob(f"{version:012d}-*"):
            path.unlink()
        for claim in (self.checkpoint / "millpond" / "generations").glob("*.base.json"):
            base = json.loads(claim.read_text().splitlines()[0])
            assert all(one["version"] != version for one in base["versions"])

    def forget(self, log: str, batch: int) -> None:
        """Remove an entry of a log, as if Spark had died before it wrote it."""
        (self.checkpoint / log / str(batch)).unlink()
        (self.checkpoint / log / f".{batch}.crc").unlink(missing_ok=True)

    def has(self, log: str, batch: int) -> bool:
        return (self.checkpoint / log / str(batch)).exists()


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)


@pytest.fixture
def doubtful_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the sink: it may skip a planned batch that it has."""
    monkeypatch.setattr("millpond.query.launch.runs_planned", lambda *_: None)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that starts have run without the sink."""
    batches: list[int] = []
    replay = _Startup._replay

    def noted(self: _Startup, batch: int) -> None:
        batches.append(batch)
        replay(self, batch)

    monkeypatch.setattr(_Startup, "_replay", noted)
    return batches


def lose_commit(job: Job) -> None:
    """Killed after Spark committed batch 2, before version 3 was durable: batch 2 has to be replayed."""
    job.forget_state(3)


def lose_ledger_entry(job: Job) -> None:
    """Killed after the sink had batch 2, before Spark committed it: a sink that has it skips it."""
    job.forget("commits", 2)


def lose_both(job: Job) -> None:
    """Killed after the sink had batch 2, before either commit: the planned batch has to be primed."""
    job.forget("commits", 2)
    job.forget_state(3)


def lose_two_versions(job: Job) -> None:
    """Killed while batch 2 was running, and version 2, which it read, was never durable: replay 1, then prime 2."""
    job.forget("commits", 2)
    job.forget_state(3)
    job.forget_state(2)


def lose_an_entry_before_the_last(job: Job) -> None:
    """Spark planned batch 2, so that batch 1 was committed, whatever its log says; its state has to be made again."""
    job.forget("commits", 2)
    job.forget("commits", 1)
    job.forget_state(3)
    job.forget_state(2)


def lose_nothing(job: Job) -> None:
    """A clean stop."""


def test_a_batch_is_not_repeated_by_a_query_that_computes_something_else(job: Job) -> None:
    """The sink has what the earlier query made of it: state made of other rows would contradict that, in silence."""
    job.write([1, 2, 2], [2, 3])
    job.aggregate()
    job.forget_state(2)
    changed = job.stream().where("key <> 2")
    for _ in range(2):
        with pytest.raises(StateIncompatibleError, match="has changed since") as refused:
            job.aggregate(changed)
        assert refused.value.version == 1
    job.write([2, 3])
    job.aggregate()
    assert job.emitted[2] == job.expected(2)
    job.write([2, 3])
    job.aggregate(changed)  # all state is durable: the query may be another from here on
    assert job.emitted[3] == {(3, 3, 3)}


def test_a_planned_batch_that_the_sink_has_is_not_repeated_by_another_query(job: Job) -> None:
    """Killed after the sink had batch 1, before either commit: the sink skips it, and keeps the rows that it has."""
    job.write([1, 2], [2, 3])
    job.deduplicate()
    job.forget("commits", 1)
    job.forget_state(2)
    changed = job.stream().where("key <> 3")
    with pytest.raises(StateIncompatibleError, match=r"Batch 1, which the sink has, .* has changed since"):
        job.deduplicate(changed)
    assert not job.has("commits", 1)
    assert job.deduplicate() == [1, 2, 3]
    job.write([3, 4])
    assert job.deduplicate(changed) == [1, 2, 3, 4]


def test_a_batch_of_a_processor_is_not_repeated_by_another(job: Job, spark: SparkSession) -> None:
    """That it does not mind in which order rows come (`commit.mode=async`) does not say that others may come."""

    def numbered(rows: DataFrame) -> None:
        job.collect(rows.groupBy("key").transformWithState(Count(), Count.ddl, "update", "none"))

    spark.conf.set("spark.millpond.commit.mode", "async")
    try:
        job.write([1, 2, 2], [2, 3])
        numbered(job.stream())
        job.forget_state(2)
        job.write([2, 3])
        for mode in ("async", "sync"):
            spark.conf.set("spark.millpond.commit.mode", mode)
            with pytest.raises(StateIncompatibleError, match="has changed since"):
                numbered(job.stream().where("key <> 2"))
        numbered(job.stream())
    finally:
        spark.conf.unset("spark.millpond.commit.mode")
    assert job.emitted == {
        0: {("(1,)", 1, 1), ("(2,)", 2, 2)},
        1: {("(2,)", 3, 1), ("(3,)", 1, 1)},
        2: {("(2,)", 4, 1), ("(3,)", 2, 1)},
    }


def test_a_changed_query_may_repeat_a_batch_if_it_is_told_to(job: Job, spark: SparkSession) -> None:
    job.write([1, 2, 2], [2, 3])
    job.aggregate()
    job.forget_state(2)
    job.write([2, 3])
    spark.conf.set("spark.millpond.onChangedReplay", "run")
    try:
        job.aggregate(job.stream().where("key <> 2"))
    finally:
        spark.conf.unset("spark.millpond.onChangedReplay")
    assert job.emitted[2] == {(3, 2, 2)}


def test_a_query_goes_back_to_an_earlier_batch(job: Job) -> None:
    job.write([1, 2], [2, 3], [3, 4], [4, 1])
    job.aggregate()
    for batch in (3, 2):
        job.forget("commits", batch)
        job.forget("offsets", batch)
    job.emitted.clear()
    job.aggregate()
    # Spark's file source has a log of its own, and gives what both batches had in one.
    assert job.emitted == {2: {(1, 2, 2), (3, 2, 2), (4, 2, 2)}}


def test_a_query_goes_back_after_an_interrupted_replay(job: Job) -> None:
    """Killed while batch 3 was being replayed: its entry in the journal is one of the later ones, too."""
    job.write([1, 2], [2, 3], [3, 4], [4, 1])
    job.aggregate()
    write_journal(job, again=3, commit=(job.checkpoint / "commits/3").read_text(), planned=None)
    for batch in (3, 2):
        job.forget("commits", batch)
        job.forget("offsets", batch)
    job.emitted.clear()
    job.aggregate()
    assert job.emitted == {2: {(1, 2, 2), (3, 2, 2), (4, 2, 2)}}


CRASHES = [
    lose_nothing,
    lose_commit,
    lose_ledger_entry,
    lose_both,
    lose_two_versions,
    lose_an_entry_before_the_last,
]


@pytest.mark.parametrize("crash", CRASHES)
def test_updates_are_right_after(job: Job, crash: Callable[[Job], None]) -> None:
    job.write([1, 2, 3], [2, 3, 4], [3, 4, 5])
    job.aggregate()
    crash(job)
    job.write([1, 3, 5], [6])
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(5)}


@pytest.mark.usefixtures("doubtful_sink")
@pytest.mark.parametrize("crash", CRASHES)
def test_updates_are_right_in_a_sink_of_which_nothing_is_known_after(job: Job, crash: Callable[[Job], None]) -> None:
    test_updates_are_right_after(job, crash)


@pytest.mark.parametrize("crash", CRASHES)
def test_sinks_that_skip_batches_get_every_row_once(job: Job, crash: Callable[[Job], None]) -> None:
    job.write([1, 2, 3], [2, 3, 4], [3, 4, 5])
    job.deduplicate()
    crash(job)
    job.write([1, 3, 5, 6], [6, 7, 2])
    assert job.deduplicate() == [1, 2, 3, 4, 5, 6, 7]


def test_what_the_sink_runs_anyway_is_not_run_before(job: Job, repeated: list[int]) -> None:
    """Killed in a batch, which a function for each batch gets again: no second run of it is waited for."""
    job.write([1, 2, 3], [2, 3, 4])
    job.aggregate()
    job.forget("commits", 1)
    job.forget_state(2)
    job.emitted.clear()
    job.aggregate()
    assert repeated == []
    assert job.emitted == {1: job.expected(1)}


@pytest.mark.parametrize("has", [True, False])
def test_a_file_sink_says_whether_it_has_a_batch(job: Job, repeated: list[int], has: bool) -> None:
    job.write([1, 2, 3], [2, 3, 4])
    job.deduplicate()
    job.forget("commits", 1)
    job.forget_state(2)
    if not has:
        (job.sink / "_spark_metadata/1").unlink()
        (job.sink / "_spark_metadata/.1.crc").unlink(missing_ok=True)
    job.write([4, 5])
    assert job.deduplicate() == [1, 2, 3, 4, 5]
    assert repeated == ([1] if has else [])


@pytest.mark.parametrize("name", [None, "Parquet"])
def test_a_file_sink_is_known_by_any_name_of_its_format(job: Job, repeated: list[int], name: str | None) -> None:
    """Without a format, it is the session's default."""

    def run() -> None:
        writer = millpond.writeStream(job.stream().dropDuplicates(["key"]).select("key"))
        job._run((writer if name is None else writer.format(name)).option("path", str(job.sink)))

    job.write([1, 2, 3], [2, 3, 4])
    run()
    job.forget("commits", 1)
    job.forget_state(2)
    (job.sink / "_spark_metadata/1").unlink()
    (job.sink / "_spark_metadata/.1.crc").unlink(missing_ok=True)
    run()
    assert repeated == []
    assert sorted(row.key for row in job.spark.read.parquet(str(job.sink)).collect()) == [1, 2, 3, 4]


def write_journal(job: Job, *, again: int, commit: str | None, planned: str | None) -> None:
    record = _RollBack(again=again, commit=commit, planned=planned)
    write_document(open_filesystem(str(job.checkpoint)), JOURNAL, record)


@pytest.mark.parametrize("stage", ["journalled", "plan gone", "commit gone", "ran", "commit back"])
def test_an_interrupted_replay_is_undone(job: Job, stage: str) -> None:
    """Killed while batch 2 was being replayed, with batch 3 planned."""
    job.write([1, 2], [2, 3], [3, 4], [4, 1])
    job.aggregate()
    job.forget("commits", 3)
    job.forget_state(4)
    job.forget_state(3)
    commit = (job.checkpoint / "commits/2").read_text()
    plan = (job.checkpoint / "offsets/3").read_text()
    journal = job.checkpoint / JOURNAL
    write_journal(job, again=2, commit=commit, planned=plan)
    if stage != "journalled":
        job.forget("offsets", 3)
    if stage == "commit gone":
        job.forget("commits", 2)
    job.aggregate()
    assert not journal.exists()
    assert (job.checkpoint / "offsets/3").read_text() == plan
    assert job.emitted == {batch: job.expected(batch) for batch in range(4)}


def test_an_interrupted_priming_leaves_no_commit(job: Job) -> None:
    """Killed after the priming run had committed a batch that the sink may not have."""
    job.write([1, 2], [2, 3])
    job.aggregate()
    write_journal(job, again=1, commit=None, planned=None)
    job.emitted.clear()
    job.aggregate()
    assert job.emitted == {1: job.expected(1)}


@pytest.mark.usefixtures("doubtful_sink")
@pytest.mark.parametrize("lose", [lose_both, lose_two_versions])
def test_an_interrupted_start_leaves_no_commit(job: Job, lose: Callable[[Job], None], spark: SparkSession) -> None:
    """A batch that runs without the sink must not be committed once the start is given up."""
    job.write([1, 2], [2, 3], [3, 4])
    job.aggregate()
    lose(job)
    del job.emitted[2]
    job.write([4, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamingQuery, "awaitTermination", lambda query: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job.aggregate()
    active = spark._jsparkSession.sharedState().activeStreamingQueries()
    while not active.isEmpty():
        time.sleep(0.1)
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(4)}


@pytest.mark.usefixtures("doubtful_sink")
def test_a_stopped_repetition_is_an_error(job: Job) -> None:
    job.write([1, 2], [2, 3])
    job.aggregate()
    job.forget("commits", 1)
    job.forget_state(2)
    job.emitted.clear()

    def stop(query: StreamingQuery) -> None:
        query.stop()
        (job.checkpoint / "commits/1").unlink(missing_ok=True)  # on a slow machine it was done before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamingQuery, "awaitTermination", stop)
        with pytest.raises(TransientError, match="stopped before its end"):
            job.aggregate()
    job.aggregate()
    assert job.emitted == {1: job.expected(1)}


def test_a_second_start_beside_the_first(job: Job, spark: SparkSession) -> None:
    """By default, Spark stops the query that runs and goes on; if that is refused, it leaves it alone."""
    job.write([1, 2])
    counts = job.stream().groupBy("key").count()
    start = (
        millpond.writeStream(counts)
        .outputMode("update")
        .format("noop")
        .option("checkpointLocation", str(job.checkpoint))
        .start
    )
    first = start()
    first.processAllAvailable()
    spark.conf.set("spark.sql.streaming.stopActiveRunOnRestart", "false")
    try:
        with pytest.raises(UsageError, match="running in this application already"):
            start()
    finally:
        spark.conf.unset("spark.sql.streaming.stopActiveRunOnRestart")
    job.write([3])
    first.processAllAvailable()
    assert job.has("commits", 1)
    second = start()
    try:
        assert not first.isActive
        second.processAllAvailable()
    finally:
        second.stop()


def test_a_start_after_a_death_in_the_first_plan(job: Job) -> None:
    """Killed while Spark wrote `offsets/0`: Spark itself would refuse the checkpoint for ever."""
    name = ".0.1b671a64-40d5-491e-99b0-da01ff1f3341.tmp"
    (job.checkpoint / "offsets").mkdir(parents=True)
    (job.checkpoint / "offsets" / name).write_text("v1\n")
    (job.checkpoint / "offsets" / f".{name}.crc").touch()
    job.write([1, 2], [2, 3])
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(2)}


def test_state_that_the_ledger_counts_on_is_missed(job: Job) -> None:
    job.write([1], [2], [3])
    job.aggregate()
    for version in (1, 2, 3):
        job.forget_state(version)
    with pytest.raises(StateDamagedError, match="committed batch 2, and commits/ has no whole state"):
        job.aggregate()
    assert job.has("commits", 2)


BASE = r"The file generations/\d+\.base\.json, which says .* is gone"
GONE: dict[str, tuple[list[str], str]] = {
    "all": (
        ["millpond"],
        r"Spark has committed 2 batches .*, and the state of 'aggregate by key' that they made is gone: there is "
        r"nothing at .*/millpond",
    ),
    "query.json": (["millpond/query.json"], r"query\.json, which says what the state of 'aggregate by key' looks like"),
    "runs": (["millpond/generations"], BASE),
    "newest run": (["millpond/generations/*.base.json"], BASE),
    "commits": (["millpond/commits"], "commits/ has no whole state of 'aggregate by key' as of then: 2 partitions"),
    "offsets": (["offsets"], r"commits/ has batches up to 1, and offsets/ is empty or gone"),
    "last offsets": (["offsets/1"], r"commits/ has batches up to 1, and offsets/ has batches up to 0 only"),
    "id": (["metadata"], r"\[STREAMING_CHECKPOINT_MISSING_METADATA_FILE\] .* batches up to 1, and the file metadata"),
    "id and state": (["millpond", "metadata"], r"\[STREAMING_CHECKPOINT_MISSING_METADATA_FILE\]"),
}


def test_what_was_deleted_is_named_and_what_the_error_says_helps(job: Job, tmp_path: Path) -> None:
    job.write([1], [2, 1])
    job.aggregate()
    await_commits(f"file:{job.checkpoint}")
    backup, before = tmp_path / "backup", dict(job.emitted)
    shutil.copytree(job.checkpoint, backup)
    job.write([1, 3])
    for names, why in GONE.values():
        for path in (path for name in names for path in job.checkpoint.glob(name)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with pytest.raises(StateDamagedError, match=why) as refused:
            job.aggregate()
        assert "start with a new checkpointLocation" in refused.value.action
        assert job.emitted == before
        # A backup, put over what is there, of what was deleted alone or of the whole checkpoint.
        shutil.copytree(backup, job.checkpoint, dirs_exist_ok=True)
    (job.checkpoint / "metadata").unlink()
    identity = json.loads((backup / "metadata").read_text())["id"]
    (job.checkpoint / "metadata").write_text(f'{{"id":"{identity}"}}')
    (job.checkpoint / ".metadata.crc").unlink(missing_ok=True)
    job.aggregate()
    assert job.emitted == before | {2: job.expected(2)}
    job.checkpoint, job.emitted = tmp_path / "new", {}
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(3)}


def test_state_elsewhere_that_is_gone_or_moved(job: Job, spark: SparkSession, tmp_path: Path) -> None:
    job.write([1])
    try:
        spark.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
        job.aggregate()
        await_commits(str(next((tmp_path / "states").iterdir())))
        (tmp_path / "states").rename(tmp_path / "moved")
        job.write([1])
        for location in (str(tmp_path / "states"), None):
            spark.conf.unset("spark.millpond.state.location")
            if location is not None:
                spark.conf.set("spark.millpond.state.location", location)
            with pytest.raises(StateDamagedError, match=r"is gone: there is nothing at .*/states/.* folder above"):
                job.aggregate()
        spark.conf.set("spark.millpond.state.location", str(tmp_path / "moved"))
        job.aggregate()
        assert job.emitted == {batch: job.expected(batch) for batch in range(2)}
    finally:
        spark.conf.unset("spark.millpond.state.location")


def test_a_new_id_is_chosen_where_spark_is_told_not_to_look(job: Job, spark: SparkSession) -> None:
    job.write([1])
    job.aggregate()
    (job.checkpoint / "metadata").unlink()
    (job.checkpoint / ".metadata.crc").unlink(missing_ok=True)
    with pytest.raises(StateDamagedError, match="MISSING_METADATA_FILE"):
        millpond.import_checkpoint(job.stream().groupBy("key").count(), job.checkpoint, job.sink, "update")
    spark.conf.set(VERIFY_METADATA, "false")
    try:
        job.write([1])
        job.aggregate()
    finally:
        spark.conf.unset(VERIFY_METADATA)
    assert job.emitted[1] == job.expected(1)


def test_a_checkpoint_of_sparks_own_state_is_refused(job: Job) -> None:
    job.write([1, 2])
    native = job.stream().groupBy("key").count().writeStream.outputMode("update").format("noop")
    native.option("checkpointLocation", str(job.checkpoint)).trigger(availableNow=True).start().awaitTermination()
    with pytest.raises(StateIncompatibleError, match=r"Spark's own state store.*millpond.import_checkpoint"):
        job.aggregate()
    job.write([1])
    job.spark.conf.set("spark.millpond.enabled", "false")
    try:
        job.collect(job.stream().groupBy("key").count())
    finally:
        job.spark.conf.unset("spark.millpond.enabled")
    assert job.emitted == {1: {(1, 2)}}
    shutil.rmtree(job.checkpoint / "state")
    with pytest.raises(StateDamagedError, match="the state of 'aggregate by key' that they made is gone"):
        job.aggregate()


def test_another_query_is_refused_with_the_difference(job: Job) -> None:
    job.write([1, 2])
    job.aggregate()
    changed = job.stream().groupBy("key").agg(F.max("amount"))
    writer = millpond.writeStream(changed).outputMode("update").format("noop")
    with pytest.raises(StateIncompatibleError, match="max") as refused:
        job._run(writer)
    assert "query.json" in str(refused.value)


def fails(job: Job, df: DataFrame, **how: str) -> None:
    """A start of a query whose first batch ends with an error, or that does not get as far as a batch."""

    def fail(batch: DataFrame, number: int) -> None:
        batch.collect()
        raise ValueError("not that")

    writer = millpond.writeStream(df).outputMode("update")
    with pytest.raises(Exception, match=r"not that|nowhere"):
        job._run(writer.format("nowhere") if how else writer.foreachBatch(fail))


@pytest.mark.parametrize("how", [{}, {"format": "nowhere"}], ids=["first batch", "no batch"])
def test_a_start_that_failed_leaves_the_checkpoint_to_another_query(job: Job, how: dict[str, str]) -> None:
    """Nothing is committed: the next start may be of another query, which sees nothing of the first one's state."""
    job.write([1, 2, 2], [2, 3])
    names = job.stream().selectExpr("cast(key % 2 as string) as name", "amount").groupBy("name", "amount")
    fails(job, names.agg(F.max("name"), F.count_distinct("amount")), **how)
    fails(job, job.stream().dropDuplicates(["key"]), **how)
    fails(job, names.agg(F.max("name"), F.count_distinct("amount")), **how)
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(2)}
    with pytest.raises(StateIncompatibleError, match="differs"):
        job._run(millpond.writeStream(names.count()).outputMode("update").format("noop"))
    job.write([1, 3])
    job.aggregate()
    assert job.emitted[2] == job.expected(2)


def test_another_query_takes_up_the_batch_that_a_sink_has(job: Job) -> None:
    """A file sink skips the batch that it has of the first query; the other one's state has it nevertheless."""
    job.write([1, 2, 3])
    job.deduplicate()
    job.forget("commits", 0)
    job.write([3, 3, 4])
    rows = job.stream().dropDuplicates(["key", "amount"]).select("key")
    job._run(millpond.writeStream(rows).format("parquet").option("path", str(job.sink)))
    assert sorted(row.key for row in job.spark.read.parquet(str(job.sink)).collect()) == [1, 2, 3, 4]


def test_a_failed_start_does_not_decide_the_number_of_partitions(job: Job, spark: SparkSession) -> None:
    job.write([1, 2, 2], [2, 3])
    fails(job, job.stream().groupBy("key").count(), format="nowhere")
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        job.aggregate()
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")
    assert job.emitted == {batch: job.expected(batch) for batch in range(2)}
    claim = max((job.checkpoint / "millpond/generations").glob("*[0-9].json"))
    assert len(json.loads(claim.read_text().splitlines()[0])["ranges"]) == 3


def test_a_failed_start_does_not_change_the_number_of_partitions(job: Job, spark: SparkSession) -> None:
    job.write([1, 2, 2])
    job.aggregate()
    spark.conf.set("spark.millpond.partitions", "3")
    try:
        fails(job, job.stream().groupBy("key").agg(F.count("*"), F.sum("amount")), format="nowhere")
    finally:
        spark.conf.unset("spark.millpond.partitions")
    job.write([2, 3])
    job.aggregate()
    assert job.emitted == {batch: job.expected(batch) for batch in range(2)}
    claims = sorted((job.checkpoint / "millpond/generations").glob("*[0-9].json"))
    partitions = [len(json.loads(claim.read_text().splitlines()[0])["ranges"]) for claim in claims]
    assert partitions[-2:] == [3, 2]


def test_a_batch_that_is_only_set_aside_counts_as_committed(job: Job) -> None:
    """Killed while batch 0 was being replayed: its entry is in the journal."""
    job.write([1, 2])
    job.aggregate()
    write_journal(job, again=0, commit=(job.checkpoint / "commits/0").read_text(), planned=None)
    job.forget("commits", 0)
    with pytest.raises(StateIncompatibleError, match="differs"):
        job._run(millpond.writeStream(job.stream().dropDuplicates(["key"])).format("noop"))
    job.aggregate()
    assert job.emitted == {0: job.expected(0)}


def test_a_newer_format_is_refused(job: Job) -> None:
    job.write([1, 2])
    job.aggregate()
    files = open_filesystem(str(job.checkpoint / "millpond"))
    pinned = read_schema(files, 0)
    write_document(files, "query.json", msgspec.structs.replace(pinned, format=99))
    with pytest.raises(MillpondError, match="99"):
        job.aggregate()


def test_the_older_run_is_fenced(job: Job) -> None:
    """Two applications on one checkpoint: the copy that started first cannot finish a batch any more."""
    job.write([1, 2])
    job.aggregate()
    generations = job.checkpoint / "millpond/generations"
    last = max(path for path in generations.glob("*.json") if not path.name.endswith(".base.json"))
    later = int(last.stem) + 10**9
    shutil.copy(last, generations / claim_name(later).rpartition("/")[2])
    job.write([3])
    job.aggregate()
    assert (generations / claim_name(later + 1).rpartition("/")[2]).exists()
    assert job.emitted[1] == job.expected(1)

"""Which state belongs to which checkpoint, and what a query may change between two starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import millpond
from millpond.errors import StateDamagedError, StateIncompatibleError, UsageError


@pytest.fixture
def session(spark: SparkSession) -> SparkSession:
    return spark.newSession()


def put(session: SparkSession, folder: Path, rows: list[tuple[str, int]]) -> None:
    session.createDataFrame(rows, "k string, v bigint").coalesce(1).write.mode("append").parquet(str(folder))


def read(session: SparkSession, folder: Path) -> DataFrame:
    return session.readStream.schema("k string, v bigint").parquet(str(folder))


def run(session: SparkSession, df: DataFrame, checkpoint: Path, mode: str = "update") -> list[tuple[Any, ...]]:
    """Run the query over all new input, and return the rows that the sink gets."""
    shown: list[tuple[Any, ...]] = []
    writer = millpond.writeStream(df).outputMode(mode).option("checkpointLocation", str(checkpoint))
    query = writer.foreachBatch(lambda batch, _: shown.extend(map(tuple, batch.collect()))).trigger(availableNow=True)
    query.start().awaitTermination()
    return sorted(shown)


def sums(df: DataFrame) -> DataFrame:
    return df.groupBy("k").agg(F.sum("v").alias("total"))


def test_queries_that_share_a_state_location_have_states_of_their_own(session: SparkSession, tmp_path: Path) -> None:
    session.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
    for number, name in enumerate("ab"):
        put(session, tmp_path / name, [("x", 10**number)])
        assert run(session, sums(read(session, tmp_path / name)), tmp_path / f"of {name}") == [("x", 10**number)]
    (tmp_path / "of a").rename(tmp_path / "moved")
    put(session, tmp_path / "a", [("x", 5)])
    assert run(session, sums(read(session, tmp_path / "a")), tmp_path / "moved") == [("x", 6)]
    assert len(list((tmp_path / "states").iterdir())) == 2
    assert not (tmp_path / "moved" / "millpond" / "query.json").exists()


def test_a_ledger_that_is_not_seen_loses_no_state(session: SparkSession, tmp_path: Path) -> None:
    checkpoint, rows = tmp_path / "checkpoint", tmp_path / "in"
    for number in range(3):
        put(session, rows, [("x", 10**number)])
        run(session, sums(read(session, rows)), checkpoint)
        if number == 0:  # its first batch may have been planned and not committed: that can be made again
            shutil.rmtree(checkpoint / "commits")
            shutil.rmtree(checkpoint / "offsets")
    for folder in ("offsets", "commits"):
        (checkpoint / folder).rename(tmp_path / folder)
    others = read(session, rows).groupBy("k").count()
    for query in (sums(read(session, rows)), others):
        with pytest.raises(StateIncompatibleError, match="has no committed batch, and the state is that after 2"):
            run(session, query, checkpoint)
    for folder in ("offsets", "commits"):
        (tmp_path / folder).rename(checkpoint / folder)
    put(session, rows, [("x", 1000)])
    assert run(session, sums(read(session, rows)), checkpoint) == [("x", 1111)]


def test_a_copy_of_a_checkpoint_does_not_go_on_with_the_originals_state(session: SparkSession, tmp_path: Path) -> None:
    original, copy, rows = tmp_path / "original", tmp_path / "copy", tmp_path / "in"
    session.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
    put(session, rows, [("x", 1)])
    counts = sums(read(session, rows))
    assert run(session, counts, original) == [("x", 1)]
    shutil.copytree(original, copy)
    put(session, rows, [("x", 10)])
    with pytest.raises(StateIncompatibleError, match=r"is a copy of .*original, and both"):
        run(session, counts, copy)
    assert run(session, counts, original) == [("x", 11)], "the attempt does it no harm"
    with pytest.raises(StateIncompatibleError, match="has gone on with the state since"):
        run(session, counts, copy)
    original.rename(tmp_path / "gone")
    with pytest.raises(StateIncompatibleError, match="has gone on with the state since"):
        run(session, counts, copy)
    (tmp_path / "gone").rename(original)
    (tmp_path / "another name").symlink_to(original)
    put(session, rows, [("x", 100)])
    assert run(session, counts, tmp_path / "another name") == [("x", 111)]

    shutil.copytree(tmp_path / "states", tmp_path / "forked")
    shutil.copytree(original, tmp_path / "fork")
    put(session, rows, [("x", 1000)])
    session.conf.set("spark.millpond.state.location", str(tmp_path / "forked"))
    assert run(session, counts, tmp_path / "fork") == [("x", 1111)]
    put(session, rows, [("x", 10000)])
    session.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
    assert run(session, counts, original) == [("x", 11111)]
    assert len(list((original / "millpond" / "claims").iterdir())) == 2


def test_a_forgotten_state_location_is_named(
    session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(session, tmp_path / "in", [("x", 1)])
    events = read(session, tmp_path / "in")
    session.conf.set("spark.millpond.state.location", "states")  # below the driver's working folder, for slots as well
    assert run(session, sums(events), tmp_path / "checkpoint") == [("x", 1)]
    session.conf.unset("spark.millpond.state.location")
    put(session, tmp_path / "in", [("x", 10)])
    with pytest.raises(StateIncompatibleError, match=rf"the last run had it at {tmp_path}/states/") as raised:
        run(session, sums(events), tmp_path / "checkpoint")
    assert "Set spark.millpond.state.location as it was" in str(raised.value)
    with pytest.raises(StateIncompatibleError, match="holds state of Millpond's"):
        run(session, events.where("v > 1"), tmp_path / "checkpoint")
    session.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
    assert run(session, sums(events), tmp_path / "checkpoint") == [("x", 11)]


def test_a_state_location_that_comes_later_is_told_so(session: SparkSession, tmp_path: Path) -> None:
    put(session, tmp_path / "in", [("x", 1)])
    assert run(session, sums(read(session, tmp_path / "in")), tmp_path / "checkpoint") == [("x", 1)]
    session.conf.set("spark.millpond.state.location", str(tmp_path / "states"))
    with pytest.raises(StateIncompatibleError, match=r"had it in the checkpoint .* Unset"):
        run(session, sums(read(session, tmp_path / "in")), tmp_path / "checkpoint")


@pytest.mark.parametrize("location", [None, "states"])
@pytest.mark.parametrize("disabled", [False, True])
def test_a_query_without_operators_here_does_not_run_on_a_checkpoint_with_state(
    session: SparkSession, tmp_path: Path, location: str | None, disabled: bool
) -> None:
    if location is not None:
        session.conf.set("spark.millpond.state.location", str(tmp_path / location))
    put(session, tmp_path / "in", [("x", 1), ("y", 2)])
    events = read(session, tmp_path / "in")
    run(session, sums(events), tmp_path / "checkpoint")
    put(session, tmp_path / "in", [("x", 3)])
    if disabled:
        session.conf.set("spark.millpond.enabled", "false")
    with pytest.raises(StateIncompatibleError, match="nothing of this query runs on Millpond"):
        run(session, sums(events) if disabled else events, tmp_path / "checkpoint", "update")
    session.conf.unset("spark.millpond.enabled")
    assert run(session, sums(events), tmp_path / "checkpoint") == [("x", 4)]


def test_checkpoints_that_only_spark_can_read_are_left_to_spark(session: SparkSession, tmp_path: Path) -> None:
    put(session, tmp_path / "in", [("x", 1)])
    with pytest.raises(Py4JJavaError, match="nowhere"):  # Hadoop's own error for a scheme that it does not know
        run(session, read(session, tmp_path / "in"), Path("nowhere:/checkpoint"), "append")
    with pytest.raises(UsageError, match="nowhere"):
        run(session, sums(read(session, tmp_path / "in")), Path("nowhere:/checkpoint"))


def test_after_an_overflow_the_advice_of_the_error_helps(session: SparkSession, tmp_path: Path) -> None:
    put(session, tmp_path / "in", [("x", 2**63 - 1)])
    totals = sums(read(session, tmp_path / "in"))
    run(session, totals, tmp_path / "checkpoint")
    put(session, tmp_path / "in", [("x", 1)])
    with pytest.raises(StreamingQueryException, match=r"spark\.sql\.ansi\.enabled to false"):
        run(session, totals, tmp_path / "checkpoint")
    session.conf.set("spark.sql.ansi.enabled", "false")
    again = sums(read(session, tmp_path / "in"))
    assert run(session, again, tmp_path / "checkpoint") == [("x", -(2**63))]


def test_a_watermark_above_another_is_refused_as_in_spark(
    session: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = session.readStream.format("rate").load().selectExpr("timestamp as t", "timestamp as u", "value as v")
    twice = rates.withWatermark("t", "5 seconds").withWatermark("u", "40 seconds").groupBy("u").count()
    with pytest.raises(UsageError, match=r"Redefining the watermark .*'u'.*'t'"):
        run(session, twice, tmp_path / "checkpoint", "append")
    session.conf.set("spark.sql.streaming.statefulOperator.allowMultiple", "false")
    millpond.explain(twice, "append")
    assert "MP-SINGLE" in capsys.readouterr().out


def test_an_altered_identity_is_named(session: SparkSession, tmp_path: Path) -> None:
    put(session, tmp_path / "in", [("x", 1)])
    totals = sums(read(session, tmp_path / "in"))
    run(session, totals, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "metadata").write_text('{"id"')
    with pytest.raises(StateDamagedError, match="checkpoint/metadata"):
        run(session, totals, tmp_path / "checkpoint")

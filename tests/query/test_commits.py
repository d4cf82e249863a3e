"""Commits that fail while no batch waits for them are reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond
from millpond.query.running import commits as watching
from millpond.state_reader.reader import StateReader


def wait(done: Callable[[], bool], said: list[str]) -> None:
    patience = time.monotonic() + 60
    while not done():
        assert time.monotonic() < patience, said
        time.sleep(0.1)


def test_commits_that_fail_are_told_between_batches_and_after_a_stop(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 1.0)
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()
    (source / "0.json").write_text('{"k": 1}\n')
    counts = spark.readStream.schema("k int").json(str(source)).groupBy("k").count()
    query = (
        millpond.writeStream(counts)
        .outputMode("update")
        .format("noop")
        .queryName("clicks")
        .option("checkpointLocation", str(checkpoint))
        .start()
    )
    commits = checkpoint / "millpond" / "commits"

    def told(what: str) -> bool:
        said = f"commits of query clicks ({query.id}) fail {what}"
        return any(said in message and str(commits) in message for message in caplog.messages)

    try:
        query.processAllAvailable()
        wait(lambda: 1 in StateReader(str(checkpoint)).versions(), caplog.messages)
        commits.rename(checkpoint / "millpond" / "moved")
        commits.write_text("where a folder should be")
        (source / "1.json").write_text('{"k": 1}\n')
        query.processAllAvailable()
        wait(lambda: told("between batches"), caplog.messages)
        assert not told("after its end")
        query.stop()
        wait(lambda: told("after its end"), caplog.messages)
    finally:
        commits.unlink(missing_ok=True)
        (checkpoint / "millpond" / "moved").rename(commits)  # what is pending can be committed
        query.stop()

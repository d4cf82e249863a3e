"""A fork of a query that Spark runs: both go on with rows of their own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond
from millpond.slot.reader import StateReader
from tests.query.test_recovery import Job
from tests.slot.test_state_command import state

__all__ = ["state"]


def counts(spark: SparkSession, checkpoint: Path) -> dict[int, int]:
    """What the newest version holds, by key."""
    return {row.key: row.count_0 for row in millpond.read_state(spark, str(checkpoint)).collect()}


def settle(job: Job) -> None:
    """Wait until the last batch's state is durable."""
    patience = time.monotonic() + 60
    while len(job.written) not in StateReader(str(job.checkpoint)).versions():
        assert time.monotonic() < patience
        time.sleep(0.02)


def so_far(job: Job) -> dict[int, int]:
    keys = [key for batch in job.written for key in batch]
    return {key: keys.count(key) for key in keys}


def fork_of(job: Job, folder: Path, state: Callable[..., tuple]) -> Job:
    """A job on a fork of a job's checkpoint, with a source of its own from then on."""
    folder.mkdir()
    other = Job(job.spark, folder)
    other.written = list(job.written)
    code, lines = state("fork", job.checkpoint, other.checkpoint)
    assert code == 0, lines
    return other


def test_a_fork_goes_on_as_a_query_of_its_own(spark: SparkSession, tmp_path: Path, state: Callable[..., tuple]) -> None:
    job = Job(spark, tmp_path)
    job.write([1, 2, 3], [2, 3], [3])
    job.aggregate()
    settle(job)
    other = fork_of(job, tmp_path / "fork", state)
    assert counts(spark, other.checkpoint) == counts(spark, job.checkpoint) == so_far(job)

    job.write([1, 1, 7], [2])
    job.aggregate()
    other.write([3, 8], [8])
    other.aggregate()
    for one in (job, other):
        settle(one)
        for batch in (3, 4):
            assert one.emitted[batch] == one.expected(batch)
        assert state("gc", one.checkpoint)[0] == 0
        code, lines = state("verify", one.checkpoint)
        assert code == 0, lines
        assert counts(spark, one.checkpoint) == so_far(one)

    third = fork_of(other, tmp_path / "third", state)
    third.write([1, 9])
    third.aggregate()
    assert third.emitted[5] == third.expected(5)
    other.write([8])
    other.aggregate()
    assert other.emitted[5] == other.expected(5)

    shutil.rmtree(job.checkpoint)
    other.write([1])
    with pytest.raises(Exception, match="STATE_FILE_MISSING") as raised:
        other.aggregate()
    assert str(job.checkpoint) in str(raised.value)
    assert str(other.checkpoint) in str(raised.value)

"""A fork of a query that Spark runs: both go on with rows of their own."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond
from millpond.state_reader.reader import StateReader
from tests.query.test_recovery import Job
from tests.slot.test_state_command import state

__all__ = ["state"]


class Branch(Job):
    """A job that sees only files of its own and those from before it was forked: both read one folder, as they must."""

    def __init__(self, spark: SparkSession, folder: Path, name: str = "original") -> None:
        super().__init__(spark, folder)
        self.checkpoint = folder / name
        self.prefix = f"{name}-"
        self.names: set[str] = set()
        self.aside = folder / "aside"
        self.aside.mkdir(exist_ok=True)

    def run(self, *batches: list[int]) -> None:
        """Write one file a batch, and read them."""
        for path in [*self.source.iterdir(), *self.aside.iterdir()]:
            path.rename((self.source if path.name in self.names else self.aside) / path.name)
        self.write(*batches)
        self.names = {path.name for path in self.source.iterdir()}
        self.aggregate()
        patience = time.monotonic() + 60
        while len(self.written) not in StateReader(str(self.checkpoint)).versions():
            assert time.monotonic() < patience
            time.sleep(0.02)

    def fork(self, name: str, state: Callable[..., tuple]) -> Branch:
        """Another job that goes on from here."""
        other = Branch(self.spark, self.checkpoint.parent, name)
        other.written, other.names = list(self.written), set(self.names)
        code, lines = state("fork", self.checkpoint, other.checkpoint)
        assert code == 0, lines
        return other

    def held(self) -> dict[int, int]:
        """Counts in the newest version, by key."""
        return {row.key: row["count(1)"] for row in millpond.read_state(self.spark, str(self.checkpoint)).collect()}

    def truth(self) -> dict[int, int]:
        """Counts that it has to hold."""
        keys = [key for batch in self.written for key in batch]
        return {key: keys.count(key) for key in keys}


def test_a_fork_goes_on_as_a_query_of_its_own(spark: SparkSession, tmp_path: Path, state: Callable[..., tuple]) -> None:
    job = Branch(spark, tmp_path)
    job.run([1, 2, 3], [2, 3], [3])
    other = job.fork("fork", state)
    assert other.held() == job.held() == job.truth()

    job.run([1, 1, 7], [2])
    other.run([3, 8], [8])
    for one in (job, other):
        for batch in (3, 4):
            assert one.emitted[batch] == one.expected(batch)
        assert state("gc", one.checkpoint)[0] == 0
        code, lines = state("verify", one.checkpoint)
        assert code == 0, lines
        assert one.held() == one.truth()

    third = other.fork("third", state)
    third.run([1, 9])
    other.run([8])
    for one in (third, other):
        assert one.emitted[5] == one.expected(5)
        assert one.held() == one.truth()

    shutil.rmtree(job.checkpoint)
    with pytest.raises(Exception, match="STATE_FILE_MISSING") as raised:
        other.run([1])
    assert str(job.checkpoint) in str(raised.value)
    assert str(other.checkpoint) in str(raised.value)

"""The collection of a running query's garbage, and of what earlier runs have left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millpond.checkpoint.forks.pins import read_pins
from millpond.checkpoint.generation import claimed_generations
from millpond.checkpoint.retention import orphans
from millpond.checkpoint.retention.collector import Collected, Collector
from millpond.errors import FencedError, TransientError
from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints import garbage
from millpond.query.checkpoints.fork import fork
from millpond.query.checkpoints.garbage import _collect, _remove_leftovers
from tests.checkpoint.rig import slots
from tests.query.test_forks import RETAIN, Query, somewhere, state, truth
from tests.query.test_recovery import Job


@pytest.fixture(autouse=True)
def _slots_end() -> Iterator[None]:
    yield
    while slots:
        slots.pop().die()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run looks for leftovers, however soon it follows, and they go however young they are."""
    monkeypatch.setattr(garbage, "LEFTOVERS_SECONDS", 1e-6)
    monkeypatch.setattr(orphans, "MIN_AGE_SECONDS", 0.0)


def short_run(location: str, folder: Path) -> Query:
    """A run of two batches, over before the query's collector removes anything."""
    query = Query(location, folder)
    remove_leftovers(query)
    return query.go(2)


def remove_leftovers(query: Query) -> None:
    generation = query.slot.generation
    _remove_leftovers(query.files, generation, generation, query.query_logs)


def test_objects_of_short_runs_do_not_become_more_and_more(tmp_path: Path, at_once: None) -> None:
    location, numbers = somewhere(), []
    for _ in range(30):
        query = short_run(location, tmp_path)
        numbers.append(len(query.names("")))
        for version in range(max(query.version - RETAIN, 3), query.version + 1):
            assert state(location, version) == truth(version)
    assert max(numbers[20:]) <= max(numbers[:20]) < 70  # of 16 runs there are claim, base and mark


@pytest.mark.parametrize(("age", "stretch"), [(3600.0, 1e-6), (0.0, 1e12)])
def test_leftovers_stay_for_an_hour_and_are_looked_for_once_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, stretch: float
) -> None:
    monkeypatch.setattr(garbage, "LEFTOVERS_SECONDS", stretch)
    monkeypatch.setattr(orphans, "MIN_AGE_SECONDS", age)
    location = somewhere()
    before: set[str] = set()
    for _ in range(8):
        names = set(short_run(location, tmp_path).names(""))
        assert before < names
        before = names


def test_what_a_fork_needs_stays_until_the_fork_releases_it(tmp_path: Path, at_once: None) -> None:
    original, new = Query(somewhere(), tmp_path).go(10), somewhere()
    fork(original.location, new)
    for _ in range(12):
        query = short_run(original.location, tmp_path)
    (pin,) = read_pins(original.files).values()
    assert set(pin.objects) <= set(query.names(""))
    assert state(new, 10) == truth(10)
    for _ in range(8):
        copy = short_run(new, tmp_path)
    assert not read_pins(original.files)
    query = short_run(original.location, tmp_path)
    assert not set(pin.objects) & set(query.names(""))
    assert state(new, copy.version) == truth(copy.version)
    assert state(original.location, query.version) == truth(query.version)


def test_leftovers_stay_while_a_file_is_missing(
    tmp_path: Path, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(somewhere(), tmp_path).go(10)
    query.files.put("files/unneeded.run", [b"run"])
    query.go(10)
    (run,) = query.table.runs
    content = query.files.get(run.name)
    query.files.delete(run.name)
    query = Query(query.location, tmp_path)
    before = query.names("")
    with caplog.at_level(logging.WARNING, "millpond"):
        remove_leftovers(query)
    assert query.names("") == before
    assert f"are missing, such as {query.files.locate(run.name)};" in caplog.text
    query.files.put(run.name, [content])
    remove_leftovers(query)
    assert "files/unneeded.run" not in query.names("")
    assert run.name in query.names("")


def test_a_start_removes_what_earlier_runs_have_left(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    monkeypatch.setattr(orphans, "MIN_KEPT_GENERATIONS", 1)
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.minBatchesToRetain", "2")
    session.conf.set("spark.sql.streaming.asyncLogPurge.enabled", "false")
    job = Job(session, tmp_path)
    claimed: list[list[int]] = []
    for run in range(8):
        job.write([run % 3, 7])
        job.aggregate()
        for thread in threading.enumerate():
            if thread.name == "millpond-garbage":
                thread.join(60)
        claimed.append(claimed_generations(open_filesystem(str(job.checkpoint / "millpond"))))
    assert job.emitted == {batch: job.expected(batch) for batch in range(8)}
    assert not set(claimed[0]) & set(claimed[-1])


def test_an_error_does_not_end_the_collection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = [ValueError("a defect"), TransientError("The store failed."), Collected(1, 2), FencedError("Overtaken.")]
    ranges = []

    def collect(self: Collector, running: int, first: int) -> Collected:
        ranges.append((running, first))
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(Collector, "collect", collect)
    logs: Any = SimpleNamespace(retained=lambda: range(3, 9))
    files: Any = None
    collector = Collector(files, 1)
    with caplog.at_level(logging.WARNING, "millpond"):
        for _ in range(3):
            _collect(collector, logs)
        with pytest.raises(FencedError):
            _collect(collector, logs)
    assert ranges == [(8, 3)] * 4
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "a defect" in caplog.text
    assert "The store failed." in caplog.text

"""Kafka to Kafka, killed and started with other partitions: the same rows as Spark over the same topic."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.life import Life
from tests.integration.kafka_job import POISON
from tests.servers.jars import beside_spark, jars
from tests.servers.kafka import BROKER, CONNECTOR, running
from tests.servers.process import Unavailable

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("kafka_job.py")


@pytest.fixture
def kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a broker of its own; jobs load the connector."""
    folder = tmp_path / "broker"
    folder.mkdir()
    try:
        monkeypatch.setenv("CONFS", json.dumps({"spark.jars": beside_spark(CONNECTOR)}))
        jars(BROKER)
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running(folder) as address:
        yield address


@pytest.mark.timeout(600)
def test_killed_and_started_with_other_partitions(kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_TEST_JOB", str(os.getpid()))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(JOB.parents[2]), *sys.path]))
    monkeypatch.setenv("KAFKA", kafka)
    rng = random.Random(3)
    native = Life("spark", tmp_path, 2, JOB)
    assert native.run(None, rng) == (False, True), native.log.read_text()[-4000:]
    for partitions, killed in ((2, True), (5, False)):
        life = Life("millpond", tmp_path, partitions, JOB)
        ends = life.run("driver" if killed else None, rng, after=5)  # lines: both have started, three batches
        assert ends == (killed, not killed), life.log.read_text()[-4000:]
    for name in ("keys", "windows"):
        ours, spark = (_rows(tmp_path / "out" / f"{engine}-{name}") for engine in ("millpond", "spark"))
        assert len(spark) == len(set(spark)) > 200, name
        # Spark's Kafka sink writes a batch again that was not committed; nothing is lost, and nothing else comes.
        assert set(ours) == set(spark), name
    totals = [json.loads(value)["total"] or 0 for _, value in _rows(tmp_path / "out" / "millpond-keys")]
    assert max(totals) < POISON // 2, "rows of a transaction that was aborted were read"


def test_records_are_told_of_as_they_come(kafka: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look ahead gets each record once, whatever batch it will be in."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(JOB.parents[2]), *sys.path]))
    monkeypatch.setenv("KAFKA", kafka)
    job = [sys.executable, str(JOB.with_name("kafka_ahead_job.py"))]
    done = subprocess.run(job, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    looks = json.loads(done.stdout.splitlines()[-1])
    assert looks == [list(range(10)), None, list(range(10, 15)), [15, 16], None]


def _rows(path: Path) -> list[tuple[str | None, str]]:
    return [(key, value) for key, value in map(json.loads, path.read_text().splitlines())]

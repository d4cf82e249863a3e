"""Spark, its state on a real S3 server behind a bad network, killed and started with other partitions: same rows."""

import json
import os
import random
from pathlib import Path

import pytest

from millpond import cli
from tests.chaos.life import Life
from tests.chaos.truth import expected_updates, read_updates, write_input
from tests.servers.process import Unavailable
from tests.servers.proxy import faulty
from tests.servers.s3 import pointed_at
from tests.servers.seaweedfs import BUCKET, running, weed

pytestmark = pytest.mark.slow

SHARES = {"slow_down": 0.05, "conflict": 0.05, "delay": 0.2, "hang": 0.01, "reset": 0.04, "cut": 0.04, "lost": 0.04}
LIVES = ((2, True), (5, True), (3, False))
"""Partitions, and whether the application is killed."""


@pytest.mark.xdist_group("seaweedfs")
@pytest.mark.timeout(600)
def test_killed_and_started_with_other_partitions(
    seaweedfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLPOND_TEST_JOB", str(os.getpid()))
    monkeypatch.setenv("LOCATION", f"s3://{BUCKET}/state")
    rows = write_input(tmp_path / "in", 5)
    rng = random.Random(5)
    with faulty(seaweedfs, 5, SHARES) as proxy, pointed_at(proxy.endpoint, AWS_TIMEOUT="4s"):
        for partitions, killed in LIVES:
            life = Life("aggregate", tmp_path, partitions)
            ends = life.run("driver" if killed else None, rng, after=3)  # lines: it has started, two batches
            assert ends == (killed, not killed), life.log.read_text()[-4000:]
    assert {"slow_down", "delay", "reset", "cut", "lost"} <= set(proxy.happened)
    assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")

    query = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    monkeypatch.setattr("sys.argv", ["millpond", "state", "verify", f"s3://{BUCKET}/state/{query}"])
    monkeypatch.setattr(cli._out, "width", 200)
    with pointed_at(seaweedfs), pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().out
    assert not ended.value.code, told
    assert f": {LIVES[-1][0]} partitions, " in told
    assert "0 damaged" in told


@pytest.mark.xdist_group("seaweedfs")
def test_a_server_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        program = weed()
    except Unavailable as reason:
        pytest.skip(str(reason))
    for name in ("own", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with running(program, tmp_path / "own"):
        pass
    assert not list((tmp_path / "temporary").iterdir())

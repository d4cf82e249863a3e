"""Spark, its state on a real HDFS, killed and started with other partitions: same rows."""

import json
import os
import random
from pathlib import Path

import pytest

from millpond import cli
from millpond.files.locations.opening import open_filesystem
from tests.chaos.life import Life
from tests.chaos.truth import expected_updates, read_updates, write_input
from tests.servers.hdfs import Hdfs, behind_proxies, configured, webhdfs

SHARES = {"slow_down": 0.05, "delay": 0.2, "hang": 0.01, "reset": 0.04, "cut": 0.04, "lost": 0.04}
LIVES = ((2, True), (5, True), (3, False))
"""Partitions, and whether the application is killed."""

pytestmark = [pytest.mark.xdist_group("hdfs"), pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_TEST_JOB", str(os.getpid()))


def live(tmp_path: Path, seed: int, checkpoint: str = "") -> None:
    rng = random.Random(seed)
    for partitions, killed in LIVES:
        life = Life("aggregate", tmp_path, partitions, checkpoint=checkpoint)
        ends = life.run("driver" if killed else None, rng, after=3)  # lines: it has started, two batches
        assert ends == (killed, not killed), life.log.read_text()[-4000:]


def verify(location: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["millpond", "state", "verify", location])
    monkeypatch.setattr(cli._out, "width", 200)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().out
    assert not ended.value.code, told
    assert f": {LIVES[-1][0]} partitions, " in told
    assert "0 damaged" in told


def test_the_state_behind_a_bad_network(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_input(tmp_path / "in", 5)
    impatient = configured(tmp_path / "conf", {"dfs.webhdfs.socket.read-timeout": "4s"})
    with impatient, behind_proxies(hdfs, 5, SHARES) as proxies:
        monkeypatch.setenv("LOCATION", f"{webhdfs(proxies[0].endpoint)}/state")
        live(tmp_path, 5)
    assert {"slow_down", "delay", "reset", "cut", "lost"} <= set(proxies[0].happened + proxies[1].happened)
    assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")
    query = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    verify(f"{hdfs.url}/state/{query}", monkeypatch, capsys)


def test_the_whole_checkpoint(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spark's offset and commit logs, too, which Spark itself writes there."""
    rows, checkpoint = write_input(tmp_path / "in", 6), f"hdfs://{hdfs.rpc}/a checkpoint"
    addresses = {
        "dfs.namenode.rpc-address": hdfs.rpc,
        "dfs.namenode.http-address": hdfs.namenode.removeprefix("http://"),
    }
    with configured(tmp_path / "conf", addresses):
        live(tmp_path, 6, checkpoint)
        copy_logs(checkpoint, tmp_path / "copy")
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "copy")
        verify(checkpoint, monkeypatch, capsys)


def copy_logs(checkpoint: str, folder: Path) -> None:
    files = open_filesystem(checkpoint)
    for info in [*files.list("offsets/"), *files.list("sources/")]:
        copy = folder / info.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(files.get(info.name))

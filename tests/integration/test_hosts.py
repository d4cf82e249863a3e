"""Spark clusters of two and three hosts: partitions stay, hosts are lost, and the rows are those of one host."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.query.progress.reader import ProgressReader
from millpond.spec.kinds.deduplicate import DeduplicateSpec
from millpond.spec.operators import Field
from millpond.state_reader.reader import StateReader
from millpond.tasks.operator_task import OperatorTask, SlotSettings
from tests.chaos.truth import EXPECTED, expected_updates, read_file_sink, read_updates, write_input
from tests.servers.s3 import s3
from tests.slot.conftest import with_tests_on_path
from tests.slot.test_spark import FAILURES
from tests.support.cluster import Hosts, hosts

JOB = Path(__file__).parents[1] / "chaos" / "job.py"

PATIENT = {"spark.locality.wait": "60s"}
"""Spark waits for a partition's host, however busy this machine is."""

pytestmark = [pytest.mark.xdist_group("hosts"), pytest.mark.timeout(600)]


def run(
    folder: Path,
    cluster: Hosts,
    on_batch: Callable[[int], None],
    location: str,
    *,
    query: str = "aggregate",
    pause: float = 0.0,
    **settings: str,
) -> str:
    """Run the job once to its end, calling `on_batch` after each batch; return its log."""
    done, log = run_job(folder, cluster, on_batch, location, query=query, pause=pause, **settings)
    assert done, log[-6000:]
    return log


def run_job(
    folder: Path,
    cluster: Hosts,
    on_batch: Callable[[int], None],
    location: str,
    *,
    query: str = "aggregate",
    pause: float = 0.0,
    **settings: str,
) -> tuple[bool, str]:
    """Run the job once; return whether it came to its end, and its log."""
    command = [sys.executable, str(JOB), query, *(str(folder / name) for name in ("in", "out", "checkpoint"))]
    environment = os.environ | {
        "MASTER": cluster.url,
        "DRIVER": cluster.driver,
        "PARTITIONS": "6",
        "EXECUTORS": str(len(cluster.numbers)),
        "CONFS": json.dumps(settings),
        "PAUSE": str(pause),
    }
    environment["LOCATION"] = location
    with (folder / "job.log").open("wb") as log:
        job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert job.stdout is not None
    done = False
    for line in job.stdout:
        if line.startswith("batch "):
            on_batch(int(line.split()[1]))
        done = done or line.strip() == "done"
    job.wait()
    return done, (folder / "job.log").read_text()


def moved(checkpoint: Path) -> int:
    """Partitions that were opened in mid-run, over the batches of the newest run."""
    reader = StateReader(ProgressReader(str(checkpoint)).state)
    return sum(
        manifest.metrics.get("moved_partitions", 0)
        for version in reader.known()
        for manifest in reader.manifests(version).values()
    )


def test_partitions_stay_on_their_hosts(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 7)
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        run(tmp_path, cluster, lambda batch: None, f"{bucket}/state", **PATIENT)
        assert moved(tmp_path / "checkpoint") == 0
        progress = ProgressReader(str(tmp_path / "checkpoint")).read()
        assert (progress.hosts, progress.restart) == ({cluster.address(0): 3, cluster.address(1): 3}, None)
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


def test_an_executor_dies_and_its_host_goes_on(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 42)
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        run(tmp_path, cluster, lambda batch: cluster.kill_executor(0) if batch == 2 else None, f"{bucket}/state")
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


def test_a_host_is_lost(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 42)
    with s3() as bucket, hosts(tmp_path, 3) as cluster:
        run(tmp_path, cluster, lambda batch: cluster.kill(1) if batch == 3 else None, f"{bucket}/state")
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


def test_hosts_are_lost_with_commits_that_were_not_durable(tmp_path: Path) -> None:
    """The store takes nothing from the end of one batch on, and a host is killed after the next."""
    rows = write_input(tmp_path / "in", 42)
    held = tmp_path / "held"
    killed = {2: 1, 5: 2}

    def on_batch(batch: int) -> None:
        if batch + 1 in killed:
            held.touch()
        if batch in killed:
            cluster.kill(killed.pop(batch))
            held.unlink()

    with hosts(tmp_path, 3) as cluster:
        log = run(tmp_path, cluster, on_batch, f"faults+file:{tmp_path}/state?hold={held}")
        assert log.count("the query is started again, and repeats the batch") == 2
        progress = ProgressReader(str(tmp_path / "checkpoint")).read()
        assert progress.hosts == {cluster.address(0): 6}
        assert progress.restart is not None
        assert (progress.restart.number, progress.restart.hosts) == (2, (cluster.address(2),))
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


def test_a_host_hangs_and_comes_back(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 42)

    def change(batch: int) -> None:
        if batch == 2:
            cluster.signal(0, signal.SIGSTOP)
        if batch == 5:
            cluster.signal(0, signal.SIGCONT)

    settings = {"spark.millpond.executor.timeout": "4"}
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        log = run(tmp_path, cluster, change, f"{bucket}/state", **settings)
        assert log.count("does not answer: its tasks run elsewhere") == 1
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


@pytest.mark.parametrize("query", EXPECTED)
def test_every_kind_of_operator_outlives_a_host(tmp_path: Path, query: str) -> None:
    rows = write_input(tmp_path / "in", 3)
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        run(tmp_path, cluster, lambda batch: cluster.kill(0) if batch == 3 else None, f"{bucket}/state", query=query)
        assert read_file_sink(tmp_path / "out") == EXPECTED[query](rows)


def test_windows_close_in_batches_without_data(tmp_path: Path) -> None:
    """Spark's own store, which makes it run such batches, never commits; `foreachBatch` must not fail for that."""
    rows = write_input(tmp_path / "in", 9)
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        run(tmp_path, cluster, lambda batch: None, f"{bucket}/state", query="windows_by_batch")
        written = [row[1:] for row in read_updates(tmp_path / "out")]
        assert sorted(written, key=repr) == EXPECTED["windows"](rows)


def test_a_decommissioned_host_hands_over(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 5)
    settings = {"spark.decommission.enabled": "true"} | PATIENT
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        log = run(
            tmp_path,
            cluster,
            lambda batch: cluster.decommission(0) if batch == 2 else None,
            f"{bucket}/state",
            pause=1.0,
            **settings,
        )
        assert "started again" not in log
        assert 3 <= moved(tmp_path / "checkpoint") <= 6
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")


def test_hosts_come_and_go(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 11)

    def change(batch: int) -> None:
        if batch == 0:
            cluster.add(2)
        if batch == 5:
            cluster.kill(0)

    (tmp_path / "events").mkdir()
    events = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file:{tmp_path}/events",
    }
    with s3() as bucket, hosts(tmp_path, 2) as cluster:
        run(tmp_path, cluster, change, f"{bucket}/state", pause=2.0, **events)
        assert read_updates(tmp_path / "out") == expected_updates(rows, tmp_path / "checkpoint")
        joined = cluster.address(2)
        assert joined in ProgressReader(str(tmp_path / "checkpoint")).read().hosts
    logged = "".join(path.read_text() for path in (tmp_path / "events").rglob("events*"))
    assert set(re.findall(r"millpond: slots start on ([0-9.]+)", logged)) == {joined}


_FAILING = """
import pickle, sys
from pyspark.sql import SparkSession
from tests.slot.test_spark import FAILURES, commanded
spark = (SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")
    .config("spark.executor.memory", "600m")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate())
task = pickle.loads(sys.stdin.buffer.read())
print(commanded(spark, task, FAILURES[0][0]))
"""


def test_the_log_of_a_killed_slot_reaches_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", with_tests_on_path()["PYTHONPATH"])  # hosts take it over
    slot = SlotSettings(silence_timeout=15.0, start_timeout=60.0)
    spec = DeduplicateSpec(columns=(Field("k", "bigint"),), keys=(0,))
    task = OperatorTask("failing", "query-1", "run-1", 0, spec, 1, 1, str(tmp_path), 1, str(tmp_path), slot)
    with hosts(tmp_path, 1) as cluster:
        driver = subprocess.run(
            [sys.executable, "-c", _FAILING, cluster.url],
            input=pickle.dumps(task),
            capture_output=True,
            timeout=300,
            check=False,
        )
    assert driver.returncode == 0, driver.stderr.decode()[-6000:]
    assert re.search(FAILURES[0][1], driver.stdout.decode())

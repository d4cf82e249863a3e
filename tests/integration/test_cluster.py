"""A standalone Spark cluster on loopback, state on a store: one of two executors dies, the rows stay the same."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyspark
import pytest

from tests.chaos.truth import expected_updates, read_updates, write_input
from tests.s3 import s3

JOB = Path(__file__).parents[1] / "chaos" / "job.py"
SPARK_HOME = Path(pyspark.__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[str]:
    """A master and its workers; yields the master's URL and kills everything at the end."""
    port = free_port()
    environment = os.environ | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOG_DIR": str(folder / "log"),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
    }
    launcher = str(SPARK_HOME / "bin" / "spark-class")
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "600m"]
    worker += ["--webui-port", "0", f"spark://127.0.0.1:{port}"]
    running: list[subprocess.Popen[bytes]] = []
    with (folder / "cluster.log").open("wb") as log:

        def start(command: list[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [launcher, *command], env=environment, stdout=log, stderr=log, start_new_session=True
            )

        try:
            running.extend(map(start, (master, *[worker] * workers)))
            yield f"spark://127.0.0.1:{port}"
        finally:
            for process in running:
                for part in [*psutil.Process(process.pid).children(recursive=True), process]:
                    part.kill()
                process.wait()


def executors() -> list[psutil.Process]:
    name = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    return [p for p in psutil.process_iter(["cmdline"]) if name in (p.info["cmdline"] or ())]


@pytest.mark.xdist_group("kills")
@pytest.mark.timeout(600)
def test_an_executor_dies(tmp_path: Path) -> None:
    rows = write_input(tmp_path / "in", 42)
    with s3() as bucket, cluster(tmp_path, workers=2) as master:
        killed = 0
        for _ in range(6):  # the loss of a host may end the query: a restart repairs it
            with (tmp_path / "job.log").open("ab") as log:
                command = [
                    sys.executable,
                    str(JOB),
                    "aggregate",
                    *(str(tmp_path / p) for p in ("in", "out", "checkpoint")),
                ]
                job = subprocess.Popen(
                    command,
                    env=os.environ | {"MASTER": master, "LOCATION": f"{bucket}/state"},
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            assert job.stdout is not None
            done = False
            for line in job.stdout:
                if not killed and line.startswith("batch 2"):
                    os.kill(executors()[0].pid, signal.SIGKILL)
                    killed += 1
                done = done or line.strip() == "done"
            job.wait()
            if done:
                break
            time.sleep(1)
        assert done, (tmp_path / "job.log").read_text()[-4000:]
        assert killed
    out = read_updates(tmp_path / "out")
    assert out == expected_updates(rows, tmp_path / "checkpoint")

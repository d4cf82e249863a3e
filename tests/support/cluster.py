"""Spark clusters on this machine. Each host is a standalone worker with its own address and temporary directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyspark

from tests.support.network import Network

SPARK_HOME = Path(pyspark.__file__).parent
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class Hosts:
    """A master, and hosts by number.

    Args:
        folder: for logs and the hosts' directories.
        cores: cores of each host.
        memory: memory of each host's executor and worker, as Spark spells it.
        network: of the hosts; None = this machine's own.

    Attributes:
        url: of the master.
        driver: address of this machine for the hosts.
    """

    def __init__(self, folder: Path, *, cores: int = 1, memory: str = "600m", network: Network | None = None) -> None:
        self.folder = folder
        self.cores = cores
        self.memory = memory
        self.network = network
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._directories: dict[int, str] = {}
        self.driver = network.driver if network is not None else "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((self.driver, 0))
            port = int(probe.getsockname()[1])
        self.url = f"spark://{self.driver}:{port}"
        master = f"org.apache.spark.deploy.master.Master --host {self.driver} --webui-port 0 --port"
        self._master = self._start("master", [*master.split(), str(port)])

    @property
    def numbers(self) -> list[int]:
        """Numbers of the hosts that were not killed."""
        return sorted(self._workers)

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return self.network.address(number) if self.network is not None else f"127.0.0.{number + 1}"

    def add(self, number: int) -> None:
        """Start a host."""
        # The name is short because Unix sockets lie in it, whose names have at most 107 bytes.
        directory = self._directories[number] = tempfile.mkdtemp(prefix=f"h{number}-")
        address = self.address(number)
        command = f"org.apache.spark.deploy.worker.Worker --host {address} --cores {self.cores} --memory {self.memory}"
        self._workers[number] = self._start(
            f"host{number}",
            [*command.split(), "--webui-port", "0", self.url],
            self.network.plug(number) if self.network is not None else [],
            TMPDIR=directory,
            SPARK_LOCAL_IP=address,
            SPARK_LOCAL_DIRS=directory,
        )

    def processes(self, number: int) -> list[psutil.Process]:
        """Return the processes of a host: its worker and all descendants, slots included."""
        found = []
        for process in psutil.process_iter():  # slots have no parent once their executor has died
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == self._directories[number]:
                    found.append(process)
        return found

    def kill(self, number: int) -> None:
        """Kill all processes of a host, and remove its disk."""
        self.signal(number, signal.SIGKILL)
        self._workers.pop(number).wait()
        shutil.rmtree(self._directories.pop(number), ignore_errors=True)

    def kill_executor(self, number: int) -> None:
        """Kill a host's executor; Spark starts another one there."""
        self._signal_executor(number, signal.SIGKILL)

    def decommission(self, number: int) -> None:
        """Decommission a host's executor: it takes no more tasks, and ends."""
        self._signal_executor(number, signal.SIGPWR)

    def has_executor(self, number: int) -> bool:
        """Return whether an executor runs on a host; a new one takes some seconds to start."""
        return bool(self._named(number, EXECUTOR))

    def slots(self, number: int) -> list[psutil.Process]:
        """Return Millpond's processes on a host: slots and their template."""
        return self._named(number, "millpond.slot.template")

    def _named(self, number: int, part: str) -> list[psutil.Process]:
        found = []
        for process in self.processes(number):
            with suppress(psutil.Error):
                if part in process.cmdline():
                    found.append(process)
        return found

    def _signal_executor(self, number: int, what: signal.Signals) -> None:
        executors = self._named(number, EXECUTOR)
        assert executors
        for process in executors:
            process.send_signal(what)

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to all processes of a host."""
        for process in self.processes(number):
            with suppress(psutil.Error):
                process.send_signal(what)

    def close(self) -> None:
        """Kill all processes of the cluster."""
        for number in list(self._workers):
            self.kill(number)
        self._master.kill()
        self._master.wait()

    def _start(
        self, name: str, command: Sequence[str], within: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*within, str(SPARK_HOME / "bin" / "spark-class"), *command],
                env=os.environ
                | {
                    "SPARK_HOME": str(SPARK_HOME),
                    "SPARK_WORKER_DIR": str(self.folder / f"work-{name}"),
                    "SPARK_LOG_DIR": str(self.folder / "log"),
                    "SPARK_DAEMON_MEMORY": "256m",
                    "PYSPARK_PYTHON": sys.executable,
                }
                | environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


@contextmanager
def hosts(
    folder: Path, count: int, *, cores: int = 1, memory: str = "600m", network: Network | None = None
) -> Iterator[Hosts]:
    """Run a cluster of `count` hosts; kill it at the end. Other arguments are those of `Hosts`."""
    cluster = Hosts(folder, cores=cores, memory=memory, network=network)
    try:
        for number in range(count):
            cluster.add(number)
        yield cluster
    finally:
        cluster.close()

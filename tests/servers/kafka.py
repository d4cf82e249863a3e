"""A real Kafka: one broker that is its own controller (KRaft), in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.jars import Artifact, jars
from tests.servers.process import die_with_parent, free_ports, wait_until_up

BROKER = Artifact(
    "org.apache.kafka", "kafka_2.13", "4.3.1", "4815c97ff2e7a63916fab445a26ad0316234e77ed964aac9b74ba93c191691de"
)
CONNECTOR = Artifact(
    "org.apache.spark",
    "spark-sql-kafka-0-10_2.13",
    "4.2.0",
    "b89624eb66bdc9a51bf2cd8637f384d30972d171d3d081ac53616d105eb8cdae",
)
"""The newest release; it also works with Spark 4.3."""


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run an empty broker; kill it at the end.

    Args:
        folder: an empty folder for its data and its log.

    Yields:
        Host and port of the broker.

    Raises:
        Unavailable: its jars cannot be downloaded.
        TimeoutError: it does not come up.
    """
    port, controller = free_ports(2)
    settings = folder / "server.properties"
    settings.write_text(
        f"""process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
num.partitions=2
log.retention.ms=-1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""
    )
    java = ["java", "-Xmx256m", "-cp", os.pathsep.join(map(str, jars(BROKER)))]
    made = [*java, "kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", str(settings)]
    log = folder / "log.txt"
    with log.open("wb") as out:
        subprocess.run(made, stdout=out, stderr=out, check=True, timeout=60)
        process = subprocess.Popen(
            [*java, "kafka.Kafka", str(settings)], cwd=folder, stdout=out, stderr=out, preexec_fn=die_with_parent
        )
    try:
        wait_until_up("Kafka", lambda: _is_up(port), [process], log)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _is_up(port: int) -> bool:
    """Return whether the broker takes connections.

    Raises:
        OSError: it takes none.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True

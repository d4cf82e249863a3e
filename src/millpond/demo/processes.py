"""Process trees that are started and killed as a whole.

The caller becomes the *subreaper* of its descendants (prctl(2)): Millpond's slots detach themselves from Spark's
workers, and as orphans they become children of the caller. So the tree keeps them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from millpond.slot.process.identity import Process, descendants

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def become_subreaper() -> None:
    """Adopt orphaned descendants of this process (no-op outside Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it ends for any reason (no-op outside Linux).

    Args:
        parent: the parent's process id. The kernel sends no signal if the parent has already ended.

    Raises:
        SystemExit: the parent has already ended.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(f"Process {parent}, which started this one, has ended.")


class ProcessTree:
    """A command and all its descendants, detached ones included.

    Args:
        command, env, cwd: as for `subprocess.Popen`.
        log: file for standard output and standard error.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        become_subreaper()
        self._before = set(descendants())
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                list(command),
                env=dict(env or os.environ),
                cwd=cwd,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def members(self) -> list[Process]:
        """Return the live processes, and reap orphans that have ended: as subreaper, this process has to."""
        alive = []
        for process in descendants():
            if process in self._before:
                continue
            if process.alive():
                alive.append(process)
            elif process.pid != self.process.pid:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        return alive

    def running(self) -> bool:
        """Return whether the command itself still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to all members, and wait up to 30 s until all have ended."""
        deadline = time.monotonic() + 30
        while (members := self.members()) and time.monotonic() < deadline:
            for member in members:
                with suppress(OSError):
                    os.kill(member.pid, signal.SIGKILL)
            time.sleep(0.02)
        self.close()

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds for detached members to end, then reap the command."""
        deadline = time.monotonic() + linger
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.1)


def tree_bytes(folder: Path) -> int:
    """Return the allocated bytes of all files below a folder; hard links count once."""
    sizes: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(root, name))
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())

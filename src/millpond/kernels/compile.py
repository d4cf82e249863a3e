"""Compile kernels before they are needed.

`python -m millpond.kernels.compile` compiles all of them on all cores, for an installation or an image. With `--behind`
it is the process that a machine's first query leaves behind. That process compiles what the query did not need, so that
later queries need not wait. It outlives the application, since short programs would never finish it, and each would
begin it again. One runs at a time, it yields to everything else, and it ends after ten minutes at the latest.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import millpond.kernels
from millpond.kernels.compiled import KERNELS, Kernel, missing, open_lock

_LONGEST = 600
"""Seconds after which the process that was left behind is ended by the system, whatever it does."""


def import_all() -> None:
    """Import every module of kernels."""
    for module in pkgutil.walk_packages(millpond.kernels.__path__, "millpond.kernels."):
        if module.name != __name__:
            importlib.import_module(module.name)


def _prepare(number: int) -> None:
    KERNELS[number].prepare()


def compile_all() -> int:
    """Compile what is not on disk, on all cores, and show progress; returns the exit status."""
    import multiprocessing

    from rich.console import Console
    from rich.progress import track

    out = Console()
    import_all()
    if not all(one.kept or one.folder for one in KERNELS):
        out.print(
            "Compiled kernels cannot be kept: this user can write neither to the package nor to a cache of its own. "
            "Set NUMBA_CACHE_DIR to a folder that it can write.",
            style="red",
        )
        return 1
    began = time.monotonic()
    numbers = [KERNELS.index(one) for one in missing()]
    if numbers:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            done = pool.imap_unordered(_prepare, numbers)
            for _ in track(done, "Compiling kernels", total=len(numbers), console=out):
                pass
    took = f"{len(numbers)} compiled in {time.monotonic() - began:.0f} s" if numbers else "all were compiled before"
    out.print(f"{len(KERNELS)} kernels, {took}", highlight=False)
    return 0


def compile_side_by_side(kernels: Sequence[Kernel]) -> list[int]:
    """Compile some kernels in two processes, which begin at either end; returns their ids.

    They are forked, so that nothing is imported again: the caller must have no threads.
    """
    return [_forked(kernels), _forked(kernels[::-1])]


def _forked(kernels: Sequence[Kernel]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.closerange(3, 65_536)  # sockets of the caller's must not stay open when it ends
            for one in kernels:
                one.prepare()
        finally:
            os._exit(0)  # a query that needs a kernel which failed compiles it again, and tells why
    return pid


def leave_behind() -> None:
    """Start the process that compiles all other kernels, unless it runs."""
    lock = _lock()
    if lock is None:
        return
    try:
        # The shell ends at once, so that the process is no child of this one, which waits for its children. In a
        # session of its own it does not get the Ctrl-C of the application's terminal.
        compiler = [sys.executable, "-m", "millpond.kernels.compile", "--behind"]
        command = ["nice", "-n", "19", "/bin/sh", "-c", '"$@" &', "sh", *compiler]
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[lock], start_new_session=True)
    finally:
        os.close(lock)  # the process has the same lock, and holds it until it ends


def _lock() -> int | None:
    """The lock on the folder of compiled kernels; None if another process holds it, or there is no such folder."""
    folder = KERNELS[0].folder
    if folder is None:
        return None
    lock = open_lock(folder / "compiling.lock")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def compile_behind() -> None:
    """Compile what is not on disk, one kernel after another, and yield to every other process."""
    signal.alarm(_LONGEST)
    with suppress(OSError):  # refused in some containers
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):  # Linux shares processors among sessions first, if it is set to
        Path("/proc/self/autogroup").write_text("19")
    import_all()
    for one in missing():
        if not one.kept:
            one.prepare(alone=False)


if __name__ == "__main__":
    compile_behind() if "--behind" in sys.argv else sys.exit(compile_all())

"""Ahead-of-time compilation of kernels.

`python -m millpond.kernels.compile` compiles all kernels on all cores, for an installation or an image. With
`--behind` it is the background process that a machine's first query starts: it compiles the kernels that the query
did not need, so that later queries need not wait. It outlives the application, because short programs would never
finish the work and each would start it again. Only one such process runs at a time, at the lowest priority, for at
most ten minutes.
"""

from __future__ import annotations

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
from millpond.kernels.compiled import KERNELS, Kernel, lock_file, missing

_BACKGROUND_SECONDS = 600
"""Seconds after which the system ends the background process."""


def import_all() -> None:
    """Import all kernel modules."""
    for module in pkgutil.walk_packages(millpond.kernels.__path__, "millpond.kernels."):
        if module.name != __name__:
            importlib.import_module(module.name)


def _prepare(number: int) -> None:
    KERNELS[number].prepare()


def compile_all() -> int:
    """Compile the kernels that are not on disk, on all cores, with a progress bar; return the exit status."""
    import multiprocessing

    from rich.console import Console
    from rich.progress import track

    out = Console()
    import_all()
    if not all(kernel.is_cached or kernel.folder for kernel in KERNELS):
        out.print(
            "Compiled kernels cannot be kept: this user can write neither to the package nor to a cache of its own. "
            "Set NUMBA_CACHE_DIR to a folder that it can write.",
            style="red",
        )
        return 1
    began = time.monotonic()
    numbers = [KERNELS.index(kernel) for kernel in missing()]
    if numbers:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            done = pool.imap_unordered(_prepare, numbers)
            for _ in track(done, "Compiling kernels", total=len(numbers), console=out):
                pass
    took = f"{len(numbers)} compiled in {time.monotonic() - began:.0f} s" if numbers else "all were compiled before"
    out.print(f"{len(KERNELS)} kernels, {took}", highlight=False)
    return 0


def compile_in_two_processes(kernels: Sequence[Kernel]) -> list[int]:
    """Compile kernels in two forked processes, one from each end of the list; return the process ids.

    Forked processes need not import anything again; the caller must have no threads.
    """
    return [_forked(kernels), _forked(kernels[::-1])]


def _forked(kernels: Sequence[Kernel]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.closerange(3, 65_536)  # the caller's sockets must not stay open after it ends
            for kernel in kernels:
                kernel.prepare()
        finally:
            os._exit(0)  # a query that needs a failed kernel compiles it again, and reports the error
    return pid


def start_background_compiler() -> None:
    """Start the background process that compiles all other kernels, unless one is running."""
    lock = _lock()
    if lock is None:
        return
    try:
        # The shell ends at once, so that the process is not a child of this one, which waits for its children. In its
        # own session it does not receive Ctrl-C from the application's terminal.
        compiler = [sys.executable, "-m", "millpond.kernels.compile", "--behind"]
        command = ["nice", "-n", "19", "/bin/sh", "-c", '"$@" &', "sh", *compiler]
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=[lock], start_new_session=True)
    finally:
        os.close(lock)  # the process has inherited the lock, and holds it until it ends


def _lock() -> int | None:
    """Take the lock on the folder of compiled kernels; None if another process holds it, or there is no such folder."""
    folder = KERNELS[0].folder
    if folder is None:
        return None
    try:
        return lock_file(folder / "compiling.lock", wait=False)
    except BlockingIOError:
        return None


def compile_in_background() -> None:
    """Compile the kernels that are not on disk, one after another, at the lowest priority."""
    signal.alarm(_BACKGROUND_SECONDS)
    with suppress(OSError):  # refused in some containers
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # With autogroups, Linux divides processor time among sessions first. No other process may be in this one.
    with suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")
    import_all()
    for kernel in missing():
        if not kernel.is_cached:
            kernel.prepare(exclusive=False)


if __name__ == "__main__":
    compile_in_background() if "--behind" in sys.argv else sys.exit(compile_all())

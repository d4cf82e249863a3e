"""Compile every kernel before it is needed: `python -m millpond.kernels.compile [PROGRESS PARENT]`.

Without arguments it uses all cores, for an installation or an image. With a file for its progress and its parent's
process id it is what a template starts: one process of low priority beside the query, which ends with its parent.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import sys
from pathlib import Path

import millpond.kernels
from millpond.kernels.compiled import KERNELS, missing

_NICE = 10


def import_all() -> None:
    """Import every module of kernels."""
    for module in pkgutil.walk_packages(millpond.kernels.__path__, "millpond.kernels."):
        if module.name != __name__:
            importlib.import_module(module.name)


def _prepare(number: int) -> None:
    KERNELS[number].prepare()


def compile_all() -> None:
    """Compile what is not on disk, on all cores."""
    import_all()
    numbers = [KERNELS.index(one) for one in missing()]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for _ in pool.imap_unordered(_prepare, numbers):
            pass


def compile_behind(progress: Path, parent: int) -> None:
    """Compile what is not on disk, one kernel after another, beside what matters more.

    Args:
        progress: a file that says how many are done, of how many; it goes when all are.
        parent: process id of the template. It may have died while this process was starting.
    """
    os.nice(_NICE)
    import_all()
    fresh = progress.with_name(f"{progress.name}.{os.getpid()}")
    for one in missing():
        if os.getppid() != parent:
            break
        fresh.write_text(f"{len(KERNELS) - len(missing())} of {len(KERNELS)}")
        fresh.rename(progress)
        if not one.kept:
            one.prepare(alone=False)
    progress.unlink(missing_ok=True)


if __name__ == "__main__":
    compile_behind(Path(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 1 else compile_all()

"""Entry points of a slot process, and the imports that the template must do before it forks.

Everything is imported here, so that a forked slot finds all modules loaded.
"""

from __future__ import annotations

import socket

import numpy as np
import pyarrow as pa

from millpond.kernels.compile import compile_in_two_processes, start_background_compiler
from millpond.kernels.compiled import KERNELS, missing
from millpond.operators.kinds.registry import load_operators
from millpond.slot.first_kernels import FIRST
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.server import Slot
from millpond.stores.memory.process_memory import share_one_heap

load_operators()
pa.array(np.empty(0))  # Arrow imports pandas, if installed, when it converts its first array: do it before the fork


def serve(directory: SlotDirectory, number: int, listener: socket.socket) -> None:
    """Run slot `number` until the application has ended."""
    share_one_heap()
    Slot(directory, listener, PartitionServer(directory.path, number, directory.host())).run()


def compile_ahead(directory: SlotDirectory) -> None:
    """Load the kernels of the first batch once for all slots, and compile those that are missing.

    A detached process compiles the other kernels.
    """
    # Numba imports its type registry on first use, which takes 0.2 s: do it once here instead of in every slot.
    KERNELS[0].targetctx.refresh()
    uncompiled = missing(FIRST)
    for kernel in FIRST:
        if kernel.is_cached:
            kernel.prepare()
    if uncompiled:
        directory.compiling.touch()
        compile_in_two_processes(uncompiled)
    if missing():
        start_background_compiler()

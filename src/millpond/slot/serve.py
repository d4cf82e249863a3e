"""What the template imports before it forks, and what a slot runs: everything, so that a fork finds it all loaded."""

from __future__ import annotations

import socket

import numpy as np
import pyarrow as pa

import millpond.files.backends.faults
import millpond.files.backends.local
import millpond.files.backends.objects  # noqa: F401
from millpond.kernels.compile import compile_side_by_side, leave_behind
from millpond.kernels.compiled import KERNELS, missing
from millpond.operators.kinds.registry import load_operators
from millpond.slot.first_kernels import FIRST
from millpond.slot.partition.partitions import PartitionServer
from millpond.slot.process.lifecycle import SlotDirectory
from millpond.slot.process.server import Slot
from millpond.stores.memory.process_memory import share_one_heap

load_operators()
pa.array(np.empty(0))  # Arrow looks for pandas when it first meets an array, and loads what it finds


def serve(directory: SlotDirectory, number: int, listener: socket.socket) -> None:
    """Be slot `number` until the application is gone."""
    share_one_heap()
    Slot(directory, listener, PartitionServer(directory.path, number)).run()


def compile_ahead(directory: SlotDirectory) -> None:
    """Load the kernels that a first batch needs, for all slots at once; on a machine's first run, compile them.

    The other kernels are compiled by a process that is left behind.
    """
    # Numba imports what it knows of types when it is first used: a fifth of a second, in each slot if not here.
    KERNELS[0].targetctx.refresh()
    left = missing(FIRST)
    for one in FIRST:
        if one.kept:
            one.prepare()
    if left:
        directory.compiling.touch()
        compile_side_by_side(left)
    if missing():
        leave_behind()

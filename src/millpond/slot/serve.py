"""What the template imports before it forks, and what a slot runs: everything, so that a fork finds it all loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pyarrow as pa

import millpond.files.backends.faults
import millpond.files.backends.local
import millpond.files.backends.objects  # noqa: F401
from millpond.kernels.compiled import KERNELS, missing
from millpond.operators.kinds.registry import load_operators
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


def compile_beside(directory: SlotDirectory) -> subprocess.Popen[bytes] | None:
    """On a machine's first run, have the kernels compiled that no query has needed yet: one would wait for each."""
    left = missing()
    if not left:
        return None
    directory.compiling.write_text(f"{len(KERNELS) - len(left)} of {len(KERNELS)}")
    command = [sys.executable, "-m", "millpond.kernels.compile", str(directory.compiling), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)

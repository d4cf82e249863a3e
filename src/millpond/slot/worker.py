"""Spark's Python worker, in which pipes run: what its habits cost, and how to spare it that."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pyarrow as pa

_SOCKETS = "/proc/self/fd"
_frozen: set[str] = set()
"""The modules that the garbage collector no longer goes through."""


def settle() -> None:
    """Take what is loaded out of the garbage collector's sight: at the first task, and when more has been imported.

    Spark's worker collects garbage after every task, and goes through every object of every imported module each time:
    tens of milliseconds a task, more than the pipe itself needs. What a task leaves is not frozen: it can be garbage.
    """
    if sys.modules.keys() <= _frozen:
        return
    gc.collect()
    gc.freeze()
    _frozen.update(sys.modules)


def promptly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches that Spark sends this worker, without a pause of 40 ms in each task.

    Spark's JVM leaves Nagle's algorithm on: what it sends after the command waits for that to be acknowledged, and
    Linux puts acknowledgements off. Where the connection is not by TCP (`spark.python.unix.domain.socket.enabled`),
    or the system is another, nothing is done.
    """
    with ExitStack() as stack:
        spark = list(_tcp_sockets(stack))
        while True:
            for each in spark:
                with suppress(OSError):  # a connection that is gone is noticed by who reads it
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # Linux forgets it after a while
            batch = next(batches, None)
            if batch is None:
                return
            yield batch


def _tcp_sockets(stack: ExitStack) -> Iterator[socket.socket]:
    """This process's connections by TCP, which in a worker is the one to Spark; borrowed until the stack unwinds."""
    if not os.path.isdir(_SOCKETS):
        return
    for name in os.listdir(_SOCKETS):
        with suppress(OSError):
            if os.readlink(f"{_SOCKETS}/{name}").startswith("socket:"):
                found = socket.socket(fileno=int(name))
                stack.callback(found.detach)  # whoever opened it closes it
                if found.family != socket.AF_UNIX and found.type == socket.SOCK_STREAM:
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    yield found

"""Access to Spark's Python worker and the task that it runs, and workarounds for two costs of each task."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

_SOCKETS = "/proc/self/fd"
_frozen: set[str] = set()
"""Modules that the garbage collector no longer traverses."""


def freeze_modules() -> None:
    """Exclude loaded modules from garbage collection: at the first task, and when more modules have been imported.

    Spark's worker collects garbage after every task and traverses every object of every imported module each time. That
    takes tens of milliseconds per task, more than the slot stage itself. Objects of a finished task are not frozen, as
    they can be garbage.
    """
    if sys.modules.keys() <= _frozen:
        return
    gc.collect()
    gc.freeze()
    _frozen.update(sys.modules)


def task_context() -> Any:
    """Return Spark's context of the current task, after `freeze_modules`; None outside of tasks."""
    context = TaskContext.get()
    if context:
        freeze_modules()
    return context


def batch_of(context: Any) -> int | None:
    """Return the batch id of a task; None if Spark does not provide it, as in user threads."""
    number = context.getLocalProperty("streaming.sql.batchId") if context else None
    return None if number is None else int(number)


def added_paths() -> list[str]:
    """Return the import paths of the application's added files (`addPyFile`) in this worker."""
    from pyspark.core.files import SparkFiles

    root = SparkFiles._root_directory
    return [] if root is None else [path for path in sys.path if path == root or path.startswith(f"{root}{os.sep}")]


def without_delayed_acks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches that Spark sends this worker, avoiding a delay of 40 ms in each task.

    Spark's JVM uses Nagle's algorithm: data after the command waits for an acknowledgement, which Linux delays. Over
    Unix sockets (`spark.python.unix.domain.socket.enabled`) and on other systems, nothing is changed.
    """
    spark = _tcp_connections()
    while True:
        for descriptor in spark:
            with suppress(OSError), _borrowed(descriptor) as connection:  # a closed socket is reported by its reader
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # set each time, as Linux resets it
        batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _tcp_connections() -> list[int]:
    """Return the descriptors of this process's TCP connections, with Nagle's algorithm turned off.

    In a worker that is the connection to Spark.
    """
    descriptors: list[int] = []
    if not os.path.isdir(_SOCKETS):
        return descriptors
    for descriptor in map(int, os.listdir(_SOCKETS)):
        with suppress(OSError):
            if not os.readlink(f"{_SOCKETS}/{descriptor}").startswith("socket:"):
                continue
            with _borrowed(descriptor) as connection:
                if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    descriptors.append(descriptor)
    return descriptors


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Wrap a descriptor that other code opened and will close; it stays open even if an error keeps objects alive."""
    blocking = os.get_blocking(descriptor)
    connection = socket.socket(fileno=descriptor)
    try:
        # With a default timeout (`socket.setdefaulttimeout`), wrapping makes the descriptor non-blocking for all users.
        os.set_blocking(descriptor, blocking)
        yield connection
    finally:
        connection.detach()

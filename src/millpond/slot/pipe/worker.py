"""Spark's Python worker, in which pipes run: what its habits cost, and how to spare it that."""

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


def task_context() -> Any:
    """Spark's context of the task that begins, after `settle`; None outside of tasks."""
    context = TaskContext.get()
    if context:
        settle()
    return context


def batch_of(context: Any) -> int | None:
    """The id of the batch that a task works on; None if Spark does not tell, as in threads of the user's."""
    number = context.getLocalProperty("streaming.sql.batchId") if context else None
    return None if number is None else int(number)


def added_paths() -> list[str]:
    """Where Python finds what the application was given (`addPyFile`), as Spark has told this worker."""
    from pyspark.core.files import SparkFiles

    root = SparkFiles._root_directory
    return [] if root is None else [path for path in sys.path if path == root or path.startswith(f"{root}{os.sep}")]


def promptly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches that Spark sends this worker, without a pause of 40 ms in each task.

    Spark's JVM leaves Nagle's algorithm on: what it sends after the command waits for that to be acknowledged, and
    Linux puts acknowledgements off. Where the connection is not by TCP (`spark.python.unix.domain.socket.enabled`),
    or the system is another, nothing is done.
    """
    spark = _tcp_connections()
    while True:
        for descriptor in spark:
            with suppress(OSError), _borrowed(descriptor) as connection:  # one that is gone is noticed by who reads it
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # Linux forgets it after a while
        batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _tcp_connections() -> list[int]:
    """Descriptors of this process's connections by TCP, which in a worker is the one to Spark; they do not wait now."""
    found: list[int] = []
    if not os.path.isdir(_SOCKETS):
        return found
    for descriptor in map(int, os.listdir(_SOCKETS)):
        with suppress(OSError):
            if not os.readlink(f"{_SOCKETS}/{descriptor}").startswith("socket:"):
                continue
            with _borrowed(descriptor) as connection:
                if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    found.append(descriptor)
    return found


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket that somebody else has opened, and will close: also if an error keeps the task's objects alive."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()

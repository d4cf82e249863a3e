"""Buffers that move to disk when they exceed a size."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, Any


def spool_pieces(pieces: Iterable[list[Any]], limit: int) -> list[Any]:
    """Return the buffers of all pieces; more than `limit` bytes become one buffer, mapped from an unnamed file."""
    held: list[Any] = []
    size = 0
    remaining = iter(pieces)
    for piece in remaining:
        held += piece
        size += sum(memoryview(buffer).nbytes for buffer in piece)
        if size > limit:
            break
    else:
        return held
    # The kernel can drop pages of a mapped file, so they do not count against the memory budget.
    with tempfile.TemporaryFile() as file:
        file.writelines(held)
        held.clear()
        for piece in remaining:
            file.writelines(piece)
        file.flush()
        return [memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))]


def concatenate(buffers: Sequence[Any]) -> memoryview:
    """Concatenate buffers into one."""
    return memoryview(buffers[0] if len(buffers) == 1 else b"".join(buffers))


class SpooledLog:
    """A log of buffers; those beyond `limit` bytes go to an unnamed file.

    Args:
        directory: directory of the file. limit: bytes held in memory.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._held: list[Any] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, buffers: Sequence[Any]) -> None:
        """Append buffers, which must not change afterwards."""
        self._held += buffers
        self._size += sum(memoryview(buffer).nbytes for buffer in buffers)
        if self._size > self._limit:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._file.writelines(self._held)
            self._held = []
            self._size = 0

    def finish(self) -> list[Any]:
        """Return all buffers in order, and start a new log."""
        held, file = self._held, self._file
        self._held, self._size, self._file = [], 0, None
        if file is None:
            return held
        with file:
            file.writelines(held)
            file.flush()
            return [memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))]

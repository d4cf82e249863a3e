"""Buffers that leave memory when they are many."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, Any


def spooled(pieces: Iterable[list[Any]], limit: int) -> list[Any]:
    """The buffers of all pieces; those of more than `limit` bytes in all as one, mapped from a file without a name."""
    held: list[Any] = []
    size = 0
    rest = iter(pieces)
    for piece in rest:
        held += piece
        size += sum(memoryview(buffer).nbytes for buffer in piece)
        if size > limit:
            break
    else:
        return held
    with tempfile.TemporaryFile() as file:
        file.writelines(held)
        held.clear()
        for piece in rest:
            file.writelines(piece)
        file.flush()
        return [memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))]


def joined(buffers: Sequence[Any]) -> memoryview:
    """The bytes of some buffers, one after another, as one."""
    return memoryview(buffers[0] if len(buffers) == 1 else b"".join(buffers))


class Log:
    """Buffers that are added one after another; those beyond some bytes go to a file without a name.

    Args:
        directory: where the file is made. limit: bytes that are held in memory.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._held: list[Any] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, buffers: Sequence[Any]) -> None:
        """Add some buffers; they must not change any more."""
        self._held += buffers
        self._size += sum(memoryview(buffer).nbytes for buffer in buffers)
        if self._size > self._limit:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
            self._file.writelines(self._held)
            self._held = []
            self._size = 0

    def finish(self) -> list[Any]:
        """All that was added, in order; then begin anew."""
        held, file = self._held, self._file
        self._held, self._size, self._file = [], 0, None
        if file is None:
            return held
        with file:
            file.writelines(held)
            file.flush()
            return [memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))]

"""Buffers that leave memory when they are many."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from typing import Any


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

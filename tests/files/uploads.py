"""An object that is written as its bytes come, or whose writing is broken off."""

from __future__ import annotations

from millpond.files.backends.filesystem import FileSystem

PIECE = 3_000_017


def upload(files: FileSystem, name: str, data: bytes, *, broken_off: bool = False) -> None:
    """Write `data` from one buffer that is used again and again.

    Raises:
        ZeroDivisionError: it was to be broken off at its end.
    """
    buffer = bytearray(PIECE)
    with files.upload(name) as write:
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            buffer[: len(piece)] = piece
            write(memoryview(buffer)[: len(piece)])
        assert not broken_off or 1 / 0

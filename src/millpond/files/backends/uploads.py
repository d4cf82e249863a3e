"""Objects that are written as their bytes come: one request if they stay short, else parts that are sent meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from millpond.files.backends.filesystem import Buffer, Write

PART = 8 << 20
"""Bytes of a part of an object that is put in parts; what is not longer, and what must not be there yet, is one put.
Object stores take parts of 5 MiB or more, and 10,000 of them."""

SLOWEST = 1 << 20
"""Bytes a second below which a put counts as stuck."""


class Parts(Protocol):
    """An object on its way in parts."""

    def send(self, data: bytes) -> None:
        """The next part: `PART` bytes, if it is not the last. May return before it has arrived."""

    def complete(self) -> None:
        """Make the parts one object; returns when it is durable."""

    def abort(self) -> None:
        """Give up what was sent, as far as the store still answers; raises nothing of its own."""


@contextmanager
def in_parts(put: Callable[[bytes], object], begin: Callable[[], Parts]) -> Iterator[Write]:
    """Take the bytes of one object (see `FileSystem.upload`), and hold no more than a part of them.

    Args:
        put: puts an object of `PART` bytes at most. begin: begins one that is longer.
    """
    held = bytearray()
    parts: Parts | None = None

    def write(data: Buffer) -> None:
        nonlocal parts
        view = memoryview(data)
        rest = view.cast("B") if view.nbytes else view  # an empty array cannot be cast
        while len(rest) > (room := PART - len(held)):  # the last part is not empty
            if parts is None:
                parts = begin()
            parts.send(b"".join((held, rest[:room])))
            held.clear()
            rest = rest[room:]
        if rest.nbytes:
            held.extend(rest)

    try:
        yield write
        if parts is None:
            put(bytes(held))
        else:
            parts.send(bytes(held))
            parts.complete()
    except BaseException:
        if parts is not None:
            parts.abort()
        raise


def put_requests(size: int, *, create: bool = False) -> int:
    """How many requests put so many bytes: one, or the parts between a beginning and an end."""
    return 1 if create or size <= PART else -(-size // PART) + 2


def sent_requests(size: int) -> int:
    """How many of them an upload has made when so many bytes are written: the last part is still held."""
    return 0 if size <= PART else 1 + (size - 1) // PART

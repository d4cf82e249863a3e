"""Streaming uploads: one put for a small object, else a multipart upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from millpond.files.backends.filesystem import Buffer, Write

PART_BYTES = 8 << 20
"""Size of a part of a multipart upload, in bytes; objects up to this size, and puts-if-absent, are one put.

Object stores accept parts of 5 MiB or more, and up to 10,000 parts.
"""

MIN_BYTES_PER_SECOND = 1 << 20
"""Lowest throughput of a put in bytes per second; a slower put counts as stuck."""


class Parts(Protocol):
    """An open multipart upload."""

    def send(self, data: bytes) -> None:
        """Send the next part: `PART_BYTES` bytes, except for the last part. May return before the part is stored."""

    def complete(self) -> None:
        """Combine the parts into one object; returns once it is durable."""

    def abort(self) -> None:
        """Discard the parts. Best effort: failures of the store are ignored."""


@contextmanager
def upload_in_parts(put: Callable[[bytes], object], begin_multipart: Callable[[], Parts]) -> Iterator[Write]:
    """Stream one object (see `FileSystem.upload`), with at most one part in memory.

    Args:
        put: puts an object of at most `PART_BYTES` bytes.
        begin_multipart: begins a multipart upload.
    """
    held = bytearray()
    parts: Parts | None = None

    def write(data: Buffer) -> None:
        nonlocal parts
        view = memoryview(data)
        remaining = view.cast("B") if view.nbytes else view  # an empty array cannot be cast
        # A full part is kept, so that the last part is not empty.
        while len(remaining) > (room := PART_BYTES - len(held)):
            if parts is None:
                parts = begin_multipart()
            parts.send(b"".join((held, remaining[:room])))
            held.clear()
            remaining = remaining[room:]
        if remaining.nbytes:
            held.extend(remaining)

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
    """Return the number of requests to put `size` bytes: one, or the parts plus the start and the completion."""
    return 1 if create or size <= PART_BYTES else -(-size // PART_BYTES) + 2


def requests_sent(size: int) -> int:
    """Return the number of requests that an upload has sent after `size` bytes; the last part is still buffered."""
    return 0 if size <= PART_BYTES else 1 + (size - 1) // PART_BYTES

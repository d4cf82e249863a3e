"""Counter of requests to a store, by kind as object stores charge for them, and of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from millpond.files.backends.byte_ranges import coalesce_ranges
from millpond.files.backends.filesystem import Buffer, FileInfo, FileSystem, Write
from millpond.files.backends.objects import NAMES_PER_PAGE
from millpond.files.backends.uploads import put_requests, requests_sent


class CountedFiles:
    """A wrapper of the file system `inner` that counts requests. Thread-safe.

    It counts requests as `ObjectFiles` sends them: multipart uploads, coalesced ranges, pages of listings. Retries
    within the store's client are not counted.
    """

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner
        self.url = inner.url
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("puts", "put_bytes", "gets", "get_bytes", "lists", "heads", "deletes"), 0)

    def counts(self) -> dict[str, int]:
        """Return the requests so far, by kind, and the bytes put and got."""
        with self._lock:
            return self._counts.copy()

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`."""
        size = sum(memoryview(piece).nbytes for piece in data)
        self._count(puts=put_requests(size, create=create), put_bytes=size)
        self.inner.put(name, data, create=create, sync=sync)

    @contextmanager
    def upload(self, name: str) -> Iterator[Write]:
        """See `FileSystem.upload`; each part is a request."""
        size = 0

        def counted(data: Buffer) -> None:
            nonlocal size
            length = memoryview(data).nbytes
            self._count(puts=requests_sent(size + length) - requests_sent(size), put_bytes=length)
            size += length
            write(data)

        with self.inner.upload(name) as write:
            yield counted
            self._count(puts=put_requests(size) - requests_sent(size))

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        self._count(gets=1)
        data = self.inner.get(name)
        self._count(get_bytes=len(data))
        return data

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        self._count(gets=1, get_bytes=length)
        return self.inner.get_range(name, offset, length)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`."""
        sent = coalesce_ranges(ranges)
        self._count(gets=len(sent), get_bytes=sum(length for _, length in sent))
        return self.inner.get_ranges(name, ranges)

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        self._count(heads=1)
        return self.inner.size(name)

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        self._count(heads=1)
        return self.inner.exists(name)

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`."""
        self._count(lists=1)
        infos = self.inner.list(prefix, after=after)
        self._count(lists=max(0, len(infos) - 1) // NAMES_PER_PAGE)
        return infos

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""
        self._count(deletes=1)
        self.inner.delete(name)

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`."""
        return self.inner.locate(name)

    def _count(self, **more: int) -> None:
        with self._lock:
            for kind, number in more.items():
                self._counts[kind] += number

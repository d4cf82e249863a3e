"""The backend for object stores and memory: obstore, with names below a prefix and Millpond's errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, ObjectStore, from_url

from millpond.errors import MillpondError, SettingError, TransientError, UsageError
from millpond.files.backends.byte_ranges import MAX_GAP_BYTES
from millpond.files.backends.filesystem import (
    Buffer,
    FileInfo,
    MissingFileError,
    Write,
    exists_error,
    missing_error,
    truncated_error,
    views,
)
from millpond.files.backends.object_store_options import explain_environment, quote_path, store_for_create
from millpond.files.backends.retry import with_retries
from millpond.files.backends.uploads import PART_BYTES, upload_in_parts
from millpond.humanize import first_line

MAX_PARTS_IN_FLIGHT = 3
"""Parts of one object that are uploaded concurrently."""

NAMES_PER_PAGE = 1000
"""Names per page of a listing."""

MAX_PUT_BYTES = 5000 << 20
"""Largest object in bytes that stores accept in one put."""

_NAME = re.compile(r"\S*/\S*")

_memories: dict[str, MemoryStore] = {}
_memories_lock = threading.Lock()


class ObjectFiles:
    """Objects of an obstore store below a prefix.

    Args:
        store: the store.
        url: URL of the location, for messages.
        prefix: folder of the location in the store.
        reopen: returns a store handle for puts-if-absent of a size in bytes; None uses `store`.
    """

    def __init__(
        self, store: ObjectStore, url: str, prefix: str = "", reopen: Callable[[int], ObjectStore] | None = None
    ) -> None:
        self.store = store
        self.url = url.rstrip("/")
        self._prefix = prefix + "/" if prefix else ""
        self._reopen = reopen
        self._create_stores: dict[int, ObjectStore] = {}

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ObjectFiles:
        """Open a remote store by URL through obstore."""

        try:
            store = from_url(quote_path(url), **options)
            return cls(store, url, reopen=partial(store_for_create, store, url, options))
        except (exceptions.BaseError, ValueError) as error:
            raise SettingError(
                f"The location {url!r} cannot be opened: {first_line(error)}.",
                action="Use a location that is a path, or begins with file:, s3:, gs:, az: or hdfs:.",
            ) from error

    def put(self, name: str, data: Sequence[Buffer], *, create: bool = False, sync: bool = True) -> None:
        """See `FileSystem.put`; object stores acknowledge only durable objects, so `sync` has no effect."""
        with self._explain_missing_bucket(), self._errors(name):
            pieces = views(data)
            size = sum(len(piece) for piece in pieces)
            if not create and size > PART_BYTES:
                with self.upload(name) as write:
                    for piece in pieces:
                        write(piece)
                return
            body: Any = pieces[0] if len(pieces) == 1 else iter(pieces)
            if isinstance(self.store, MemoryStore):
                body = b"".join(pieces)  # the memory store would keep references to the caller's memory
            if not create:
                # By default, obstore puts an iterator as a multipart upload: three requests for the smallest object.
                obstore.put(self.store, self._prefix + name, body, use_multipart=False)
                return
            if size > MAX_PUT_BYTES:
                raise too_large_error(self.locate(name), size)
            try:
                obstore.put(self._store_for_create(size), self._prefix + name, body, mode="create")
            except exceptions.AlreadyExistsError as error:
                if self.exists(name):
                    raise
                # S3 answers 409 for concurrent requests, and obstore reports that as an existing object.
                raise conflict_error(self.locate(name)) from error

    def upload(self, name: str) -> AbstractContextManager[Write]:
        """See `FileSystem.upload`."""
        return upload_in_parts(lambda data: self.put(name, [data]), lambda: _Multipart(self, name))

    def get(self, name: str) -> bytes:
        """See `FileSystem.get`."""
        with self._errors(name):
            return bytes(obstore.get(self.store, self._prefix + name).bytes())

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `FileSystem.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """See `FileSystem.get_ranges`."""
        with self._errors(name):
            pieces = obstore.get_ranges(
                self.store,
                self._prefix + name,
                starts=[offset for offset, _ in ranges],
                lengths=[length for _, length in ranges],
                coalesce=MAX_GAP_BYTES,
            )
        for piece, (offset, length) in zip(pieces, ranges, strict=True):
            if len(piece) != length:
                raise truncated_error(self.locate(name), offset + length)
        return list(pieces)

    def size(self, name: str) -> int:
        """See `FileSystem.size`."""
        with self._errors(name):
            return obstore.head(self.store, self._prefix + name)["size"]

    def exists(self, name: str) -> bool:
        """See `FileSystem.exists`."""
        try:
            self.size(name)
        except MissingFileError:
            return False
        return True

    def list(self, prefix: str, *, after: str = "") -> list[FileInfo]:
        """See `FileSystem.list`; stores list by folder, so the last part of `prefix` is compared here."""
        folder = (self._prefix + prefix).rpartition("/")[0]
        # The offset is exclusive, but an object named exactly like the prefix belongs to the result: start one
        # character earlier.
        offset = self._prefix + (after if after >= prefix else prefix[:-1])
        cut = len(self._prefix)

        def list_all() -> list[FileInfo]:
            with self._explain_missing_bucket(), self._errors(prefix):
                return [
                    FileInfo(meta["path"][cut:], meta["size"], meta["last_modified"].timestamp())
                    for chunk in obstore.list(self.store, folder or None, offset=offset or None)
                    for meta in chunk
                ]

        # obstore retries most requests for minutes. It does not retry a list or a start of an upload whose answer
        # breaks off, nor a delete whose connection breaks off.
        infos = with_retries(list_all)
        return sorted(info for info in infos if info.name.startswith(prefix) and info.name > after)

    def delete(self, name: str) -> None:
        """See `FileSystem.delete`."""

        def delete() -> None:
            with suppress(MissingFileError), self._errors(name):
                obstore.delete(self.store, self._prefix + name)

        with_retries(delete)

    def locate(self, name: str) -> str:
        """See `FileSystem.locate`."""
        return f"{self.url}/{name}"

    def _store_for_create(self, size: int) -> ObjectStore:
        """Return the store handle for a put-if-absent of `size` bytes."""
        if self._reopen is None:
            return self.store
        size = max(PART_BYTES, 1 << (size - 1).bit_length())  # rounded up to a power of two: a few handles are enough
        if size not in self._create_stores:
            self._create_stores[size] = self._reopen(size)
        return self._create_stores[size]

    @contextmanager
    def _explain_missing_bucket(self) -> Iterator[None]:
        """Report a missing bucket; for requests that do not refer to an existing object."""
        try:
            yield
        except MissingFileError as error:
            raise SettingError(
                "The store has no such bucket or container.",
                action="Make it, or use a location in one that is there.",
                file=self.url,
            ) from error

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            with explain_environment(self.locate(name)):
                yield
        except FileNotFoundError as error:
            raise missing_error(self.locate(name)) from error
        except exceptions.AlreadyExistsError as error:
            raise exists_error(self.locate(name)) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise SettingError(
                f"The store refuses access: {first_line(error)}.",
                action=f"Check the credentials that Spark's processes have, and their rights on {self.url}.",
                file=self.locate(name),
            ) from error
        except (exceptions.NotSupportedError, NotImplementedError) as error:
            raise SettingError(
                f"The store cannot do what state needs: {first_line(error)}.",
                action="Use a location that begins with file:, s3:, gs: or az:, and leave conditional puts on.",
                file=self.locate(name),
            ) from error
        except (exceptions.BaseError, OSError) as error:
            if "404 Not Found" in first_line(error):  # a list has no error class for this
                raise missing_error(self.locate(name)) from error
            # Messages name the object, and its name may hold the word too.
            if "range" in _NAME.sub("", first_line(error)).lower():
                raise truncated_error(self.locate(name)) from error
            raise TransientError(
                f"The store failed: {first_line(error)}.",
                action=f"Try again; if it goes on, see whether {self.url} can be reached, and with which credentials.",
                file=self.locate(name),
            ) from error


class _Multipart:
    """A multipart upload to an object store (see `Parts`)."""

    def __init__(self, files: ObjectFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._size = 0
        self._open()

    def _open(self) -> None:
        path = self._files._prefix + self._name
        self._writer = obstore.open_writer(
            self._files.store, path, buffer_size=PART_BYTES, max_concurrency=MAX_PARTS_IN_FLIGHT
        )

    def send(self, data: bytes) -> None:
        """See `Parts.send`."""

        def begin() -> None:
            self._open()
            self._write(data)  # does not wait for the part, so a failure is that of the start

        if self._size:
            self._write(data)
        else:
            with_retries(begin)
        self._size += len(data)

    def _write(self, data: bytes) -> None:
        with self._files._explain_missing_bucket(), self._files._errors(self._name):
            self._writer.write(data)

    def complete(self) -> None:
        """See `Parts.complete`."""
        try:
            with self._files._errors(self._name):
                self._writer.close()  # on failure, it aborts the upload
        except MillpondError as error:
            if self._is_complete():
                return  # the answer was lost, and the client's next try found no open upload
            if isinstance(error, MissingFileError):
                raise TransientError(
                    "The store has dropped the parts of an upload.", action="Try again.", file=error.file
                ) from error
            raise

    def _is_complete(self) -> bool:
        try:
            return self._files.size(self._name) == self._size
        except MillpondError:
            return False

    def abort(self) -> None:
        """See `Parts.abort`."""
        with suppress(exceptions.BaseError, OSError):  # the writer may be closed, with nothing to abort
            self._writer.__exit__(RuntimeError, RuntimeError("given up"), None)


def memory_files(name: str) -> ObjectFiles:
    """Open the in-memory location `name`: its first path segment names the store, the rest is a folder in it."""
    bucket, _, prefix = name.partition("/")
    with _memories_lock:
        store = _memories.setdefault(bucket, MemoryStore())
    return ObjectFiles(store, f"memory:{name}", prefix)


def conflict_error(url: str) -> TransientError:
    """Return the error for a put-if-absent that met a concurrent request for the name and wrote nothing (S3's 409)."""
    return TransientError("The store was busy with another request for this name.", action="Try again.", file=url)


def too_large_error(url: str, size: int) -> UsageError:
    """Return the error for an object that must be one put and is larger than stores accept."""
    return UsageError(
        f"An object of {size:,} bytes is to be put at once, and object stores take {MAX_PUT_BYTES:,}.",
        action="Give the query more partitions (spark.millpond.partitions), or let its batches read less.",
        file=url,
    )

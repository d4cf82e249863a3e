"""Writing and reading the files of the append stores, in the state location or on the local disk."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import MillpondError, StateDamagedError
from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.retry import with_retries
from millpond.files.formats.append_file import (
    AppendFile,
    AppendFileWriter,
    ByteRange,
    MappedBytes,
    RemoteBytes,
    Section,
    open_files,
)
from millpond.files.formats.codec import damaged_error
from millpond.files.refs import RunRef, range_of
from millpond.files.tiers.append_copies import CachedBytes
from millpond.files.tiers.local_copies import CopyWriter, LocalCache
from millpond.layout import RowLayout, Rows

FOLDER = "files/"
"""Folder of append files below the state location; the same as that of runs."""

_BUFFER_BYTES = 1 << 20  # of writes to local files
_MAX_PARTS_IN_FLIGHT = 8  # parts read ahead, each of a few blocks
_COPY_PIECE_BYTES = 4 << 20  # bytes of a request while a remote file is copied
_log = logging.getLogger(__name__)


class AppendFiles:
    """Writes append files to the state location, and opens them. Thread-safe.

    In a location on a local disk, files are uncompressed and read in place. Anywhere else they are compressed; the copy
    policy decides which get a local copy. Unlike a run, a file is not copied when it is opened: a window's rows are
    read once, as a rule, when it closes.

    Args:
        files: the state location. local: a directory on a local disk.
        copies: cache of local copies; without it, no copies are made.
        threads: concurrent requests to the state location, at most.
        prefix: prefix of the names of new files.

    Attributes:
        remote_blocks: blocks read from remote storage so far.
    """

    def __init__(
        self,
        files: FileSystem,
        local: str,
        *,
        copies: LocalCache | None = None,
        threads: int = 8,
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self._files = files
        self._in_place = files if isinstance(files, LocalFiles) else None
        self._local = local
        self._copies = copies
        self.remote_blocks = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._copying: set[str] = set()
        # The buffers of mapped objects, by device and inode. The deltas of many tables lie in one commit and share its
        # mapping. A file that is restored from a copy keeps its name but not its inode, so it is mapped again.
        self._mapped: WeakValueDictionary[tuple[int, int], pa.Buffer] = WeakValueDictionary()
        self._copier = ThreadPoolExecutor(1, "millpond-append-copy")
        # Reads wait for their requests, so the two have threads of their own: with one pool they could deadlock.
        self._requests = ThreadPoolExecutor(threads, "millpond-append")
        self._readers = ThreadPoolExecutor(threads, "millpond-append-read")

    def write(
        self, fill: Callable[[AppendFileWriter], object], layouts: Sequence[RowLayout], rows: int
    ) -> tuple[RunRef, AppendFile]:
        """Write a file durably, and open it.

        Args:
            fill: writes the sections. layouts: one for each section (see `AppendFile`).
            rows: number of rows that the reference records.

        Raises:
            TransientError: the store failed; the caller has to fill the file again.
        """
        if self._in_place is not None:
            return self.stage(fill, layouts, rows).publish()
        name = self._new_name()
        staged = self._copies.staging_path(name) if self._copies is not None and self._copies.limit else None
        try:
            with self._files.upload(name) as write, ExitStack() as stack:
                # One pass writes both the remote file and its local copy.
                targets = [write]
                if self._copies is not None and staged is not None:
                    targets.append(stack.enter_context(CopyWriter(staged, self._copies.limit)).write)
                writer = AppendFileWriter(lambda data: [target(data) for target in targets], compress=True)
                fill(writer)
                writer.finish()
        except BaseException:
            if staged is not None and os.path.exists(staged):
                os.unlink(staged)
            raise
        ref = RunRef(name, rows, writer.bytes, 0, 0)
        if self._copies is not None and staged is not None and os.path.exists(staged):
            self._copies.admit(name, staged, written=True)
        return ref, self.open(ref, layouts)

    def _new_name(self) -> str:
        return f"{FOLDER}{self._prefix}{uuid.uuid4().hex}.append"

    def stage(self, fill: Callable[[AppendFileWriter], object], layouts: Sequence[RowLayout], rows: int) -> Staged:
        """Write a file to the local disk, readable at once; `Staged.publish` makes it durable."""
        name = self._new_name()
        if self._in_place is None:
            data = self.spool(fill)
            file = AppendFile(MappedBytes(data, name), layouts)
            return Staged(file, lambda: self._upload(name, data, layouts, rows))
        with self._in_place.staged(name) as path:
            with open(path, "wb", buffering=_BUFFER_BYTES) as raw:
                writer = AppendFileWriter(raw.write, compress=False)
                fill(writer)
                writer.finish()
            file = AppendFile(MappedBytes.of_file(path), layouts)
        return Staged(file, lambda: self._publish(name, path, file, rows))

    def _publish(self, name: str, path: str, file: AppendFile, rows: int) -> tuple[RunRef, AppendFile]:
        assert self._in_place is not None
        self._in_place.publish(path, name)
        file.data.place = self._in_place.path_of(name)
        return RunRef(name, rows, file.data.size, 0, 0), file

    def _upload(
        self, name: str, data: memoryview, layouts: Sequence[RowLayout], rows: int
    ) -> tuple[RunRef, AppendFile]:
        # The bytes lie on the local disk, so the PUT can be repeated here; a file written by `write` cannot.
        with_retries(lambda: self._files.put(name, [data]))
        self._copy(name, len(data), [data], written=True)
        ref = RunRef(name, rows, len(data), 0, 0)
        return ref, self.open(ref, layouts)

    def _copy(self, name: str, size: int, pieces: Iterable[Buffer], *, written: bool) -> MappedBytes | None:
        """Make a local copy of a file.

        Returns None if it has no room, the disk fails, or it is not wanted any more: the copy is best effort.
        """
        if self._copies is None or size > self._copies.limit:
            return None
        staged = self._copies.staging_path(name)
        try:
            with open(staged, "wb", buffering=_BUFFER_BYTES) as copy:
                for piece in pieces:
                    copy.write(piece)
            mapped = MappedBytes.of_file(staged)  # before eviction may delete the file
            return mapped if self._copies.admit(name, staged, written=written) else None
        except (MillpondError, OSError) as error:
            _log.debug("no local copy of %s: %s", name, error)
            with suppress(OSError):
                os.unlink(staged)
            return None

    def _on_remote_read(self, data: CachedBytes, blocks: int) -> None:
        """Count a remote read, and copy the file in the background if the copy policy wants it."""
        assert self._copies is not None
        with self._lock:
            self.remote_blocks += blocks
            if data.name in self._copying or not self._copies.should_copy(data.name, data.size):
                return
            self._copying.add(data.name)

        def pieces() -> Iterator[Buffer]:
            for offset in range(0, data.size, _COPY_PIECE_BYTES):
                if self._closed.is_set() or data.forgotten:
                    raise InterruptedError("nothing will read the copy")  # `_copy` removes what it has written
                yield from data.remote_bytes.get([(offset, min(_COPY_PIECE_BYTES, data.size - offset))])

        def copy() -> None:
            try:
                mapped = self._copy(data.name, data.size, pieces(), written=False)
                if mapped is not None:
                    data.adopt(mapped)
                if data.forgotten and self._copies is not None:  # `drop_copy` may have run before the copy existed
                    self._copies.drop(data.name)
            finally:
                with self._lock:
                    self._copying.discard(data.name)

        try:
            self._copier.submit(copy)
        except RuntimeError:  # closed
            with self._lock:
                self._copying.discard(data.name)

    def spool(self, fill: Callable[[AppendFileWriter], object]) -> memoryview:
        """Write an unnamed file to the local disk, and map it; its disk space is freed with the last view."""
        with tempfile.TemporaryFile(dir=self._local, buffering=_BUFFER_BYTES) as raw:
            writer = AppendFileWriter(raw.write, compress=True)
            fill(writer)
            writer.finish()
            raw.flush()
            return memoryview(mmap.mmap(raw.fileno(), 0, prot=mmap.PROT_READ))

    def spool_bytes(self, data: Buffer) -> memoryview:
        """Move bytes from memory to an unnamed file on the local disk (see `spool`)."""
        with tempfile.TemporaryFile(dir=self._local, buffering=0) as raw:
            raw.write(data)
            return memoryview(mmap.mmap(raw.fileno(), 0, prot=mmap.PROT_READ))

    def open(self, ref: RunRef, layouts: Sequence[RowLayout]) -> AppendFile:
        """Open a file; only its directory is read.

        Raises:
            StateDamagedError: the file is missing, truncated or altered.
            StateIncompatibleError: its rows have another layout, or its format is newer.
        """
        if self._in_place is not None:
            place = self._in_place.path_of(ref.name)
            # Checked before mapping: a page beyond the end of a shortened file would kill the process (SIGBUS).
            if self._in_place.size(ref.name) != ref.bytes:
                raise damaged_error(place, "it does not have the length that it was written with")
            return AppendFile(MappedBytes.of_file(place), layouts, range_of(ref.visible))
        remote = RemoteBytes(self._files, ByteRange(ref.name, 0, ref.bytes), self._requests)
        if self._copies is None:
            return AppendFile(remote, layouts, range_of(ref.visible))
        data = CachedBytes(ref.name, remote, self._copies, self._map_copy(ref), self._on_remote_read)
        try:
            return AppendFile(data, layouts, range_of(ref.visible))
        except StateDamagedError:
            # The local copy may be the damaged one: open the file in the state location instead.
            if not data.report_damage():
                raise
            return AppendFile(data, layouts, range_of(ref.visible))

    def _map_copy(self, ref: RunRef) -> MappedBytes | None:
        assert self._copies is not None
        if not self._copies.has(ref.name):
            return None
        try:
            mapped = MappedBytes.of_file(self._copies.path_of(ref.name))
        except (StateDamagedError, OSError):
            mapped = None
        # A bad copy is dropped without an error: the file in the state location is the one that counts.
        if mapped is None or mapped.size != ref.bytes:
            self._copies.drop(ref.name)
            return None
        return mapped

    def open_range(self, at: ByteRange, layouts: Sequence[RowLayout]) -> list[AppendFile]:
        """Open files that lie back to back within another object (see `open`)."""
        visible = range_of(at.visible)
        if self._in_place is None:
            return open_files(RemoteBytes(self._files, at, self._requests), layouts, visible)
        if self._in_place.size(at.name) < at.offset + at.length:
            raise damaged_error(self._files.locate(at.name), "it is shorter than it was written")
        path = self._in_place.path_of(at.name)
        status = os.stat(path)
        key = status.st_dev, status.st_ino
        with self._lock:
            shared = self._mapped.get(key)
            whole = MappedBytes.of_file(path) if shared is None else MappedBytes(shared, path)
            self._mapped[key] = whole.view.obj  # the buffer, which every view of the mapping keeps alive
        return open_files(whole.part(at.offset, at.length), layouts, visible)

    def read_ahead(self, parts: Iterable[SectionBlocks]) -> Iterator[list[Rows]]:
        """Yield the rows of file parts in order, reading the next parts ahead."""
        remaining = iter(parts)
        ahead: deque[tuple[SectionBlocks, Future[list[Rows]] | None]] = deque()
        done = False
        while True:
            while not done and len(ahead) < _MAX_PARTS_IN_FLIGHT:
                part = next(remaining, None)
                if part is None:
                    done = True
                elif part.file.data.remote:
                    ahead.append((part, self._readers.submit(part.read)))
                else:
                    part.file.data.prefetch(part.file.ranges(part.section, part.blocks))
                    ahead.append((part, None))
            if not ahead:
                return
            part, future = ahead.popleft()
            yield part.read() if future is None else future.result()

    def drop_copy(self, ref: RunRef, file: AppendFile) -> None:
        """Drop the local copy of a file; the file stays in the state location."""
        if isinstance(file.data, CachedBytes):
            file.data.forgotten = True
        if self._copies is not None:
            self._copies.drop(ref.name)

    def close(self) -> None:
        """End the threads, and abandon a copy that is being made; open files must not be used afterwards."""
        self._closed.set()
        self._copier.shutdown(wait=True, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._requests.shutdown(wait=True, cancel_futures=True)


class SectionBlocks(NamedTuple):
    """Blocks of one section of a file, by ascending number."""

    file: AppendFile
    section: Section
    blocks: NDArray[np.int64]

    def read(self) -> list[Rows]:
        """Read the rows of the blocks."""
        return self.file.read(self.section, self.blocks)


class Staged:
    """A file that is written but not yet durable."""

    def __init__(self, file: AppendFile, publish: Callable[[], tuple[RunRef, AppendFile]]) -> None:
        self.file = file
        self.publish = publish

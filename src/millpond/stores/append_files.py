"""Where append files are written to and read from."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millpond.files.backends.filesystem import Buffer, FileSystem
from millpond.files.backends.local import LocalFiles
from millpond.files.backends.patience import patiently
from millpond.files.formats.append_file import (
    AppendFile,
    AppendFileWriter,
    ByteRange,
    MappedBytes,
    RemoteBytes,
    Section,
    open_files,
)
from millpond.files.formats.codec import damaged
from millpond.files.refs import RunRef, range_of
from millpond.layout import RowLayout, Rows

FOLDER = "files/"
"""Folder of append files below the state location; the same as that of runs."""

_BUFFER = 1 << 20
_AHEAD = 8


class AppendFiles:
    """Writes append files to the state location, and opens them. Thread-safe.

    In a location on a local disk, files are raw and used where they lie. Anywhere else they are compressed; what this
    process wrote it keeps a copy of, in a local file without a name, as far as there is room.

    Args:
        files: the state location. local: a directory on a local disk.
        disk: bytes of local copies, at most.
        threads: requests to the state location at a time.
        prefix: what names of new files begin with.
    """

    def __init__(self, files: FileSystem, local: str, *, disk: int = 0, threads: int = 8, prefix: str = "") -> None:
        self._prefix = prefix
        self._files = files
        self._in_place = files if isinstance(files, LocalFiles) else None
        self._local = local
        self._free = disk
        self._lock = threading.Lock()
        self._requests = ThreadPoolExecutor(threads, "millpond-append")
        self._readers = ThreadPoolExecutor(threads, "millpond-append-read")

    def write(
        self, fill: Callable[[AppendFileWriter], object], layouts: Sequence[RowLayout], rows: int
    ) -> tuple[RunRef, AppendFile]:
        """Write a file, durably, and open it.

        Args:
            fill: writes the sections. layouts: of the sections (see `AppendFile`).
            rows: how many the reference should say there are.
        """
        return self.stage(fill, layouts, rows).publish()

    def stage(self, fill: Callable[[AppendFileWriter], object], layouts: Sequence[RowLayout], rows: int) -> Staged:
        """Write a file on the local disk, from where it can be read at once; `Staged.publish` makes it durable."""
        name = f"{FOLDER}{self._prefix}{uuid.uuid4().hex}.append"
        if self._in_place is None:
            data = self.spool(fill)
            file = AppendFile(MappedBytes(data, name), layouts)
            return Staged(file, lambda: self._put(name, data, file, layouts, rows))
        path = self._in_place.staging()
        try:
            with open(path, "wb", buffering=_BUFFER) as raw:
                writer = AppendFileWriter(raw.write, compress=False)
                fill(writer)
                writer.finish()
            file = AppendFile(MappedBytes.of_file(path), layouts)
        except BaseException:
            if os.path.exists(path):
                os.unlink(path)
            raise
        return Staged(file, lambda: self._publish(name, path, file, rows))

    def _publish(self, name: str, path: str, file: AppendFile, rows: int) -> tuple[RunRef, AppendFile]:
        assert self._in_place is not None
        self._in_place.publish(path, name)
        file.data.place = self._in_place.place(name)
        return RunRef(name, rows, file.data.size, 0, 0), file

    def _put(
        self, name: str, data: memoryview, file: AppendFile, layouts: Sequence[RowLayout], rows: int
    ) -> tuple[RunRef, AppendFile]:
        patiently(lambda: self._files.put(name, [data]))
        ref = RunRef(name, rows, len(data), 0, 0)
        with self._lock:
            kept = len(data) <= self._free
            self._free -= len(data) if kept else 0
        return ref, file if kept else self.open(ref, layouts)

    def spool(self, fill: Callable[[AppendFileWriter], object]) -> memoryview:
        """Write a file without a name on the local disk, and map it; its space goes with the last view."""
        with tempfile.TemporaryFile(dir=self._local, buffering=_BUFFER) as raw:
            writer = AppendFileWriter(raw.write, compress=True)
            fill(writer)
            writer.finish()
            raw.flush()
            return memoryview(mmap.mmap(raw.fileno(), 0, prot=mmap.PROT_READ))

    def put_aside(self, data: Buffer) -> memoryview:
        """Move bytes from memory into a file without a name on the local disk (see `spool`)."""
        with tempfile.TemporaryFile(dir=self._local, buffering=0) as raw:
            raw.write(data)
            return memoryview(mmap.mmap(raw.fileno(), 0, prot=mmap.PROT_READ))

    def open(self, ref: RunRef, layouts: Sequence[RowLayout]) -> AppendFile:
        """Open a file, reading its directory only.

        Raises:
            StateDamagedError: the file is missing, cut short or altered.
            StateIncompatibleError: its rows are of another layout, or its format is newer.
        """
        if self._in_place is not None:
            place = self._in_place.place(ref.name)
            if self._in_place.size(ref.name) != ref.bytes:
                raise damaged(place, "it does not have the length that it was written with")
            return AppendFile(MappedBytes.of_file(place), layouts, range_of(ref.window))
        data = RemoteBytes(self._files, ByteRange(ref.name, 0, ref.bytes), self._requests)
        return AppendFile(data, layouts, range_of(ref.window))

    def open_range(self, at: ByteRange, layouts: Sequence[RowLayout]) -> list[AppendFile]:
        """Open files that lie one after another within another object (see `open`)."""
        window = range_of(at.window)
        if self._in_place is None:
            return open_files(RemoteBytes(self._files, at, self._requests), layouts, window)
        if self._in_place.size(at.name) < at.offset + at.length:
            raise damaged(self._files.locate(at.name), "it is shorter than it was written")
        whole = MappedBytes.of_file(self._in_place.place(at.name))
        return open_files(whole.part(at.offset, at.length), layouts, window)

    def read_ahead(self, parts: Iterable[Part]) -> Iterator[list[Rows]]:
        """The rows of some parts of files, in order, while the next ones are on their way."""
        rest = iter(parts)
        ahead: deque[tuple[Part, Future[list[Rows]] | None]] = deque()
        done = False
        while True:
            while not done and len(ahead) < _AHEAD:
                part = next(rest, None)
                if part is None:
                    done = True
                elif isinstance(part.file.data, RemoteBytes):
                    ahead.append((part, self._readers.submit(part.read)))
                else:
                    part.file.data.expect(part.file.ranges(part.section, part.blocks))
                    ahead.append((part, None))
            if not ahead:
                return
            part, future = ahead.popleft()
            yield part.read() if future is None else future.result()

    def forget(self, ref: RunRef, file: AppendFile) -> None:
        """Give up what is kept of a file; it stays in the state location."""
        if self._in_place is None and isinstance(file.data, MappedBytes):
            with self._lock:
                self._free += ref.bytes

    def close(self) -> None:
        """End the threads; files that are open must not be used any more."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._requests.shutdown(wait=True, cancel_futures=True)


class Part(NamedTuple):
    """Some blocks (ascending numbers) of a section of a file."""

    file: AppendFile
    section: Section
    blocks: NDArray[np.int64]

    def read(self) -> list[Rows]:
        """Their rows."""
        return self.file.read(self.section, self.blocks)


class Staged:
    """A file that is written and not durable yet."""

    def __init__(self, file: AppendFile, publish: Callable[[], tuple[RunRef, AppendFile]]) -> None:
        self.file = file
        self.publish = publish

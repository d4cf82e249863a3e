"""Run files with a raw copy on the local disk if there is room: mapped if copied, else read from the remote store."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray

from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import Buffer
from millpond.files.formats.blocks import BlockSource, BlockTable, FilterPart, Numbers, Part, split_into_parts
from millpond.files.refs import RunRef
from millpond.files.tiers.mapped import PART_BLOCKS, MappedSource
from millpond.files.tiers.policy import CachePolicy, HistoryPolicy
from millpond.files.tiers.remote import RemoteSource
from millpond.layout import RowLayout

_log = logging.getLogger(__name__)

T = TypeVar("T")
_BUFFER = 1 << 20
_STALE_SECONDS = 3600.0  # seconds after which a temporary file counts as left by a dead process


class LocalCache:
    """A directory of local copies: raw ones of run files, identical ones of append files. Thread-safe.

    Copies of an earlier process are reused. If the directory is lost, only time is lost.

    Args:
        path: the directory.
        limit: largest size of all copies in bytes.
        policy: admission and eviction; by default a `HistoryPolicy`.
        renew: called before a copy is made. If the directory was deleted, it creates another and returns its path; else
            it returns None. By default it creates the same directory again.

    Attributes:
        blocks: blocks and filters that were read from copies so far.
        copied: bytes of copies so far for which remote files were read; copies of newly written files do not count.
    """

    def __init__(
        self,
        path: str,
        limit: int,
        policy: CachePolicy | None = None,
        renew: Callable[[], str | None] | None = None,
    ) -> None:
        self.path = path
        self.limit = limit
        self.blocks = 0
        self.copied = 0
        self._lock = threading.Lock()
        self._policy = policy if policy is not None else HistoryPolicy(limit)
        self._users: dict[str, list[Callable[[], None]]] = {}
        self._renew = renew if renew is not None else self._recreate
        os.makedirs(path, exist_ok=True)
        self._register_existing()

    def _register_existing(self) -> None:
        """Register the copies in the directory, oldest first, and delete stale temporary files."""
        copies = []
        for entry in os.scandir(self.path):
            try:
                status = entry.stat()
            except FileNotFoundError:  # an earlier process that used the directory is just ending
                continue
            if entry.name.endswith((".run", ".append")):
                copies.append((status.st_mtime, entry.name, status.st_size))
            elif entry.name.endswith(".tmp") and status.st_mtime < time.time() - _STALE_SECONDS:
                _unlink(entry.path)
        for _, name, size in sorted(copies):
            victims = self._policy.admit(name, size, written=True)
            for victim in [name] if victims is None else victims:
                _unlink(self.path_of(victim))

    def _recreate(self) -> str | None:
        if os.path.isdir(self.path):
            return None
        os.makedirs(self.path, exist_ok=True)
        return self.path

    def _switch_directory(self) -> None:
        """Switch to another directory if this one was deleted; all previous copies become invalid."""
        with self._lock:
            try:
                path = self._renew()
                if path is None:
                    return
                old_path, self.path = self.path, path
                self._policy.clear()
                self._register_existing()
            except OSError as error:  # without a working disk, files are read remotely
                _log.debug("no local copies in %s: %s", self.path, error)
                return
            users = [user for callbacks in self._users.values() for user in callbacks]
            self._users.clear()
        _log.warning("the local copies in %s are gone: files are copied again, to %s, as they are read", old_path, path)
        for user in users:
            user()

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        with self._lock:
            return self._policy.bytes

    def path_of(self, name: str) -> str:
        """Return the path of a file's copy, whether it exists or not."""
        return os.path.join(self.path, os.path.basename(name))

    def staging_path(self, name: str) -> str:
        """Return the temporary path at which this thread writes the copy of a file."""
        self._switch_directory()
        return f"{self.path_of(name)}.{os.getpid()}.{threading.get_ident()}.tmp"

    def has(self, name: str) -> bool:
        """Return whether a file has a copy, and mark the copy as most recently used."""
        with self._lock:
            return self._policy.touch(os.path.basename(name))

    def read(self, name: str, lengths: float, blocks: int = 0) -> None:
        """Record a read of a file.

        Args:
            name: name of the file.
            lengths: bytes read, as a multiple of the file's length.
            blocks: blocks that were read from the copy.
        """
        with self._lock:
            self.blocks += blocks
            self._policy.read(os.path.basename(name), lengths)

    def should_copy_on_open(self, name: str, size: int) -> bool:
        """See `CachePolicy.should_copy_on_open`."""
        with self._lock:
            return self._policy.should_copy_on_open(os.path.basename(name), size)

    def should_copy(self, name: str, size: int) -> bool:
        """See `CachePolicy.should_copy`."""
        with self._lock:
            return self._policy.should_copy(os.path.basename(name), size)

    def admit(self, name: str, staged: str, *, written: bool) -> bool:
        """Admit a complete copy if the policy says so; else delete it.

        Args:
            name: name of the file.
            staged: path of the complete copy.
            written: whether the file was just written by this process.

        Returns:
            Whether the copy was admitted.
        """
        key = os.path.basename(name)
        try:
            size = os.stat(staged).st_size
        except OSError:  # another process has emptied the folder
            return False
        with self._lock:
            victims = self._policy.admit(key, size, written=written)
            taken = victims is not None and self._move_into_place(staged, key)
            self.copied += size if taken and not written else 0
            # Callbacks run after the lock is released: they may use this cache.
            users = [user for victim in victims or () for user in self._users.pop(victim, ())]
        for user in users:
            user()
        for victim in victims or ():
            _unlink(self.path_of(victim))
        if not taken:
            _unlink(staged)
        return taken

    def _move_into_place(self, staged: str, key: str) -> bool:
        try:
            os.replace(staged, self.path_of(key))
        except OSError:
            self._policy.remove(key)
            return False
        return True

    def subscribe(self, name: str, on_evicted: Callable[[], None]) -> bool:
        """Register a callback for the eviction of a file's copy; return False if the copy does not exist."""
        key = os.path.basename(name)
        with self._lock:
            if exists := self._policy.touch(key):
                self._users.setdefault(key, []).append(on_evicted)
            return exists

    def unsubscribe(self, name: str, on_evicted: Callable[[], None]) -> None:
        """Unregister a callback of `subscribe`."""
        key = os.path.basename(name)
        with self._lock:
            users = [user for user in self._users.pop(key, ()) if user != on_evicted]
            if users:
                self._users[key] = users

    def drop(self, name: str) -> None:
        """Delete the copy of a file, if there is one. Mappings of it stay valid."""
        key = os.path.basename(name)
        with self._lock:
            self._policy.remove(key)
            self._users.pop(key, None)
        _unlink(self.path_of(name))


class CopyWriter:
    """A local copy that is written while its file is written; discarded if it gets too long or the disk fails."""

    def __init__(self, path: str, most: int) -> None:
        self._path = path
        self._bytes_left = most
        self._file: IO[bytes] | None = None
        try:
            self._file = open(path, "wb", buffering=_BUFFER)  # noqa: SIM115
        except OSError:
            self._bytes_left = -1

    def write(self, data: Buffer) -> None:
        """Write some bytes, unless the copy was given up."""
        self._bytes_left -= memoryview(data).nbytes
        if self._bytes_left >= 0 and self._file is not None:
            try:
                self._file.write(data)
            except OSError:
                self._bytes_left = -1

    def __enter__(self) -> CopyWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError:
            self._bytes_left = -1
        if self._bytes_left < 0:
            _unlink(self._path)


class CachedSource:
    """The blocks of a run file, from its local copy while there is one.

    If a local copy is damaged, it is deleted, and the file in the state location is read instead.

    Args:
        ref: the file.
        layout: layout of its rows.
        open_remote: opens the file in the state location.
        cache: the cache of local copies.
        mapped: the local copy, if there is one.
        copy: called after remote reads; may make a local copy in the background if that pays, and `adopt` it.

    Attributes:
        copying: lock held while a local copy is made.
        closed: whether the source is closed.
    """

    def __init__(
        self,
        ref: RunRef,
        layout: RowLayout,
        open_remote: Callable[[], RemoteSource],
        cache: LocalCache,
        mapped: MappedSource | None,
        copy: Callable[[CachedSource], None] | None = None,
    ) -> None:
        self.ref = ref
        self.layout = layout
        self._open_remote = open_remote
        self._cache = cache
        self._lock = threading.Lock()
        self.copying = threading.Lock()
        self.closed = False
        self._remote: RemoteSource | None = None
        self._mapped = mapped
        self._copy = copy
        if mapped is not None and not cache.subscribe(ref.name, self._on_evicted):
            self._mapped = None
        self.index = mapped.index if mapped is not None else self.remote().index

    @property
    def mapped(self) -> bool:
        """Whether a local copy is in use."""
        return self._mapped is not None

    @property
    def resident(self) -> bool:
        """See `BlockSource.resident`."""
        mapped = self._mapped
        return mapped is not None and mapped.resident

    @property
    def may_read_disk(self) -> bool:
        """See `BlockSource.may_read_disk`."""
        return self._mapped is not None

    @property
    def memory(self) -> int:
        """See `BlockSource.memory`."""
        return sum(a.nbytes for a in (self.index.fence, self.index.starts, self.index.lines)) * 2

    def remote(self) -> RemoteSource:
        """Return the source of the file in the state location; opened on first use."""
        with self._lock:
            if self._remote is None:
                self._remote = self._open_remote()
            return self._remote

    def adopt(self, mapped: MappedSource) -> None:
        """Use a local copy from now on, unless it was evicted meanwhile.

        Raises:
            ValueError: the copy belongs to another file.
        """
        if not np.array_equal(mapped.index.fence, self.index.fence):
            raise ValueError("the local copy is not of this file")
        if not self._cache.subscribe(self.ref.name, self._on_evicted):
            return
        self._mapped = mapped
        with self._lock:
            if self._remote is not None:
                self._remote.close()

    def blocks(self, requested: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        mapped = self._mapped
        if mapped is not None:
            count = _distinct(requested)
            self._cache.read(self.ref.name, count / max(1, self.index.count), count)
        return self._read_or_fall_back(lambda source: source.blocks(requested))

    def begin_scan(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.begin_scan`."""
        mapped = self._mapped
        if mapped is not None:
            self._cache.read(self.ref.name, (end - begin) / max(1, self.index.count), end - begin)
            return lambda: self._read_or_fall_back(lambda source: source.begin_scan(begin, end)())
        remote = self.remote()
        before = remote.fetched
        bring = remote.begin_scan(begin, end)

        def bring_and_record() -> BlockTable:
            table = bring()
            self._record_remote_read(remote, before)
            return table

        return bring_and_record

    def parts(self, requested: NDArray[np.int64], keep_with_previous: NDArray[np.bool_]) -> Iterator[Part]:
        """See `BlockSource.parts`."""
        if self._mapped is not None:
            return split_into_parts(self.blocks, requested, keep_with_previous, PART_BLOCKS)
        remote = self.remote()
        before = remote.fetched
        return self._recorded(remote.parts(requested, keep_with_previous), remote, before)

    def _recorded(self, parts: Iterator[Part], remote: RemoteSource, before: int) -> Iterator[Part]:
        yield from parts
        self._record_remote_read(remote, before)

    def filters(self, requested: Numbers) -> Iterator[FilterPart]:
        """See `BlockSource.filters`."""
        mapped = self._mapped
        if mapped is not None:  # length 0: few and small, filters would stay in the cache, so a copy saves little
            self._cache.read(self.ref.name, 0.0, _distinct(requested // mapped.group))
        return self._read_or_fall_back(lambda source: source.filters(requested))

    def prefetch_rows(self, places: NDArray[np.uint64]) -> None:
        """See `BlockSource.prefetch_rows`."""
        mapped = self._mapped
        if mapped is not None:
            mapped.prefetch_rows(places)

    def prefetch_blocks(self, begin: int, end: int) -> None:
        """See `BlockSource.prefetch_blocks`."""
        mapped = self._mapped
        if mapped is not None:
            mapped.prefetch_blocks(begin, end)

    def _read_or_fall_back(self, read: Callable[[BlockSource], T]) -> T:
        """Run a read on the local copy; if that is damaged, delete it and read the remote file."""
        mapped = self._mapped
        if mapped is not None:
            try:
                return read(mapped)
            except StateDamagedError:
                self._on_evicted()
                self._cache.drop(self.ref.name)
        remote = self.remote()
        before = remote.fetched
        result = read(remote)
        self._record_remote_read(remote, before)
        return result

    def _record_remote_read(self, remote: RemoteSource, before: int) -> None:
        """Record a remote read, and trigger a local copy if that may pay.

        Args:
            remote: the source that was read.
            before: its `fetched` before the read.
        """
        if (fetched := remote.fetched - before) > 0:
            self._cache.read(self.ref.name, fetched / self.ref.bytes)
            if self._copy is not None:
                self._copy(self)

    def _on_evicted(self) -> None:
        self._mapped = None

    def close(self) -> None:
        """See `BlockSource.close`; the local copy stays for later readers of the file."""
        self.closed = True
        self._cache.unsubscribe(self.ref.name, self._on_evicted)
        with self._lock:
            if self._remote is not None:
                self._remote.close()


def _distinct(numbers: Numbers) -> int:
    """Count the distinct values of ascending numbers."""
    return int(np.count_nonzero(np.diff(numbers))) + 1 if len(numbers) else 0


def _unlink(path: str) -> None:
    # Copies are optional, so a disk that fails must not fail a batch.
    with suppress(OSError):
        os.unlink(path)

"""Run files with a raw copy on the local disk, if there is room for it: mapped when there, remote when not."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from millpond.errors import StateDamagedError
from millpond.files.formats.blocks import BlockSource, BlockTable, FilterTable, Numbers
from millpond.files.refs import RunRef
from millpond.files.tiers.mapped import MappedSource
from millpond.files.tiers.remote import RemoteSource
from millpond.layout import RowLayout

T = TypeVar("T")
_STALE = 3600.0  # seconds after which a file written aside was left by a process that died


class LocalCache:
    """A directory of raw copies of run files, together at most `limit` bytes; the least recently used go first.

    Copies left by an earlier process are found again. Losing the directory loses nothing but time.
    """

    def __init__(self, path: str, limit: int) -> None:
        self.path = path
        self.limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, Callable[[], None]] = {}
        os.makedirs(path, exist_ok=True)
        found = []
        for entry in os.scandir(path):
            try:
                status = entry.stat()
            except FileNotFoundError:  # an earlier use of the directory is just ending
                continue
            if entry.name.endswith(".run"):
                found.append((status.st_mtime, entry.name, status.st_size))
            elif entry.name.endswith(".tmp") and status.st_mtime < time.time() - _STALE:
                _unlink(entry.path)
        for _, name, size in sorted(found):
            self._files[name] = size

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        with self._lock:
            return sum(self._files.values())

    def place(self, name: str) -> str:
        """Where the copy of a file stands or would stand."""
        return os.path.join(self.path, os.path.basename(name))

    def staged(self, name: str) -> str:
        """Where the copy of a file is written before it is whole; only this process uses it."""
        return f"{self.place(name)}.{os.getpid()}.{threading.get_ident()}.tmp"

    def has(self, name: str) -> bool:
        """Whether there is a copy of a file; then it is the most recently used."""
        key = os.path.basename(name)
        with self._lock:
            if key in self._files:
                self._files.move_to_end(key)
                return True
            return False

    def admit(self, name: str, staged: str) -> bool:
        """Take in a copy that is whole, if there is or can be made room for it; else delete it."""
        key = os.path.basename(name)
        size = os.stat(staged).st_size
        victims = []
        with self._lock:
            self._files.pop(key, None)
            if fits := size <= self.limit:
                while sum(self._files.values()) + size > self.limit:
                    victim, _ = self._files.popitem(last=False)
                    victims.append((victim, self._users.pop(victim, None)))
                os.replace(staged, self.place(name))
                self._files[key] = size
        for victim, user in victims:
            if user is not None:
                user()
            _unlink(self.place(victim))
        if not fits:
            _unlink(staged)
        return fits

    def use(self, name: str, lost: Callable[[], None]) -> None:
        """Say whom to tell when the copy of a file goes."""
        with self._lock:
            self._users[os.path.basename(name)] = lost

    def drop(self, name: str) -> None:
        """Delete the copy of a file, if there is one. Mappings of it stay valid."""
        key = os.path.basename(name)
        with self._lock:
            self._files.pop(key, None)
            self._users.pop(key, None)
        _unlink(self.place(name))


class CachedSource:
    """The blocks of a run file, from its local copy while there is one.

    A local copy that proves damaged is deleted, and the file in the state location read instead.

    Args:
        ref: the file. layout: the layout of its rows.
        open_remote: opens the file in the state location.
        cache: where local copies stand. mapped: the local copy, if there is one.
        copy: makes a local copy and has it adopted. It is called, once, when as much was read piece by piece as the
            file is long: reading goes on like that, so a copy pays.

    Attributes:
        copying: held by whoever makes a local copy.
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
        self._remote: RemoteSource | None = None
        self._mapped = mapped
        self._copy = copy
        if mapped is not None:
            cache.use(ref.name, self._lose)
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
    def distant(self) -> bool:
        """See `BlockSource.distant`."""
        return self._mapped is not None

    @property
    def memory(self) -> int:
        """See `BlockSource.memory`."""
        return sum(a.nbytes for a in (self.index.fence, self.index.starts, self.index.lines)) * 2

    def remote(self) -> RemoteSource:
        """The file in the state location."""
        with self._lock:
            if self._remote is None:
                self._remote = self._open_remote()
            return self._remote

    def adopt(self, mapped: MappedSource) -> None:
        """Use a local copy from now on."""
        if not np.array_equal(mapped.index.fence, self.index.fence):
            raise ValueError("the local copy is not of this file")
        self._mapped = mapped
        self._cache.use(self.ref.name, self._lose)
        with self._lock:
            if self._remote is not None:
                self._remote.close()

    def blocks(self, wanted: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        return self._ask(lambda source: source.blocks(wanted))

    def filters(self, wanted: Numbers) -> FilterTable:
        """See `BlockSource.filters`."""
        return self._ask(lambda source: source.filters(wanted))

    def expect_rows(self, places: NDArray[np.uint64]) -> None:
        """See `BlockSource.expect_rows`."""
        mapped = self._mapped
        if mapped is not None:
            mapped.expect_rows(places)

    def expect_blocks(self, begin: int, end: int) -> None:
        """See `BlockSource.expect_blocks`."""
        mapped = self._mapped
        if mapped is not None:
            mapped.expect_blocks(begin, end)

    def _ask(self, question: Callable[[BlockSource], T]) -> T:
        mapped = self._mapped
        if mapped is not None:
            try:
                return question(mapped)
            except StateDamagedError:
                self._lose()
                self._cache.drop(self.ref.name)
        remote = self.remote()
        copy = self._copy
        if copy is not None and remote.fetched > self.ref.bytes:
            self._copy = None
            copy(self)
            if (mapped := self._mapped) is not None:
                return question(mapped)
        return question(remote)

    def _lose(self) -> None:
        self._mapped = None

    def close(self) -> None:
        """See `BlockSource.close`; the local copy stays for the next one to open the file."""
        with self._lock:
            if self._remote is not None:
                self._remote.close()


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)

"""Run files with a raw copy on the local disk, if there is room for it: mapped when there, remote when not."""

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
from millpond.files.formats.blocks import BlockSource, BlockTable, FilterTable, Numbers, Part, in_parts
from millpond.files.refs import RunRef
from millpond.files.tiers.mapped import PART_BLOCKS, MappedSource
from millpond.files.tiers.policy import CachePolicy, HistoryPolicy
from millpond.files.tiers.remote import RemoteSource
from millpond.layout import RowLayout

_log = logging.getLogger(__name__)

T = TypeVar("T")
_BUFFER = 1 << 20
_STALE = 3600.0  # seconds after which a file written aside was left by a process that died


class LocalCache:
    """A directory of copies: of run files raw ones, of append files as they are. Thread-safe.

    Copies left by an earlier process are found again. Losing the directory loses nothing but time.

    Args:
        path: the directory. limit: bytes of copies, at most.
        policy: what is copied, and what goes; by default a `HistoryPolicy`.
        renew: called before a copy is made, and when the directory is gone makes another and returns its path; None
            if it is there. By default it makes the same again.

    Attributes:
        blocks: blocks and filters that were read from copies so far.
        copied: bytes of copies so far for which files were read, new ones aside.
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
        self._renew = renew if renew is not None else self._made_again
        os.makedirs(path, exist_ok=True)
        self._find()

    def _find(self) -> None:
        """Take in what lies in the directory."""
        found = []
        for entry in os.scandir(self.path):
            try:
                status = entry.stat()
            except FileNotFoundError:  # an earlier use of the directory is just ending
                continue
            if entry.name.endswith((".run", ".append")):
                found.append((status.st_mtime, entry.name, status.st_size))
            elif entry.name.endswith(".tmp") and status.st_mtime < time.time() - _STALE:
                _unlink(entry.path)
        for _, name, size in sorted(found):
            victims = self._policy.admit(name, size, written=True)
            for victim in [name] if victims is None else victims:
                _unlink(self.place(victim))

    def _made_again(self) -> str | None:
        if os.path.isdir(self.path):
            return None
        os.makedirs(self.path, exist_ok=True)
        return self.path

    def _begin_anew(self) -> None:
        """If the directory is gone, go on in another, with what is there; nobody's copy counts any more."""
        with self._lock:
            try:
                path = self._renew()
                if path is None:
                    return
                gone, self.path = self.path, path
                self._policy.clear()
                self._find()
            except OSError as error:  # a disk that fails is as good as none
                _log.debug("no local copies in %s: %s", self.path, error)
                return
            users = [user for some in self._users.values() for user in some]
            self._users.clear()
        _log.warning("the local copies in %s are gone: files are copied again, to %s, as they are read", gone, path)
        for user in users:
            user()

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        with self._lock:
            return self._policy.bytes

    def place(self, name: str) -> str:
        """Where the copy of a file stands or would stand."""
        return os.path.join(self.path, os.path.basename(name))

    def staged(self, name: str) -> str:
        """Where the copy of a file is written before it is whole; only this process uses it."""
        self._begin_anew()
        return f"{self.place(name)}.{os.getpid()}.{threading.get_ident()}.tmp"

    def has(self, name: str) -> bool:
        """Whether there is a copy of a file; then it is the most recently used."""
        with self._lock:
            return self._policy.touch(os.path.basename(name))

    def read(self, name: str, lengths: float, blocks: int = 0) -> None:
        """Some of a file was read: so many times its length, and so many blocks of it from its copy."""
        with self._lock:
            self.blocks += blocks
            self._policy.read(os.path.basename(name), lengths)

    def expects(self, name: str, size: int) -> bool:
        """See `CachePolicy.expects`."""
        with self._lock:
            return self._policy.expects(os.path.basename(name), size)

    def wants(self, name: str, size: int) -> bool:
        """See `CachePolicy.wants`."""
        with self._lock:
            return self._policy.wants(os.path.basename(name), size)

    def admit(self, name: str, staged: str, *, written: bool) -> bool:
        """Take in a copy that is whole, if the policy says so; else delete it.

        Args:
            written: the file is new.
        """
        key = os.path.basename(name)
        try:
            size = os.stat(staged).st_size
        except OSError:  # somebody has emptied the folder
            return False
        with self._lock:
            victims = self._policy.admit(key, size, written=written)
            taken = victims is not None and self._placed(staged, key)
            self.copied += size if taken and not written else 0
            users = [user for victim in victims or () for user in self._users.pop(victim, ())]
        for user in users:
            user()
        for victim in victims or ():
            _unlink(self.place(victim))
        if not taken:
            _unlink(staged)
        return taken

    def _placed(self, staged: str, key: str) -> bool:
        try:
            os.replace(staged, self.place(key))
        except OSError:
            self._policy.forget(key)
            return False
        return True

    def use(self, name: str, lost: Callable[[], None]) -> bool:
        """Say whom to tell when the copy of a file goes; False if it is gone already."""
        key = os.path.basename(name)
        with self._lock:
            if here := self._policy.touch(key):
                self._users.setdefault(key, []).append(lost)
            return here

    def leave(self, name: str, lost: Callable[[], None]) -> None:
        """Take `use` back."""
        key = os.path.basename(name)
        with self._lock:
            users = [user for user in self._users.pop(key, ()) if user != lost]
            if users:
                self._users[key] = users

    def drop(self, name: str) -> None:
        """Delete the copy of a file, if there is one. Mappings of it stay valid."""
        key = os.path.basename(name)
        with self._lock:
            self._policy.forget(key)
            self._users.pop(key, None)
        _unlink(self.place(name))


class CopyBeside:
    """A local copy as it is written beside its file: given up once it is too long, or the disk is full."""

    def __init__(self, path: str, most: int) -> None:
        self._path = path
        self._left = most
        self._file: IO[bytes] | None = None
        try:
            self._file = open(path, "wb", buffering=_BUFFER)  # noqa: SIM115
        except OSError:
            self._left = -1

    def write(self, data: Buffer) -> None:
        """Write some bytes, as long as there is room."""
        self._left -= memoryview(data).nbytes
        if self._left >= 0 and self._file is not None:
            try:
                self._file.write(data)
            except OSError:
                self._left = -1

    def __enter__(self) -> CopyBeside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError:
            self._left = -1
        if self._left < 0:
            _unlink(self._path)


class CachedSource:
    """The blocks of a run file, from its local copy while there is one.

    A local copy that proves damaged is deleted, and the file in the state location read instead.

    Args:
        ref: the file. layout: the layout of its rows.
        open_remote: opens the file in the state location.
        cache: where local copies stand. mapped: the local copy, if there is one.
        copy: has a local copy made and adopted, at some time. It is called when what is read from afar may make that
            pay.

    Attributes:
        copying: held by whoever makes a local copy.
        closed: nobody reads it any more.
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
        if mapped is not None and not cache.use(ref.name, self._lose):
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
        if not self._cache.use(self.ref.name, self._lose):
            return
        self._mapped = mapped
        with self._lock:
            if self._remote is not None:
                self._remote.close()

    def blocks(self, wanted: Numbers) -> BlockTable:
        """See `BlockSource.blocks`."""
        mapped = self._mapped
        if mapped is not None:
            count = _distinct(wanted)
            self._cache.read(self.ref.name, count / max(1, self.index.count), count)
        return self._ask(lambda source: source.blocks(wanted))

    def scanned(self, begin: int, end: int) -> Callable[[], BlockTable]:
        """See `BlockSource.scanned`."""
        mapped = self._mapped
        if mapped is not None:
            self._cache.read(self.ref.name, (end - begin) / max(1, self.index.count), end - begin)
            return lambda: self._ask(lambda source: source.scanned(begin, end)())
        remote = self.remote()
        before = remote.fetched
        bring = remote.scanned(begin, end)

        def told() -> BlockTable:
            table = bring()
            self._read_afar(remote, before)
            return table

        return told

    def parts(self, wanted: NDArray[np.int64], tied: NDArray[np.bool_]) -> Iterator[Part]:
        """See `BlockSource.parts`."""
        if self._mapped is not None:
            return in_parts(self.blocks, wanted, tied, PART_BLOCKS)
        remote = self.remote()
        before = remote.fetched
        return self._told(remote.parts(wanted, tied), remote, before)

    def _told(self, parts: Iterator[Part], remote: RemoteSource, before: int) -> Iterator[Part]:
        yield from parts
        self._read_afar(remote, before)

    def filters(self, wanted: Numbers) -> Callable[[], FilterTable]:
        """See `BlockSource.filters`."""
        mapped = self._mapped
        if mapped is not None:  # few and small, they would stay in the cache: a copy saves little there
            self._cache.read(self.ref.name, 0.0, _distinct(wanted // mapped.group))
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
        before = remote.fetched
        answer = question(remote)
        self._read_afar(remote, before)
        return answer

    def _read_afar(self, remote: RemoteSource, before: int) -> None:
        """Something was read from the state location; `before` is how much had been until then."""
        if (more := remote.fetched - before) > 0:
            self._cache.read(self.ref.name, more / self.ref.bytes)
            if self._copy is not None:
                self._copy(self)

    def _lose(self) -> None:
        self._mapped = None

    def close(self) -> None:
        """See `BlockSource.close`; the local copy stays for the next one to open the file."""
        self.closed = True
        self._cache.leave(self.ref.name, self._lose)
        with self._lock:
            if self._remote is not None:
                self._remote.close()


def _distinct(numbers: Numbers) -> int:
    """How many different ones there are of some ascending numbers."""
    return int(np.count_nonzero(np.diff(numbers))) + 1 if len(numbers) else 0


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)

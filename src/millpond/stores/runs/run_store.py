"""Writing and reading runs, in the state location and in copies on the local disk."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from millpond.errors import MillpondError, StateDamagedError
from millpond.files.backends.filesystem import FileSystem, Write
from millpond.files.backends.retry import with_retries
from millpond.files.formats.blocks import BlockSource
from millpond.files.formats.conversion import convertible
from millpond.files.formats.run import OtherColumnsError, RunWriter, Target
from millpond.files.refs import RunRef, range_of
from millpond.files.tiers.block_cache import BlockCache
from millpond.files.tiers.converted import ConvertedSource
from millpond.files.tiers.in_place import in_place
from millpond.files.tiers.local_copies import CachedSource, CopyWriter, LocalCache
from millpond.files.tiers.mapped import CompressedError, MappedSource
from millpond.files.tiers.policy import ADMISSION_THRESHOLD, HistoryPolicy
from millpond.files.tiers.read_budget import ReadBudget
from millpond.files.tiers.remote import RemoteSource
from millpond.layout import HASH, HashRange, RowLayout, Rows, TableSchema
from millpond.stores.runs.run import Run

FOLDER = "files/"
"""Folder of run files below the state location."""

_BUFFER_BYTES = 1 << 20  # of writes to local files
_REQUESTS = 64
"""Concurrent requests to the state location, at most: a batch's look-ups wait for a store's latency, not for cores."""
_log = logging.getLogger(__name__)


class RunStore:
    """Writes runs to the state location and opens them. Thread-safe.

    In a location on a local disk, runs are uncompressed and used in place. Anywhere else they are compressed, and
    copied to the local disk, uncompressed, as far as there is room.

    Args:
        files: the state location.
        local: directory for uncompressed copies, which are mapped into memory.
        disk: bytes of local copies, at most; 0 for none. admission: threshold from which a remote file gets a copy
            (see `HistoryPolicy`).
        renew: recreates the directory when it is missing (see `LocalCache`).
        memory: bytes of cached blocks and filters of files without local copy, at most; the same limit applies to bytes
            being read for look-ups.
        prefix: prefix of the names of new files.

    Attributes:
        copies: the local copies, which other stores may share. cache: the cached blocks.
    """

    def __init__(
        self,
        files: FileSystem,
        local: str,
        *,
        disk: int,
        memory: int,
        admission: float = ADMISSION_THRESHOLD,
        renew: Callable[[], str | None] | None = None,
        prefix: str = "",
    ) -> None:
        self._prefix = prefix
        self._files = files
        self._in_place = in_place(files)
        self.copies = LocalCache(local, disk, HistoryPolicy(disk, admission), renew)
        self.cache = BlockCache(memory)
        self._read_budget = ReadBudget(memory)
        self._requests = ThreadPoolExecutor(_REQUESTS, "millpond-fetch")
        self._hydrator = ThreadPoolExecutor(1, "millpond-hydrate")
        self._lock = threading.Lock()
        self._hydrating: set[str] = set()

    def write(self, rows: Rows | Iterable[Rows], layout: RowLayout) -> Run:
        """Write a run and open it; returns when it is durable in the state location.

        Args:
            rows: rows in hash order, each key once, whole or in pieces; pieces are written and uploaded as they come.
            layout: their layout.

        Raises:
            TransientError: the store failed. Rows in memory have been retried several times; an iterator of pieces
                cannot be, so the caller has to make the pieces again.
        """
        name = f"{FOLDER}{self._prefix}{uuid.uuid4().hex}.run"
        pieces = [rows] if isinstance(rows, Rows) else rows
        if self._in_place is not None:
            ref, source = self._in_place.write(name, pieces, layout)
            return Run(source, ref)
        if isinstance(pieces, Sequence):
            ref, mapped = with_retries(lambda: self._upload(name, pieces, layout))
        else:
            ref, mapped = self._upload(name, pieces, layout)
        return Run(self._source(ref, layout, mapped), ref)

    def _upload(self, name: str, pieces: Iterable[Rows], layout: RowLayout) -> tuple[RunRef, MappedSource | None]:
        staged = self.copies.staging_path(name)
        try:
            with self._files.upload(name) as write:
                ref = self._write(name, pieces, layout, write, staged)
        except BaseException:
            _discard(staged)
            raise
        return ref, self._admit(name, layout, staged, written=True) if os.path.exists(staged) else None

    def _admit(self, name: str, layout: RowLayout, staged: str, *, written: bool) -> MappedSource | None:
        """Admit a complete copy to the cache, and map it.

        Returns None if the policy rejects it, or if it cannot be mapped: the file in the state location is durable, so
        no error of a copy may fail a write.
        """
        try:
            mapped = MappedSource(staged, layout, checked=True)  # before eviction may delete the file
            mapped.path = self.copies.path_of(name)
            return mapped if self.copies.admit(name, staged, written=written) else None
        except (MillpondError, OSError) as error:
            _log.debug("no local copy of %s: %s", name, error)
            _discard(staged)
            return None

    def _write(
        self,
        name: str,
        pieces: Iterable[Rows],
        layout: RowLayout,
        write: Write,
        staged: str,
    ) -> RunRef:
        remote = Target(write, compress=True)
        if not self.copies.limit:
            writer = RunWriter(layout, [remote])
            _write_pieces(writer, pieces)
        else:
            with CopyWriter(staged, self.copies.limit) as raw:
                writer = RunWriter(layout, [Target(raw.write, compress=False), remote])
                _write_pieces(writer, pieces)
        return writer.ref(name, remote)

    def open(
        self,
        ref: RunRef,
        layout: RowLayout,
        range_: HashRange = HashRange(),  # noqa: B008
        axis: int = HASH,
        earlier: Collection[TableSchema] = (),
    ) -> Run:
        """Open a run for a hash range, from its local copy or from the state location.

        A run without local copy gets one in the background if there is room, unless it is opened for only a part of
        its hashes.

        Args:
            axis: index of the word by which rows belong to a partition (see `stores.hash_filter`).
            earlier: earlier schemas of the table: rows with one of these are converted when they are read.

        Raises:
            StateDamagedError: the file is missing, truncated or altered.
            StateIncompatibleError: its rows have another layout, or its format is newer.
        """
        try:
            source = self._open_source(ref, layout, range_)
        except OtherColumnsError as error:
            schema = error.schema
            if schema is None or schema not in earlier or not convertible(schema, layout.schema):
                raise
            before = self._open_source(ref, RowLayout(schema), range_)
            source = ConvertedSource(before, ref.name, layout, self.cache)
        return Run(source, ref, range_, axis)

    def _open_source(self, ref: RunRef, layout: RowLayout, range_: HashRange) -> BlockSource:
        if self._in_place is not None and (mapped_in_place := self._in_place.open(ref, layout)) is not None:
            return mapped_in_place
        source = self._source(ref, layout, self._map_copy(ref, layout))
        # A copy of the whole file does not pay if this partition reads only a part of it.
        whole = range_.meet(range_of(ref.visible)).has(HashRange(ref.first, ref.last + 1))
        if not source.mapped and whole:
            self._hydrate_if(source, self.copies.should_copy_on_open)
        return source

    def open_all(
        self,
        refs: Sequence[RunRef],
        layout: RowLayout,
        range_: HashRange = HashRange(),  # noqa: B008
        axis: int = HASH,
        earlier: Collection[TableSchema] = (),
    ) -> list[Run]:
        """Open the runs of a table (see `open`), reading their footers concurrently."""
        if len(refs) < 2:
            return [self.open(ref, layout, range_, axis, earlier) for ref in refs]
        return list(self._requests.map(lambda ref: self.open(ref, layout, range_, axis, earlier), refs))

    def hydrate(self, source: CachedSource) -> None:
        """Make a local copy of a run's file and use it, unless it has one. A failure leaves the run unchanged."""
        with source.copying:
            if not source.mapped:
                self._hydrate(source)

    def _hydrate_if(self, source: CachedSource, pays: Callable[[str, int], bool]) -> None:
        """Make a local copy in the background if `pays` agrees, both now and when the copy is due to start."""
        name, size = source.ref.name, _estimated_copy_bytes(source.ref, source.layout)
        if not pays(name, size):
            return
        with self._lock:
            if name in self._hydrating:
                return
            self._hydrating.add(name)

        def hydrate() -> None:
            try:
                if not source.closed and pays(name, size):
                    self.hydrate(source)
            finally:
                with self._lock:
                    self._hydrating.discard(name)

        try:
            self._hydrator.submit(hydrate)
        except RuntimeError:  # the store is closed
            with self._lock:
                self._hydrating.discard(name)

    def _hydrate(self, source: CachedSource) -> None:
        name = source.ref.name
        staged = self.copies.staging_path(name)
        try:
            with open(staged, "wb", buffering=_BUFFER_BYTES) as raw:
                writer = RunWriter(source.layout, [Target(raw.write, compress=False)])
                _write_pieces(writer, _raise_unless(lambda: not source.closed, source.remote().pieces()))
            mapped = self._admit(name, source.layout, staged, written=False)
            if mapped is not None:
                source.adopt(mapped)
                if source.closed:  # `drop` may have run before the copy existed
                    self.copies.drop(name)
        except (MillpondError, OSError, _CopyCancelledError) as error:
            _log.debug("no local copy of %s: %s", name, error)
            _discard(staged)

    def drop(self, run: Run) -> None:
        """Drop the cached parts of a run that is no longer part of the state; its file stays in the state location."""
        run.close()
        if run.ref is not None:
            self.copies.drop(run.ref.name)

    def _source(self, ref: RunRef, layout: RowLayout, mapped: MappedSource | None) -> CachedSource:
        def open_remote() -> RemoteSource:
            return RemoteSource(self._files, ref, layout, self.cache, self._requests, self._read_budget)

        def copy(source: CachedSource) -> None:
            mapped_copy = self._map_copy(ref, layout)  # another partition may have copied the file
            if mapped_copy is not None:
                source.adopt(mapped_copy)
            else:
                self._hydrate_if(source, self.copies.should_copy)

        return CachedSource(ref, layout, open_remote, self.copies, mapped, copy if self.copies.limit else None)

    def _map_copy(self, ref: RunRef, layout: RowLayout) -> MappedSource | None:
        if not self.copies.has(ref.name):
            return None
        try:
            mapped = MappedSource(self.copies.path_of(ref.name), layout)
        except (StateDamagedError, OSError, CompressedError):
            mapped = None
        # A bad copy is dropped without an error: the file in the state location is the one that counts.
        if mapped is None or not _matches(mapped, ref):
            self.copies.drop(ref.name)
            return None
        return mapped

    def stats(self) -> dict[str, int]:
        """Return figures of remote files.

        `disk_blocks`, `memory_blocks`, `remote_blocks`: blocks and filters read from local copies, the block cache, and
        remote storage. `copied_bytes`: bytes of local copies for which files were read.
        """
        return {
            "disk_blocks": self.copies.blocks,
            "memory_blocks": self.cache.hits,
            "remote_blocks": self.cache.misses,
            "copied_bytes": self.copies.copied,
        }

    def close(self) -> None:
        """End the threads; open runs must not be used afterwards."""
        self._hydrator.shutdown(wait=True, cancel_futures=True)
        self._requests.shutdown(wait=True, cancel_futures=True)


class _CopyCancelledError(Exception):
    """Raised to stop a copy that is no longer needed."""


def _raise_unless(wanted: Callable[[], bool], pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Yield pieces while `wanted` returns True; raise otherwise."""
    for piece in pieces:
        if not wanted():
            raise _CopyCancelledError
        yield piece


def _discard(staged: str) -> None:
    """Delete a staged copy, if it exists."""
    with suppress(OSError):  # it is then deleted as a stale file by a later process
        os.unlink(staged)


def _matches(mapped: MappedSource, ref: RunRef) -> bool:
    """Return whether a local copy matches the file's reference in all recorded properties."""
    index = mapped.index
    first = int(index.fence[0]) if index.count else 0
    properties = index.rows, first, index.highest, *mapped.access_times
    return properties == (ref.rows, ref.first, ref.last, ref.oldest, ref.newest)


def _estimated_copy_bytes(ref: RunRef, layout: RowLayout) -> int:
    """Estimate the bytes of a local copy: long values may take more, filters are left out."""
    return max(ref.bytes, ref.rows * layout.width * 8)


def _write_pieces(writer: RunWriter, pieces: Iterable[Rows]) -> None:
    for piece in pieces:
        writer.add(piece)
    writer.finish()

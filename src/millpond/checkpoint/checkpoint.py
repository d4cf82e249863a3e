"""A query's checkpoint as a slot sees it: open partitions at a version, read deltas, put commits.

The generation decides which manifests count: its own commits, and the exact manifests that its base names.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence

from millpond.checkpoint.formats.commit import (
    CommitHeader,
    commit_name,
    commit_prefix,
    encode_commit,
    header_end,
    only_commits,
    parse_commit_name,
    read_checked_header,
    resolve,
)
from millpond.checkpoint.formats.deltas import read_deltas
from millpond.checkpoint.formats.documents import damaged_error
from millpond.checkpoint.formats.manifest import DeltaRef, PartitionManifest, Sealed, checksum
from millpond.checkpoint.generation import Base, BaseVersion, Generation, Tip, check_fence, read_base, read_claim
from millpond.checkpoint.rescale import inherited
from millpond.checkpoint.resolution import latest_attempts, uncertain_places
from millpond.checkpoint.state_schema import StateSchema, read_schemas
from millpond.errors import MillpondError, StateDamagedError, TransientError
from millpond.files.backends.filesystem import AlreadyExistsError, Buffer, FileInfo, FileSystem, MissingFileError

_MAX_CACHED_HEADERS = 256
"""Commit headers cached in memory. Partitions of one slot share commit objects, so each header is read once."""

_LISTING_SECONDS = 1.0
"""Seconds for which partitions that are opened one after the other share a listing of commits."""

_MAX_CACHED_MANIFESTS = 4
"""Final manifests cached per partition: the commit of the next version needs its parent's deltas."""


class NotDurableError(TransientError):
    """A version is not durable, or not certain; a start of the query repeats the batch that made it."""


class Checkpoint:
    """The checkpoint of one query, written to by one generation. Thread-safe.

    Args:
        files: the location's `millpond/` folder (`join_url(location, "millpond")`).
        generation: the run's number; it must have a base (the driver writes it before the query starts).
        poll: seconds between two listings while waiting for a commit of another slot.

    Attributes:
        state_schemas: the query's state schema and its ancestors by number, newest first. Empty if it never changed.
    """

    def __init__(self, files: FileSystem, generation: int, *, poll: float = 0.05) -> None:
        self.files = files
        self.claim: Generation = read_claim(files, generation)
        self.base: Base = read_base(files, generation)
        self.state_schemas: dict[int, StateSchema] = (
            read_schemas(files, self.base.schema_number) if self.base.schema_number else {}
        )
        self._poll = poll
        self._lock = threading.Lock()
        self._headers: OrderedDict[str, CommitHeader] = OrderedDict()
        self._last_listing: tuple[int, float, list[FileInfo]] = (-1, 0.0, [])
        self._manifests: dict[tuple[int, int], OrderedDict[str, PartitionManifest]] = defaultdict(OrderedDict)

    @property
    def generation(self) -> int:
        """Number of the generation that this run writes."""
        return self.claim.number

    def open_partition(self, operator: int, partition: int, version: int, *, wait: float = 0.0) -> PartitionManifest:
        """Return the manifest of a partition at a version: from this generation's own commit, else from the base.

        Version 0, and a base version without a tip, give a manifest without tables (and with `id` ""): empty state.

        Args:
            operator, partition, version: the state to open.
            wait: seconds to wait for a commit that another slot may still be writing.

        Raises:
            FencedError: a newer generation exists.
            NotDurableError: the version does not exist after `wait` seconds, or two of its commits contradict each
                other. Restarting the query repairs both cases.
            TransientError: the store fails.
            StateDamagedError: a file of the version is missing, cut short or altered.
        """
        deadline = time.monotonic() + wait
        fresh = False
        while True:
            own = latest_attempts(self._intact_manifests(operator, partition, self._listing(version, fresh)))
            if uncertain_places(own):
                raise NotDurableError(
                    "Two attempts of one batch saw different input, so its state is not certain.",
                    action="Restart the query: it repeats the batch. (A query whose input is not repeatable needs "
                    "spark.millpond.commit.mode=sync.)",
                    operator=str(operator),
                    partition=partition,
                    version=version,
                    file=self.files.locate(commit_prefix(version, self.generation)),
                )
            if own:
                return self._cache_manifest(own[operator, partition][0])
            base = self.base.find_version(version)
            if base is not None or version == 0:
                return self._cache_manifest(self._from_base(base, operator, partition, version))
            # Only a fresh listing proves that the version is missing: a cached one may be older than its commit.
            if fresh and time.monotonic() >= deadline:
                raise NotDurableError(
                    "This version of the state is not durable.",
                    action="Restart the query: it repeats the batch that made it.",
                    operator=str(operator),
                    partition=partition,
                    version=version,
                    file=self.files.locate(commit_prefix(version, self.generation)),
                )
            if fresh:
                time.sleep(min(self._poll, max(0.0, deadline - time.monotonic())))
            fresh = True

    def commits_of(self, operator: int, partition: int, version: int) -> list[PartitionManifest]:
        """Return this generation's intact manifests of a partition and version, each `id` once."""
        return self._intact_manifests(operator, partition, self._listing(version, fresh=True))

    def has_commits_from(self, version: int) -> bool:
        """Return whether this version or a later one has a commit, of this generation or a newer one."""
        later = only_commits(self.files.list("commits/", after=commit_prefix(version, 0)))
        return any(parse_commit_name(info.name)[1] >= self.generation for info in later)

    def _listing(self, version: int, fresh: bool) -> list[FileInfo]:
        """List this generation's commits of a version, and check the fence.

        Partitions that are opened one after the other share a listing. A cached listing is safe: a version is opened
        only once its batch runs, and synchronous commits are complete by then. A commit that arrives later either is
        interchangeable with the base, or is missing, and then `open_partition` lists again.

        Args:
            version: the version.
            fresh: list even if a recent listing is cached.

        Raises:
            FencedError: a newer generation exists.
        """
        with self._lock:
            listed, listed_at, commits = self._last_listing
        if fresh or listed != version or time.monotonic() - listed_at > _LISTING_SECONDS:
            listed_at = time.monotonic()
            check_fence(self.files, self.generation)
            commits = only_commits(self.files.list(commit_prefix(version, self.generation)))
            with self._lock:
                self._last_listing = version, listed_at, commits
        return commits

    def _intact_manifests(self, operator: int, partition: int, commits: Sequence[FileInfo]) -> list[PartitionManifest]:
        manifests: dict[str, PartitionManifest] = {}
        for info in commits:
            try:
                header = self._header(info)
            except MissingFileError:
                continue  # removed by garbage collection meanwhile
            except StateDamagedError:
                continue  # a torn put, never acknowledged; without another commit, the version counts as missing
            for manifest in header.manifests:
                if manifest.place == (operator, partition):
                    manifests.setdefault(manifest.id, manifest)
        return list(manifests.values())

    def read_deltas(self, refs: Sequence[DeltaRef]) -> Iterator[Buffer]:
        """Yield the bytes of several deltas, in order; a few are prefetched."""
        return read_deltas(self.files, refs)

    def parent_of(self, manifest: PartitionManifest) -> PartitionManifest | None:
        """Return the final manifest that `manifest` was computed from; None if that is not durable."""
        version = manifest.version - 1
        empty = PartitionManifest(manifest.operator, manifest.partition, version)
        # The first version is computed from empty state, which no commit holds.
        if manifest.parent is None:
            return empty
        cached = self.find_cached(manifest.place, manifest.parent)
        if cached is not None:
            return cached
        base = self.base.find_version(version)
        if base is not None:
            inherited_manifest = self._from_base(base, *manifest.place, version)
            if inherited_manifest.id == manifest.parent:
                return inherited_manifest
        own = self.commits_of(*manifest.place, version)
        return next((candidate for candidate in own if candidate.id == manifest.parent), None)

    def find_cached(self, place: tuple[int, int], id_: str | None) -> PartitionManifest | None:
        """Return a final manifest by its id, if it has been read or committed here lately."""
        with self._lock:
            return None if id_ is None else self._manifests[place].get(id_)

    def put_commit(self, slot: str, number: int, group: Sequence[tuple[Sealed, PartitionManifest]]) -> str:
        """Put one commit object over sealed deltas of one version, each with its parent's final manifest.

        The manifests are durable when this returns. The caller acknowledges them only after `check_fence`.

        Args:
            slot: uuid of the slot.
            number: sequence number of the object within the slot.
            group: see `encode_commit`.

        Returns:
            The name of the object.

        Raises:
            AlreadyExistsError: the name holds other bytes, left by an earlier torn put of this slot. They are not
                overwritten; use another number.
        """
        pieces, header = encode_commit(self.generation, slot, group)
        name = commit_name(header.version, self.generation, slot, number)
        try:
            self.files.put(name, pieces, create=True)
        except AlreadyExistsError:
            # The same bytes mean that an earlier try succeeded and its answer was lost.
            if not self._has_same_bytes(name, pieces):
                raise
        with self._lock:
            # The cached listing lacks this commit: the next partition that is opened must list again.
            self._last_listing = -1, 0.0, []
        for manifest in resolve(header, name, header_end(pieces)).manifests:
            self._cache_manifest(manifest)
        return name

    def check_fence(self) -> None:
        """Raise `FencedError` if a newer generation exists."""
        check_fence(self.files, self.generation)

    def _has_same_bytes(self, name: str, pieces: Sequence[Buffer]) -> bool:
        data = self.files.get(name)
        length = sum(memoryview(piece).nbytes for piece in pieces)
        return memoryview(data).nbytes == length and checksum([data]) == checksum(pieces)

    def _from_base(self, base: BaseVersion | None, operator: int, partition: int, version: int) -> PartitionManifest:
        """Return the manifest with which a partition of this run begins (see `rescale.inherited`)."""
        return inherited(self.claim, base, operator, partition, version, lambda tip: self._read_tip(tip, version))

    def _read_tip(self, tip: Tip, version: int) -> PartitionManifest:
        try:
            # Read by the name in the base, never by listing: late commits of older runs must not count.
            for manifest in self._header(FileInfo(tip.commit, tip.size, 0.0)).manifests:
                if manifest.id == tip.id:
                    return manifest
        except MillpondError as error:
            raise error.at(operator=str(tip.operator), partition=tip.partition, version=version) from None
        raise damaged_error(
            self.files.locate(tip.commit), f"does not hold partition {tip.partition} of operator {tip.operator}"
        )

    def _header(self, info: FileInfo) -> CommitHeader:
        with self._lock:
            cached = self._headers.get(info.name)
            if cached is not None:
                self._headers.move_to_end(info.name)
                return cached
        # Read without the lock: a slow store must not block other partitions. Two threads may read one header.
        header = read_checked_header(self.files, info.name, info.size)
        with self._lock:
            self._headers[info.name] = header
            while len(self._headers) > _MAX_CACHED_HEADERS:
                self._headers.popitem(last=False)
        return header

    def _cache_manifest(self, manifest: PartitionManifest) -> PartitionManifest:
        if not manifest.id:
            return manifest  # the empty state, which is not looked up
        with self._lock:
            cached = self._manifests[manifest.place]
            cached[manifest.id] = manifest
            while len(cached) > _MAX_CACHED_MANIFESTS:
                cached.popitem(last=False)
        return manifest

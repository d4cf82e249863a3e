"""The query's own garbage collector.

While batch *b* runs, the versions from *b − 1* on are retained. So are the versions of all batches that Spark can still
go back to. The objects that their manifests name are retained with them: commit objects with older deltas, and run
files. Other objects are deleted once they have been unneeded for a grace period. So a reader that has just opened an
older version can finish.

A run file is written before a manifest names it, and named at most two versions later. So a file is considered only
after three batches have followed the one during which it first existed, however long they take. Modification times do
not help: some stores set the time of a multipart upload to its beginning.

Files of remote compaction (see `checkpoint.compaction`) may be named at any later time. They stay as long as their
request exists.

Objects that forks share with this checkpoint stay, too. The collector of a fork releases parents that it does not need
any more, by the same rules (see `checkpoint.forks`).

Files in `generations/` become garbage only by further starts, which remove those of older runs (see `find_orphans`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from millpond.checkpoint.compaction.requests import (
    CLOCK_MARGIN_SECONDS,
    MAX_WAIT_SECONDS,
    RequestState,
    list_requests,
    request_of_file,
)
from millpond.checkpoint.forks.parents import Parent, Parents, read_parents
from millpond.checkpoint.forks.pins import Pin, pinned, read_pins, release, unused_parents
from millpond.checkpoint.formats.commit import only_commits, parse_commit_name
from millpond.checkpoint.generation import check_fence
from millpond.checkpoint.retention.needs import IN_FLIGHT_BATCHES, read_needs
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.files.backends.local import STAGING
from millpond.files.locations.forked import shared_name


@dataclass(frozen=True)
class Collected:
    """The number and total size of the objects that one collection removed."""

    objects: int = 0
    bytes: int = 0


class Collector:
    """Garbage collector of one checkpoint; one per query, off the hot path. Not thread-safe.

    Args:
        files: the location's `millpond/` folder.
        generation: the run's number; a fenced run deletes nothing.
        retain: Spark's `minBatchesToRetain`.
        grace: seconds between the first sight of an object as unneeded and its deletion.
        keep_aside: seconds for which objects in `rolled-back/` and `staging/` stay.
        clock: returns the wall-clock time in seconds, compared with the store's modification times.
        elapsed: returns monotonic seconds; a step of the wall clock does not shorten grace periods.
    """

    def __init__(
        self,
        files: FileSystem,
        generation: int,
        *,
        retain: int = 100,
        grace: float = 600.0,
        keep_aside: float = 7 * 86400.0,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self.generation = generation
        self._retain = max(retain, IN_FLIGHT_BATCHES)
        self._grace_seconds = grace
        self._aside_seconds = keep_aside
        self._clock, self._elapsed = clock, elapsed
        self._needs_by_commit: dict[str, frozenset[str]] = {}  # by retained commit: the objects that its manifests name
        self._unneeded_since: dict[str, float] = {}  # by name: the time since which the object has been unneeded
        self._last_listing: set[str] = set()  # files in the listing of the last collection
        self._seen_in_batch: dict[str, int] = {}  # by file in two successive listings: the batch that ran by then
        self._all_commits_read = True
        self._pins: dict[str, Pin] = {}
        self._parents: Parents | None = None
        self._parents_read = False  # whether `_parents` was read
        self._unused_parents: dict[str, Parent] = {}  # by the name that represents the parent among the candidates
        self._released: set[str] = set()
        self._request_seen: dict[str, float] = {}  # by request of this run: when it was first seen, in seconds
        self._expired_in_batch: dict[str, int] = {}  # by request past its limit: the batch that ran by then

    def collect(self, running: int, first: int | None = None) -> Collected:
        """Delete objects that are not needed while batch `running` runs.

        Args:
            running: the newest batch in Spark's offset log.
            first: the oldest batch in the offset log. Forks are made from versions that the offset log retains, so the
                log must be read before this call.

        Returns:
            The number and total size of the deleted objects.

        Raises:
            FencedError: a newer run has taken over.
            StateDamagedError: a retained commit or a fork's pin cannot be read, so its needs are unknown.
        """
        oldest = running - self._retain if first is None else min(running - self._retain, first)
        # The order of the listings is an invariant. Files come before commits: a file in the first listing that a
        # later commit names is found named in the second. Requests come in between: a request is removed only after a
        # commit names its files.
        runs = self.files.list("files/")
        requests = list_requests(self.files)
        commits = only_commits(self.files.list("commits/"))
        kept = [info for info in commits if parse_commit_name(info.name)[0] >= oldest]
        live = self._named_objects(kept) | {info.name for info in kept}
        self._pins = read_pins(self.files, self._pins)  # after the lists, see `checkpoint.forks`
        # A commit that could not be read may name objects of a parent: keep all parents then.
        self._unused_parents = self._find_unused_parents(live) if self._all_commits_read else {}
        live |= pinned(self._pins)
        settled = self._settled_files(runs, running)
        candidates = {info.name: info for info in commits if info.name not in live}
        live_requests = self._live_requests(requests, running, oldest)
        candidates |= {
            info.name: info
            for info in runs
            if info.name in settled and info.name not in live and request_of_file(info.name) not in live_requests
        }
        candidates |= _objects(state for identity, state in requests.items() if identity not in live_requests)
        candidates |= {name: FileInfo(name, 0, 0.0) for name in self._unused_parents}
        removed = self._remove_unneeded(candidates)
        return self._remove(self._expired_aside(), removed)

    def _settled_files(self, runs: Iterable[FileInfo], running: int) -> set[str]:
        """Return the files that a version names by now, or that no version will ever name."""
        # `running` was read before this listing, so only a file that was in the previous listing as well is known to
        # have existed by then.
        self._seen_in_batch = {
            info.name: self._seen_in_batch.get(info.name, running) for info in runs if info.name in self._last_listing
        }
        self._last_listing = {info.name for info in runs}
        return {name for name, since in self._seen_in_batch.items() if running >= since + IN_FLIGHT_BATCHES}

    def _live_requests(self, requests: dict[str, RequestState], running: int, oldest: int) -> set[str]:
        """Return the requests whose results a manifest may still name."""
        now = self._elapsed()
        own = {
            key for key, state in requests.items() if state.generation == self.generation and state.request is not None
        }
        self._request_seen = {key: self._request_seen.get(key, now) for key in own}
        overdue = [
            key for key, since in self._request_seen.items() if now - since >= MAX_WAIT_SECONDS + CLOCK_MARGIN_SECONDS
        ]
        self._expired_in_batch = {key: self._expired_in_batch.get(key, running) for key in overdue}
        # A newer run has fenced this one: its requests are its own affair.
        newer = {key for key, state in requests.items() if state.generation > self.generation}
        # A result taken at the last moment is named up to two versions later, and such a version may be retained.
        expired = {key for key, since in self._expired_in_batch.items() if oldest >= since + IN_FLIGHT_BATCHES}
        return (own | newer) - expired

    def _named_objects(self, commits: Iterable[FileInfo]) -> set[str]:
        needs: dict[str, frozenset[str]] = {}
        self._all_commits_read = True
        for info in commits:
            try:
                # Commits are immutable, so each is read once.
                known = self._needs_by_commit.get(info.name)
                needs[info.name] = read_needs(self.files, info) if known is None else known
            except MissingFileError:
                self._all_commits_read = False  # a collection from outside has removed it meanwhile
        self._needs_by_commit = needs
        return set().union(*needs.values())

    def _find_unused_parents(self, live: set[str]) -> dict[str, Parent]:
        if not self._parents_read:
            self._parents, self._parents_read = read_parents(self.files), True
        unused = unused_parents(self._parents, self.files, live)
        names = {shared_name(number, ""): parent for number, parent in unused.items()}
        return {name: parent for name, parent in names.items() if name not in self._released}

    def _remove_unneeded(self, candidates: dict[str, FileInfo]) -> Collected:
        now = self._elapsed()
        self._unneeded_since = {name: self._unneeded_since.get(name, now) for name in candidates}
        due = [info for name, info in candidates.items() if now - self._unneeded_since[name] >= self._grace_seconds]
        return self._remove(due, Collected())

    def _expired_aside(self) -> list[FileInfo]:
        until = self._clock() - self._aside_seconds
        return [
            info
            for folder in ("rolled-back/", f"{STAGING}/")
            for info in self.files.list(folder)
            if info.modified < until
        ]

    def _remove(self, infos: Iterable[FileInfo], before: Collected) -> Collected:
        infos = list(infos)
        if infos:
            # A newer run may build on objects that this run takes for garbage, so a fenced run deletes nothing.
            check_fence(self.files, self.generation)
        for info in infos:
            if info.name in self._unused_parents:
                release(self._unused_parents[info.name])
                self._released.add(info.name)
            else:
                self.files.delete(info.name)
        return Collected(before.objects + len(infos), before.bytes + sum(info.size for info in infos))


def _objects(requests: Iterable[RequestState]) -> dict[str, FileInfo]:
    """Return all objects of some requests, by name."""
    infos = [info for state in requests for info in (state.request, *state.replies) if info is not None]
    return {info.name: info for info in infos}

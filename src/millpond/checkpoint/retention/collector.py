"""Removing what nobody can need any more.

While batch *b* runs, versions from *b − 1* on stay, and those of all batches that Spark can still go back to. What
their manifests name stays with them: commit objects that hold older deltas, and run files. Anything else goes once it
has been seen unneeded for a grace period, so that a reader that has just opened an older version can finish.

A run file is written before a manifest names it, and named at the latest two versions later. So no file is looked at
until three batches have followed the one in which it was there already, however long they take. The times of files tell
nothing of that: some stores give one that came in parts the time at which its upload began.

What compactors make (see `checkpoint.compaction`) may be named any time later: it stays as long as its request does.

What forks have of this checkpoint stays, too; and the collector of a fork gives back what it does not need any more of
its parents, by the same rules (see `checkpoint.forks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from millpond.checkpoint.compaction.requests import LIMIT, MARGIN, Known, made_for, requests
from millpond.checkpoint.forks.parents import Parent, Parents, read_parents
from millpond.checkpoint.forks.pins import Pin, pinned, read_pins, release, unused_parents
from millpond.checkpoint.formats.commit import parse_commit_name
from millpond.checkpoint.formats.documents import digits
from millpond.checkpoint.generation import FOLDER, begun, check_fence, numbers, read_base
from millpond.checkpoint.retention.needs import IN_FLIGHT, read_needs
from millpond.errors import StateDamagedError
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.files.backends.forked import shared_name
from millpond.files.backends.local import STAGING

_GENERATIONS = 16
"""Claims that stay at least; they are small and say what ran when. So do those by which a retained version is read."""


@dataclass(frozen=True)
class Collected:
    """What one collection removed."""

    objects: int = 0
    bytes: int = 0


class Collector:
    """Collects the garbage of one checkpoint, from one place per query, off the hot path. Not thread-safe.

    Args:
        files: the location's `millpond/` folder.
        generation: the run's number; a fenced run deletes nothing.
        retain: Spark's `minBatchesToRetain` (at least 2).
        grace: seconds between seeing that something is unneeded and deleting it.
        keep_aside: seconds that what was set aside in `rolled-back/`, or left in `staging/`, stays.
        clock: seconds since the epoch.
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
    ) -> None:
        self.files = files
        self.generation = generation
        self._retain = max(retain, IN_FLIGHT)
        self._grace = grace
        self._keep_aside = keep_aside
        self._clock = clock
        self._needs: dict[str, frozenset[str]] = {}  # of each commit that is retained: what its manifests name
        self._unneeded: dict[str, float] = {}  # since when
        self._listed: set[str] = set()  # the files that the last collection found
        self._there: dict[str, int] = {}  # of those, which the one before had found: the batch that ran then, at most
        self._all_read = True
        self._pins: dict[str, Pin] = {}
        self._parents: Parents | None = None
        self._looked = False  # for parents
        self._unused: dict[str, Parent] = {}  # by what stands for it among what is not needed
        self._released: set[str] = set()
        self._begins: dict[int, int] = {}  # of each run: the oldest version that it began with
        self._asked: dict[str, float] = {}  # requests of this run: since when they are known
        self._expired: dict[str, int] = {}  # of those, which nobody can wait for: the batch that ran when that was so

    def collect(self, running: int, first: int | None = None) -> Collected:
        """Remove what is not needed while batch `running` runs.

        Args:
            running: the newest batch in Spark's ledger.
            first: the oldest batch there. What forks are made of is told by the ledger, so it has to be read before
                this is called.

        Raises:
            FencedError: a newer run has taken over.
            StateDamagedError: a commit that is retained, or a fork's pin, cannot be read: what it needs is not known.
        """
        oldest = running - self._retain if first is None else min(running - self._retain, first)
        runs = self.files.list("files/")  # before the commits: what a later commit names was there already
        asked = requests(self.files)  # in between: a request goes when a commit names what was made for it
        commits = self.files.list("commits/")
        kept = [info for info in commits if parse_commit_name(info.name)[0] >= oldest]
        live = self._named(kept) | {info.name for info in kept}
        self._pins = read_pins(self.files, self._pins)  # after the lists, see `checkpoint.forks`
        self._unused = self._find_unused(live) if self._all_read else {}
        live |= pinned(self._pins)
        settled = self._settled(runs, running)
        candidates = {info.name: info for info in commits if info.name not in live}
        unanswered = self._unanswered(asked, running, oldest)
        candidates |= {
            info.name: info
            for info in runs
            if info.name in settled and info.name not in live and made_for(info.name) not in unanswered
        }
        candidates |= _objects(known for identity, known in asked.items() if identity not in unanswered)
        candidates |= {name: FileInfo(name, 0, 0.0) for name in self._unused}
        removed = self._remove_unneeded(candidates)
        return self._remove(self._set_aside(oldest), removed)

    def _settled(self, runs: Iterable[FileInfo], running: int) -> set[str]:
        """The files that a version names by now, or none ever will."""
        # Which batch runs was read before the list: that a file had been there by then, the list before it tells.
        self._there = {info.name: self._there.get(info.name, running) for info in runs if info.name in self._listed}
        self._listed = {info.name for info in runs}
        return {name for name, since in self._there.items() if running >= since + IN_FLIGHT}

    def _unanswered(self, asked: dict[str, Known], running: int, oldest: int) -> set[str]:
        """The requests whose results may still come to be named."""
        now = self._clock()
        own = {at for at, known in asked.items() if known.generation == self.generation and known.request is not None}
        self._asked = {at: self._asked.get(at, now) for at in own}
        overdue = [at for at, since in self._asked.items() if now - since >= LIMIT + MARGIN]
        self._expired = {at: self._expired.get(at, running) for at in overdue}
        newer = {at for at, known in asked.items() if known.generation > self.generation}
        # What was taken at the last moment is named two versions later, and such a version may be retained.
        gone = {at for at, since in self._expired.items() if oldest >= since + IN_FLIGHT}
        return (own | newer) - gone

    def _named(self, commits: Iterable[FileInfo]) -> set[str]:
        found: dict[str, frozenset[str]] = {}
        self._all_read = True
        for info in commits:
            try:
                known = self._needs.get(info.name)
                found[info.name] = read_needs(self.files, info) if known is None else known
            except MissingFileError:
                self._all_read = False  # a collection from outside was faster
        self._needs = found
        return set().union(*found.values())

    def _find_unused(self, live: set[str]) -> dict[str, Parent]:
        if not self._looked:
            self._parents, self._looked = read_parents(self.files), True
        unused = unused_parents(self._parents, self.files, live)
        names = {shared_name(number, ""): parent for number, parent in unused.items()}
        return {name: parent for name, parent in names.items() if name not in self._released}

    def _remove_unneeded(self, candidates: dict[str, FileInfo]) -> Collected:
        now = self._clock()
        self._unneeded = {name: self._unneeded.get(name, now) for name in candidates}
        due = [info for name, info in candidates.items() if now - self._unneeded[name] >= self._grace]
        return self._remove(due, Collected())

    def _set_aside(self, oldest: int) -> list[FileInfo]:
        until = self._clock() - self._keep_aside
        old = [
            info
            for folder in ("rolled-back/", f"{STAGING}/")
            for info in self.files.list(folder)
            if info.modified < until
        ]
        claims = numbers(self.files)
        if len(claims) > _GENERATIONS:
            first = FOLDER + digits(min(claims[-_GENERATIONS], self.generation))
            aside = [info for info in self.files.list(FOLDER) if info.name < first and info.modified < until]
            needed = FOLDER + digits(self._made(max(oldest, 1)) if aside else 0)
            old += [info for info in aside if info.name < needed]
        return old

    def _made(self, version: int) -> int:
        """The run that a version is of (see `StateReader`), 0 if none is: those before it can be forgotten."""
        for number in reversed(begun(self.files)):
            if number not in self._begins:
                with suppress(StateDamagedError):  # a torn put of a run that died before it began
                    self._begins[number] = min(base.version for base in read_base(self.files, number).versions)
            if self._begins.get(number, version + 1) <= version:
                return number
        return 0

    def _remove(self, infos: Iterable[FileInfo], so_far: Collected) -> Collected:
        infos = list(infos)
        if infos:
            check_fence(self.files, self.generation)
        for info in infos:
            if info.name in self._unused:
                release(self._unused[info.name])
                self._released.add(info.name)
            else:
                self.files.delete(info.name)
        return Collected(so_far.objects + len(infos), so_far.bytes + sum(info.size for info in infos))


def _objects(requests: Iterable[Known]) -> dict[str, FileInfo]:
    """All objects of some requests, by name."""
    infos = [info for known in requests for info in (known.request, *known.others) if info is not None]
    return {info.name: info for info in infos}

"""Garbage collection from outside: a single pass over a location, also while its query runs.

The query's own `Collector` runs repeatedly, so it knows since when an object is unneeded. A single pass uses times
instead: an object that was needed an hour ago counts as needed. Spark's offset log and the times of the commits show
which batch ran an hour ago, and the length of the log shows the number of retained batches.

- A commit is removed if its version was not retained an hour ago, and no retained commit names it.
- A file in `files/` is removed if no retained commit names it and it is an hour old. It must also be so old that the
  running batch cannot name it any more. A file exists before the manifest that names it, so files are listed first.
  Some stores set the time of a multipart upload to its beginning. So a file large enough for a multipart upload counts
  as a day younger.
- Files of remote compaction stay as long as their request (see `checkpoint.compaction`). A request is removed if its
  run is fenced. It is also removed if it is so old that no retained version can name its files.
- Initial state (`initial/`) is removed once the second batch is planned.
- A file in `staging/` is removed a day after its last change.
- The claim, base and fence mark of a generation are removed if all retained commits are of newer generations, and the
  files are an hour old. The newest 16 generations stay.

Objects that forks share with the location stay, too. A fork releases a parent once no retained commit names an object
of it. The pins are read after Spark's offset log and the listings (see `checkpoint.forks`).

A run that starts meanwhile begins with a retained version, and its files are younger than all these limits. Only listed
objects are deleted, and their names are never used again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from millpond.checkpoint.compaction.requests import (
    CLOCK_MARGIN_SECONDS,
    MAX_WAIT_SECONDS,
    RequestState,
    list_requests,
    request_of_file,
)
from millpond.checkpoint.forks.parents import Parent, read_parents
from millpond.checkpoint.forks.pins import Pin, pinned, read_pins, release, unused_parents
from millpond.checkpoint.formats.commit import only_commits, parse_commit_name
from millpond.checkpoint.generation import FOLDER, INITIAL, fenced_name, generations_in, newest_base
from millpond.checkpoint.retention.needs import IN_FLIGHT_BATCHES, committed_at, newest_version_planned_by, read_needs
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.files.backends.local import STAGING
from millpond.files.backends.uploads import PART_BYTES

MIN_AGE_SECONDS = 3600.0
"""Seconds for which unneeded objects stay, so that a reader that has just opened them can finish."""

MAX_UPLOAD_SECONDS = 86400.0
"""Longest duration of a multipart upload, in seconds."""

STAGING_AGE_SECONDS = 86400.0
"""Seconds after its last change from which a staging file counts as left by a dead process."""

MIN_KEPT_GENERATIONS = 16
"""Smallest number of generations whose files stay: they are small and document which runs there were."""

_READS = 16
"""Commits that are read at once."""

Kind = str
"""Description of a kind of orphan, for people."""


@dataclass(frozen=True)
class Orphans:
    """The unneeded and the missing objects of a location.

    Attributes:
        unneeded: the unneeded objects, by kind.
        missing: names of missing objects that retained manifests name, with the newest version that needs each.
        pins: pins of forks, by name; the objects that they hold are not in `unneeded`.
        parents: for a fork, the parents that it does not need any more, by number.
    """

    unneeded: Mapping[Kind, tuple[FileInfo, ...]]
    missing: Mapping[str, int]
    pins: Mapping[str, Pin]
    parents: Mapping[int, Parent]

    def remove(self, files: FileSystem) -> None:
        """Delete the unneeded objects and release unneeded parents; an interruption is harmless."""
        for infos in self.unneeded.values():
            for info in infos:
                files.delete(info.name)
        for parent in self.parents.values():
            release(parent)


def find_orphans(files: FileSystem, planned: Mapping[int, float], *, now: float | None = None) -> Orphans:
    """Find objects that are not needed, and needed objects that are missing.

    Args:
        files: the location's `millpond/` folder.
        planned: the batches in Spark's offset log, and when each was written, in seconds since the epoch. The log must
            be read before this call.
        now: seconds since the epoch; None takes the current time.

    Raises:
        StateDamagedError: a retained commit cannot be read, so its needs are unknown.
    """
    now = time.time() if now is None else now
    until = now - MIN_AGE_SECONDS
    running = max(planned, default=-1)
    retained = max(running - min(planned, default=0), IN_FLIGHT_BATCHES)
    base = newest_base(files)
    kept = max(retained, base.retain if base is not None else 0)
    # The order of the listings is an invariant: files before commits, requests in between (see `Collector.collect`).
    runs = files.list("files/")
    requests = list_requests(files)
    commits = only_commits(files.list("commits/"))
    generations = files.list(FOLDER)
    newest = max(generations_in(info.name for info in generations), default=0)
    # Spark may have removed all entries of that age from its offset log; commits stay longer.
    ran = max((batch for batch, written in planned.items() if written <= until), default=-1)
    committed = newest_version_planned_by(
        (info for info in commits if parse_commit_name(info.name)[0] <= running), until
    )
    oldest = max(ran, committed - 1) - kept
    needs = _needs(files, [info for info in commits if parse_commit_name(info.name)[0] >= oldest])
    named = set().union(*needs.values())
    pins = read_pins(files)
    parents = read_parents(files)
    unused = unused_parents(parents, files, named)
    live = named | needs.keys() | pinned(pins)
    # A result taken at the last moment is named up to two versions later, and such a version may be retained.
    expired = min(now, committed_at(commits, oldest - IN_FLIGHT_BATCHES)) - MAX_WAIT_SECONDS - CLOCK_MARGIN_SECONDS
    live_requests = {key for key, state in requests.items() if _may_be_named(state, newest, expired)}
    old = min(until, committed_at(commits, running - IN_FLIGHT_BATCHES))
    return Orphans(
        {
            "files that no retained version names": tuple(
                info
                for info in runs
                if info.name not in live
                and _latest_upload_end(info) < old
                and request_of_file(info.name) not in live_requests
            ),
            "commits that no retained version needs": tuple(
                info for info in commits if info.name not in live and parse_commit_name(info.name)[0] < oldest
            ),
            "requests to compactors that no slot waits for": tuple(
                info
                for identity, state in sorted(requests.items())
                for info in (*((state.request,) if state.request else ()), *state.replies)
                if identity not in live_requests and info.modified < until
            ),
            "initial state that was taken up": tuple(
                info for info in files.list(INITIAL) if running >= 1 and info.modified < until
            ),
            "files that were never finished": tuple(
                info for info in files.list(f"{STAGING}/") if info.modified < now - STAGING_AGE_SECONDS
            ),
            "generations before those of all retained versions": _old_generations(generations, commits, oldest, until),
        },
        _missing(files, needs, {info.name for info in (*runs, *commits)}, running - retained),
        pins,
        unused,
    )


def _old_generations(
    infos: Sequence[FileInfo], commits: Iterable[FileInfo], oldest: int, until: float
) -> tuple[FileInfo, ...]:
    """Return the files of generations that no version from `oldest` on needs, in the order of their removal.

    A reader finds a version through the newest run that began with it or with an older one. That run committed the
    version, or took it over from an earlier run. So no generation below that of the oldest retained commit is needed.

    Args:
        infos: the listing of `generations/`.
        commits: a listing of `commits/` from before.
        oldest: the oldest retained version.
        until: time from which files stay, in seconds since the epoch.
    """
    committed = (parse_commit_name(info.name) for info in commits)
    needed = min((generation for version, generation in committed if version >= oldest), default=0)
    stored = generations_in(info.name for info in infos)
    first = min([needed, *stored[-MIN_KEPT_GENERATIONS:]])
    old = [
        (info.name == fenced_name(number), info)
        for info in infos
        for number in generations_in([info.name])
        if number < first and info.modified < until
    ]
    # Oldest first: without a newer base, a reader would fall back to an older run's commits of the same version. Marks
    # last: a run with a claim and no mark counts as not fenced.
    return tuple(info for _, info in sorted(old))


def _latest_upload_end(info: FileInfo) -> float:
    """Return the latest time at which a file's upload ended, in seconds since the epoch."""
    return info.modified + (MAX_UPLOAD_SECONDS if info.size > PART_BYTES else 0.0)


def _may_be_named(state: RequestState, newest: int, expired: float) -> bool:
    """Return whether a version may still name the result of a request."""
    if state.generation < newest or (state.request is None and state.generation == newest):
        return False
    return state.request is None or state.generation > newest or state.request.modified >= expired


def _needs(files: FileSystem, commits: Sequence[FileInfo]) -> dict[str, frozenset[str]]:
    """Return the names that each commit needs; concurrently, since a store takes its time for each."""

    def read(info: FileInfo) -> frozenset[str] | None:
        try:
            return read_needs(files, info)
        except MissingFileError:  # the query's own collection has removed it meanwhile
            return None

    with ThreadPoolExecutor(_READS) as pool:
        found = zip(commits, pool.map(read, commits), strict=True)
        return {info.name: needs for info, needs in found if needs is not None}


def _missing(files: FileSystem, needs: Mapping[str, frozenset[str]], existing: set[str], oldest: int) -> dict[str, int]:
    """Find missing objects that commits from version `oldest` on need, with the newest version that needs each.

    Commits that were removed meanwhile do not count. Objects that are found are added to `existing`: many commits of a
    fork name those of its parent, which the fork does not list.
    """
    missing: dict[str, int] = {}
    for commit, names in needs.items():
        version = parse_commit_name(commit)[0]
        if version < oldest:
            continue  # the query's own collection may be about to remove its objects
        for name in names - existing:
            # An object written after its folder was listed exists. An object of a removed commit is not needed.
            if files.exists(name):
                existing.add(name)
            elif files.exists(commit):
                missing[name] = max(version, missing.get(name, 0))
    return dict(sorted(missing.items()))

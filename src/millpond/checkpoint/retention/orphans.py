"""What nobody needs below a location, found and removed from outside: once, and also while the query runs.

The query's own `Collector` looks again and again, so it knows since when something is not needed. Who looks once goes
by times instead: what was needed an hour ago is needed. An entry of Spark's log of plans tells which batch ran then,
and the length of that log how many batches are retained.

- A commit goes if it is of a version that was not retained an hour ago, and no commit that stays names it.
- A file in `files/` goes if no commit that stays names it, and it is an hour old, and older than what the batch that
  runs now may still come to name. A file is there before the manifest that names it; so files are listed first. Some
  stores give a file that came in parts the time at which its upload began: one that is so long counts as a day younger.
- What was made on request stays as long as the request does (see `checkpoint.compaction`). That goes if its run is
  fenced, or if it is so old that no version of which the batch that runs may go back to can name what was made.
- What the first batch began with (`initial/`) goes once the second is planned.
- A file in `staging/` goes when a day has passed since it was last written to.

What forks have of the location stays, too. Of a fork, what no commit that stays has of a parent is given back (see
`checkpoint.forks`: the pins are read after Spark's log and the lists).

A run that starts meanwhile begins with a version that is retained, and whatever it writes is younger than all this.
Only what was listed is deleted, and none of it comes back: names are never used twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from millpond.checkpoint.compaction.requests import LIMIT, MARGIN, Known, made_for, requests
from millpond.checkpoint.forks.parents import Parent, read_parents
from millpond.checkpoint.forks.pins import Pin, pinned, read_pins, release, unused_parents
from millpond.checkpoint.formats.commit import parse_commit_name
from millpond.checkpoint.generation import INITIAL, newest_retain, numbers
from millpond.checkpoint.retention.needs import IN_FLIGHT, committed_at, read_needs
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.files.backends.local import STAGING
from millpond.files.backends.uploads import PART

AGE = 3600.0
"""Seconds for which what is not needed any more stays, for whoever has just begun to read it."""

UPLOAD = 86400.0
"""Seconds that an upload in parts may take."""

STAGING_AGE = 86400.0
"""Seconds after its last change from which a file written aside counts as left by a process that died."""

Kind = str
"""What an orphan is, in words."""


@dataclass(frozen=True)
class Orphans:
    """What was found below a location.

    Attributes:
        found: by kind, the objects that nobody needs.
        missing: what manifests of retained versions name and is not there, with the newest such version.
        pins: of forks, by name: what these have of the location is not among what was found.
        parents: of a fork, those of which it needs nothing any more, by number.
    """

    found: Mapping[Kind, tuple[FileInfo, ...]]
    missing: Mapping[str, int]
    pins: Mapping[str, Pin]
    parents: Mapping[int, Parent]

    def remove(self, files: FileSystem) -> None:
        """Delete what was found; to be interrupted in the middle does no harm."""
        for infos in self.found.values():
            for info in infos:
                files.delete(info.name)
        for parent in self.parents.values():
            release(parent)


def find_orphans(files: FileSystem, planned: Mapping[int, float], *, now: float | None = None) -> Orphans:
    """Look for what nobody needs, and for what is needed and not there.

    Args:
        files: the location's `millpond/` folder.
        planned: the batches in Spark's log of plans, with the time at which each was written. It must have been read
            before this is called.
        now: seconds since the epoch.

    Raises:
        StateDamagedError: a commit that is retained cannot be read, so what it names is not known.
    """
    now = time.time() if now is None else now
    running = max(planned, default=-1)
    retained = max(running - min(planned, default=0), IN_FLIGHT)
    kept = max(retained, newest_retain(files))
    oldest = max((batch for batch, at in planned.items() if at <= now - AGE), default=-1) - kept
    runs = files.list("files/")
    asked = requests(files)  # in between: a request goes when a commit names what was made for it
    commits = files.list("commits/")
    newest = max(numbers(files), default=0)
    needs = dict(_needs(files, [info for info in commits if parse_commit_name(info.name)[0] >= oldest]))
    named = set().union(*needs.values())
    pins = read_pins(files)
    parents = read_parents(files)
    unused = unused_parents(parents, files, named)
    stays = named | needs.keys() | pinned(pins)
    # What was taken at the last moment is named two versions later, and such a version may be retained.
    expired = min(now, committed_at(commits, oldest - IN_FLIGHT)) - LIMIT - MARGIN
    waiting = {at for at, known in asked.items() if _waiting(known, newest, expired)}
    old = min(now - AGE, committed_at(commits, running - IN_FLIGHT))
    return Orphans(
        {
            "files that no retained version names": tuple(
                info
                for info in runs
                if info.name not in stays and _complete(info) < old and made_for(info.name) not in waiting
            ),
            "commits that no retained version needs": tuple(
                info for info in commits if info.name not in stays and parse_commit_name(info.name)[0] < oldest
            ),
            "requests to compactors that nobody waits for": tuple(
                info
                for identity, known in sorted(asked.items())
                for info in (*((known.request,) if known.request else ()), *known.others)
                if identity not in waiting and info.modified < now - AGE
            ),
            "initial state that was taken up": tuple(
                info for info in files.list(INITIAL) if running >= 1 and info.modified < now - AGE
            ),
            "files that were never finished": tuple(
                info for info in files.list(f"{STAGING}/") if info.modified < now - STAGING_AGE
            ),
        },
        _missing(files, needs, {info.name for info in (*runs, *commits)}, running - retained),
        pins,
        unused,
    )


def _complete(info: FileInfo) -> float:
    """When a file was whole, at the latest."""
    return info.modified + (UPLOAD if info.size > PART else 0.0)


def _waiting(known: Known, newest: int, expired: float) -> bool:
    """Whether a version may come to name what is made for a request."""
    if known.generation < newest or (known.request is None and known.generation == newest):
        return False
    return known.request is None or known.generation > newest or known.request.modified >= expired


def _needs(files: FileSystem, commits: list[FileInfo]) -> Iterator[tuple[str, frozenset[str]]]:
    for info in commits:
        try:
            yield info.name, read_needs(files, info)
        except MissingFileError:
            continue  # the query's own collection was faster


def _missing(files: FileSystem, needs: Mapping[str, frozenset[str]], there: set[str], oldest: int) -> dict[str, int]:
    """What commits from version `oldest` on need and is not there, though they still are."""
    missing: dict[str, int] = {}
    for commit, names in needs.items():
        version = parse_commit_name(commit)[0]
        if version < oldest:
            continue  # the query's own collection may be about to remove what it names
        for name in names - there:
            # What came after its folder was listed is there, and what went was not needed any more.
            if not files.exists(name) and files.exists(commit):
                missing[name] = max(version, missing.get(name, 0))
    return dict(sorted(missing.items()))

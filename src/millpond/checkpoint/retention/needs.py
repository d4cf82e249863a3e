"""The objects that commits need, and commit times of versions: shared by both garbage collections."""

from __future__ import annotations

import math
from collections.abc import Iterable

from millpond.checkpoint.formats.commit import parse_commit_name, read_checked_header
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.files.backends.filesystem import FileInfo, FileSystem

IN_FLIGHT_BATCHES = 3
"""Batches after which an unnamed file is garbage.

A file that existed while batch *b − 3* ran is named by version *b − 1*, which is durable when *b* runs, or never.
"""


def read_needs(files: FileSystem, info: FileInfo) -> frozenset[str]:
    """Read the names of the objects that a commit's manifests need: commits with older deltas, and run files.

    Raises:
        StateDamagedError: the commit is cut short or altered, or has the name of another one.
        MissingFileError: the commit was removed; a subclass of `StateDamagedError`.
    """
    return needs_of(read_checked_header(files, info.name, info.size).manifests)


def needs_of(manifests: Iterable[PartitionManifest]) -> frozenset[str]:
    """Return the names of the objects that some manifests need: commits with deltas, and run files."""
    tables = [table for manifest in manifests for table in manifest.tables.values()]
    return frozenset(
        [delta.commit for table in tables for delta in table.deltas]
        + [run.name for table in tables for run in table.runs.runs]
    )


def committed_at(commits: Iterable[FileInfo], version: int) -> float:
    """Return when the newest version up to `version` was committed, in seconds since the epoch; −inf if none was."""
    times: dict[int, float] = {}
    for info in commits:
        committed = parse_commit_name(info.name)[0]
        if committed <= version:
            times[committed] = min(info.modified, times.get(committed, info.modified))
    return times[max(times)] if times else float("-inf")


def newest_version_planned_by(commits: Iterable[FileInfo], time: float) -> int:
    """Return the newest version whose batch was planned by `time`, judged by commit times; 0 if there is none.

    Spark plans a batch before its version is committed, so a commit by `time` proves the plan. After a return to an
    older batch, versions have old and new commits. So versions count only below the first one with a later commit.

    Args:
        commits: commits of versions up to that of the running batch.
        time: seconds since the epoch.
    """
    committed = [(parse_commit_name(info.name)[0], info.modified) for info in commits]
    later = min((version for version, modified in committed if modified > time), default=math.inf)
    return max((version for version, _ in committed if version < later), default=0)

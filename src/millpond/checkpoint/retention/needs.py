"""The objects that commits need, and commit times of versions: shared by both garbage collections."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.checkpoint.formats.commit import parse_commit_name, read_header
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.files.backends.filesystem import FileInfo, FileSystem

IN_FLIGHT_BATCHES = 3
"""Batches after which an unnamed file is garbage.

A file that existed while batch *b − 3* ran is named by version *b − 1*, which is durable when *b* runs, or never.
"""


def read_needs(files: FileSystem, info: FileInfo) -> frozenset[str]:
    """Read the names of the objects that a commit's manifests need: commits with older deltas, and run files.

    Raises:
        StateDamagedError: the commit is cut short or altered.
        MissingFileError: the commit was removed; a subclass of `StateDamagedError`.
    """
    return needs_of(read_header(files, info.name, info.size).manifests)


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

"""What commits need, and when a version was committed: what both ways to remove garbage go by."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.checkpoint.formats.commit import parse_commit_name, read_header
from millpond.checkpoint.formats.manifest import PartitionManifest
from millpond.files.backends.filesystem import FileInfo, FileSystem

IN_FLIGHT = 3
"""A file that was there while batch *b − 3* ran is named by version *b − 1*, durable when *b* runs, or never."""


def read_needs(files: FileSystem, info: FileInfo) -> frozenset[str]:
    """The objects that a commit's manifests name: commits that hold older deltas, and run files.

    Raises:
        StateDamagedError: the commit is cut short or altered; `MissingFileError` when it is gone.
    """
    return needs_of(read_header(files, info.name, info.size).manifests)


def needs_of(manifests: Iterable[PartitionManifest]) -> frozenset[str]:
    """The objects that some manifests name: commits that hold deltas, and run files."""
    tables = [table for manifest in manifests for table in manifest.tables.values()]
    return frozenset(
        [delta.commit for table in tables for delta in table.deltas]
        + [run.name for table in tables for run in table.runs.runs]
    )


def committed_at(commits: Iterable[FileInfo], version: int) -> float:
    """When the newest version up to `version` was committed; −inf when there is none."""
    times: dict[int, float] = {}
    for info in commits:
        found = parse_commit_name(info.name)[0]
        if found <= version:
            times[found] = min(info.modified, times.get(found, info.modified))
    return times[max(times)] if times else float("-inf")

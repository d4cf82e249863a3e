"""Garbage collection from outside of the query: `millpond state gc`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from millpond.checkpoint.forks.parents import read_parents
from millpond.checkpoint.formats.commit import only_commits
from millpond.checkpoint.retention.needs import read_needs
from millpond.checkpoint.retention.orphans import Orphans, find_orphans
from millpond.errors import StateDamagedError, UsageError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.files.locations.forked import parse_shared
from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints.finding import find_state
from millpond.query.logs.copying import check_finished
from millpond.query.logs.query_logs import QueryLogs
from millpond.state_reader.reader import StateReader


def orphans_of(checkpoint: str, *, now: float | None = None) -> tuple[FileSystem, Orphans]:
    """Find the unneeded files of a query's state, and the needed files that are missing.

    Args:
        checkpoint: path or URL of the query's checkpoint location.
        now: seconds since the epoch.

    Returns:
        The state's `millpond/` folder and the orphans in it.

    Raises:
        UsageError: the location has no logs of Spark, or no state.
        StateDamagedError: the state does not match Spark's logs, or a commit cannot be read, so that the needed files
            are not known.
    """
    if not checkpoint.strip():
        raise UsageError("The location of the checkpoint is empty.", action="Give the query's checkpointLocation.")
    checkpoint_files = open_filesystem(checkpoint)
    query_logs = QueryLogs(checkpoint_files)
    if query_logs.query_id() is None:
        check_finished(checkpoint_files)
        raise UsageError(
            "There are no offset log and commit log of Spark here, which show the batches that may be needed.",
            action="Give the query's checkpointLocation, also if its state lies elsewhere.",
            file=checkpoint_files.url,
        )
    # Read the logs before the state: batches that Spark commits later need no older version.
    planned, committed = query_logs.entry_times("offsets"), query_logs.last_committed
    reader = StateReader(find_state(checkpoint))
    if committed >= 0 and not any(reader.is_complete(version) for version in reader.known() if version >= committed):
        raise StateDamagedError(
            f"Spark has committed batch {committed}, and no version from {committed} on is whole: what else is needed "
            "is not known, and nothing is removed.",
            action="`millpond state verify` names what is damaged.",
            file=reader.files.url,
        )
    return reader.files, find_orphans(reader.files, planned, now=now)


def still_shared(files: FileSystem, orphans: Orphans) -> dict[str, int]:
    """Count the objects of other checkpoints that a fork still needs.

    Args:
        files: the fork's `millpond/` folder.
        orphans: the unneeded files in it.

    Returns:
        The number of objects by the location of the other checkpoint.
    """
    parents = read_parents(files)
    if parents is None:
        return {}
    unneeded = {info.name for infos in orphans.unneeded.values() for info in infos}
    needed: set[str] = set()
    for info in only_commits(files.list("commits/")):
        if info.name not in unneeded:
            with suppress(MissingFileError):  # already removed by the query's own collection
                needed |= read_needs(files, info)
    counts = Counter(
        shared.parent
        for shared in map(parse_shared, needed)
        if shared is not None and shared.parent not in orphans.parents
    )
    return {parents.parents[number].location: count for number, count in sorted(counts.items())}

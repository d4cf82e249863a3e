"""Preparation of a checkpoint that goes on from another one, and the copy of Spark's files into it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from millpond.checkpoint.forks.parents import PARENTS_FILE
from millpond.errors import StateIncompatibleError, TransientError, UsageError
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.query.logs.query_logs import LOGS, METADATA, QueryLogs

_MAX_TRIES = 5
_TRY_AGAIN = "Delete what there is at the new place, and try again."


def list_objects(files: FileSystem, prefix: str) -> list[FileInfo]:
    """List objects without folder markers: empty objects that Hadoop's S3 connector writes for a folder.

    The key of a marker ends in a slash, which the names in a list do not show. No object exists under such a name.
    """
    infos = files.list(prefix)
    folders = {info.name[:end] for info in infos for end, letter in enumerate(info.name) if letter == "/"}
    return [info for info in infos if info.size or (info.name not in folders and files.exists(info.name))]


def is_unfinished(target: FileSystem) -> bool:
    """Return whether a fork or import was interrupted: `parents.json` exists, and `metadata`, the last file, does not.

    Args:
        target: the checkpoint.
    """
    return target.exists(f"millpond/{PARENTS_FILE}") and not target.exists(METADATA)


def check_finished(target: FileSystem) -> None:
    """Refuse a checkpoint whose fork or import was interrupted.

    Raises:
        StateIncompatibleError: the checkpoint is unfinished.
    """
    if is_unfinished(target):
        raise StateIncompatibleError(
            "This checkpoint was to go on from the state of another, and its making was interrupted.",
            action="Delete it, and fork (millpond state fork) or import (millpond.import_checkpoint) again, "
            "unless that is still going on.",
            file=target.url,
        )


def check_free(target: FileSystem) -> None:
    """Check that a location is empty.

    Raises:
        UsageError: the location has objects.
    """
    if is_unfinished(target):
        raise UsageError(
            "There is something here already: what a fork or an import that was interrupted has left.",
            action="Delete it, or name another place.",
            file=target.url,
        )
    if list_objects(target, ""):
        raise UsageError("There is something here already.", action="Name another place.", file=target.url)


def copy_folders(original: FileSystem, target: FileSystem, folders: Sequence[str]) -> None:
    """Copy folders of Spark's own small files, each of which is written once.

    A running query may replace several files by a compacted one meanwhile, so the listing is repeated.

    Raises:
        TransientError: files disappeared in every try.
    """
    done: set[str] = set()
    for _ in range(_MAX_TRIES):
        with suppress(MissingFileError):
            for folder in folders:
                for info in list_objects(original, folder):
                    if info.name not in done and not info.name.rpartition("/")[2].startswith("."):
                        target.put(info.name, [original.get(info.name)])
                        done.add(info.name)
            return
    raise TransientError(
        "Spark replaced files of its sources during every try to copy them.",
        action=_TRY_AGAIN,
        file=original.url,
    )


def copy_logs(original: FileSystem, target: FileSystem, query_logs: QueryLogs, version: int) -> None:
    """Copy the entries of Spark's logs for the batches before a version.

    Raises:
        TransientError: an entry that Spark reads at a start no longer exists.
    """
    last = version - 1
    needed = {f"offsets/{max(last - 1, 0)}", f"offsets/{last}", f"commits/{last}"}
    entries = {f"{log}/{batch}" for log in LOGS for batch in query_logs.entry_times(log) if batch <= last}
    for name in sorted(entries | needed):
        try:
            target.put(name, [original.get(name)])
        except MissingFileError:  # no longer retained by Spark
            if name in needed:
                raise not_retained_error(version) from None


def not_retained_error(version: int) -> TransientError:
    """Return the error for a version whose entries Spark's logs no longer have."""
    return TransientError(
        "The query has gone on, and Spark's offset log and commit log do not have this version's batches now.",
        action=_TRY_AGAIN,
        version=version,
    )

"""A place for a checkpoint that goes on from another, and Spark's part of that, copied there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from millpond.checkpoint.forks.parents import NAME as PARENTS
from millpond.errors import StateIncompatibleError, TransientError, UsageError
from millpond.files.backends.filesystem import FileInfo, FileSystem, MissingFileError
from millpond.query.ledger.ledger import LOGS, METADATA, Ledger

_TRIES = 5
_AGAIN = "Delete what there is at the new place, and try again."


def objects_of(files: FileSystem, prefix: str) -> list[FileInfo]:
    """What `list` has, but for markers: empty objects that Hadoop's S3 connector puts where it makes a folder.

    Their keys end in a slash, which stores do not tell of the names in a list, and nothing is there under those names.
    """
    infos = files.list(prefix)
    folders = {info.name[:end] for info in infos for end, letter in enumerate(info.name) if letter == "/"}
    return [info for info in infos if info.size or (info.name not in folders and files.exists(info.name))]


def is_unfinished(place: FileSystem) -> bool:
    """Whether a checkpoint was to go on from another, and does not have the last of what it takes for that.

    Args:
        place: the checkpoint.
    """
    return place.exists(f"millpond/{PARENTS}") and not place.exists(METADATA)


def check_finished(place: FileSystem) -> None:
    """Refuse a checkpoint that was to go on from another, and cannot.

    Raises:
        StateIncompatibleError: so it is.
    """
    if is_unfinished(place):
        raise StateIncompatibleError(
            "This checkpoint was to go on from the state of another, and its making was interrupted.",
            action="Delete it, and fork (millpond state fork) or import (millpond.import_checkpoint) again, "
            "unless that is still going on.",
            file=place.url,
        )


def check_free(place: FileSystem) -> None:
    """See that a checkpoint can be made.

    Raises:
        UsageError: something is there.
    """
    if is_unfinished(place):
        raise UsageError(
            "There is something here already: what a fork or an import that was interrupted has left.",
            action="Delete it, or name another place.",
            file=place.url,
        )
    if objects_of(place, ""):
        raise UsageError("There is something here already.", action="Name another place.", file=place.url)


def copy_folders(original: FileSystem, place: FileSystem, folders: Sequence[str]) -> None:
    """Copy Spark's own small files, which are written once; it may replace several by one meanwhile."""
    done: set[str] = set()
    for _ in range(_TRIES):
        with suppress(MissingFileError):
            for folder in folders:
                for info in objects_of(original, folder):
                    if info.name not in done and not info.name.rpartition("/")[2].startswith("."):
                        place.put(info.name, [original.get(info.name)])
                        done.add(info.name)
            return
    raise TransientError(
        "Spark replaced what its sources have noted each time it was to be copied.",
        action=_AGAIN,
        file=original.url,
    )


def copy_ledger(original: FileSystem, place: FileSystem, ledger: Ledger, version: int) -> None:
    """Copy the entries of the batches up to the version.

    Raises:
        TransientError: one is gone that Spark reads at a start.
    """
    last = version - 1
    needed = {f"offsets/{max(last - 1, 0)}", f"offsets/{last}", f"commits/{last}"}
    entries = {f"{log}/{batch}" for log in LOGS for batch in ledger.written(log) if batch <= last}
    for name in sorted(entries | needed):
        try:
            place.put(name, [original.get(name)])
        except MissingFileError:  # Spark retains it no longer
            if name in needed:
                raise out_of_reach(version) from None


def out_of_reach(version: int) -> TransientError:
    """The error for a version that Spark does not go back to any more."""
    return TransientError(
        "The query has gone on, and its ledger does not go back to this version any more, or not just now.",
        action=_AGAIN,
        version=version,
    )

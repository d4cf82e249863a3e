"""Spark's part of a checkpoint, copied for one that goes on from there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from millpond.errors import TransientError
from millpond.files.backends.filesystem import FileSystem, MissingFileError
from millpond.query.ledger.ledger import LOGS, Ledger

_TRIES = 5


def copy_folders(original: FileSystem, place: FileSystem, folders: Sequence[str]) -> None:
    """Copy Spark's own small files, which are written once; it may replace several by one meanwhile."""
    done: set[str] = set()
    for _ in range(_TRIES):
        with suppress(MissingFileError):
            for folder in folders:
                for info in original.list(folder):
                    if info.name not in done and not info.name.rpartition("/")[2].startswith("."):
                        place.put(info.name, [original.get(info.name)])
                        done.add(info.name)
            return
    raise TransientError(
        "Spark replaced what its sources have noted each time it was to be copied.",
        action="Delete what there is of the fork, and try again.",
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
        action="Delete what there is of the fork, and try again.",
        version=version,
    )

"""Queries that run on this host: one note per query in the directory of its application's slots."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from millpond.slot.process.identity import Process
from millpond.slot.process.lifecycle import SlotDirectory

_FOLDER = "queries"


class RunningNote(msgspec.Struct, frozen=True):
    """Note of a running query.

    Attributes:
        query: key by which slots identify it (`OperatorTask.key`).
        run: the id of this run.
        location: URL of its state.
        process: the application's JVM.
    """

    query: str
    run: str
    location: str
    process: Process


def note_query(directory: SlotDirectory, note: RunningNote) -> None:
    """Write the note of a running query, replacing that of an earlier run.

    Args:
        directory: the existing directory of the application's slots on this host.
        note: the query.
    """
    folder = directory.path / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    # Write and rename, so that readers never see a partial note.
    fresh = folder / f".{note.query}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.encode(note))
    fresh.rename(folder / note.query)


def forget_query(directory: SlotDirectory, query: str, run: str) -> None:
    """Remove the note of a query whose run has ended, unless it belongs to a newer run."""
    path = directory.path / _FOLDER / query
    note = _read(path)
    if note is not None and note.run == run:
        path.unlink(missing_ok=True)


def find_query(location: str) -> tuple[SlotDirectory, RunningNote] | None:
    """Find this user's query that runs on this host with its state at `location`.

    Returns:
        The directory of its application's slots, and its note; None if there is no such query.
    """
    canonical_location = canonical(location)
    for path in Path(tempfile.gettempdir(), f"millpond-{os.getuid()}").glob(f"*/{_FOLDER}/[!.]*"):
        note = _read(path)
        if note is not None and canonical(note.location) == canonical_location and note.process.alive():
            return SlotDirectory(path.parent.parent), note
    return None


def _read(path: Path) -> RunningNote | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningNote)
    except (OSError, msgspec.DecodeError):  # the query has just ended
        return None


def canonical(location: str) -> str:
    """Normalize a location, so that different spellings compare equal."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return os.path.realpath(location)
    return os.path.realpath("/" + rest.lstrip("/")) if scheme == "file" else location.rstrip("/")

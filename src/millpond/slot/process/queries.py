"""Which queries run on this host: a note of each in the directory of its application's slots."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from millpond.slot.process.identity import Process
from millpond.slot.process.lifecycle import SlotDirectory

_FOLDER = "queries"


class RunningNote(msgspec.Struct, frozen=True):
    """A query that runs.

    Attributes:
        query: as slots know it (`PipeTask.key`).
        run: the id of this run.
        location: URL of its state.
        process: of the application (its JVM).
    """

    query: str
    run: str
    location: str
    process: Process


def note_query(directory: SlotDirectory, note: RunningNote) -> None:
    """Note that a query runs; in place of what was noted of an earlier run.

    Args:
        directory: of the application's slots on this host; it is there.
        note: the query.
    """
    folder = directory.path / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    fresh = folder / f".{note.query}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.encode(note))
    fresh.rename(folder / note.query)


def forget_query(directory: SlotDirectory, query: str, run: str) -> None:
    """Remove the note of a query whose run has ended, unless it is of a newer run."""
    path = directory.path / _FOLDER / query
    note = _read(path)
    if note is not None and note.run == run:
        path.unlink(missing_ok=True)


def find_query(location: str) -> tuple[SlotDirectory, RunningNote] | None:
    """The query of this user that runs on this host with its state at `location`, and its application's directory."""
    wanted = canonical(location)
    for path in Path(tempfile.gettempdir(), f"millpond-{os.getuid()}").glob(f"*/{_FOLDER}/[!.]*"):
        note = _read(path)
        if note is not None and canonical(note.location) == wanted and note.process.alive():
            return SlotDirectory(path.parent.parent), note
    return None


def _read(path: Path) -> RunningNote | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningNote)
    except (OSError, msgspec.DecodeError):  # it has just ended
        return None


def canonical(location: str) -> str:
    """A location in one of the forms that it may be written in."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return os.path.realpath(location)
    return os.path.realpath("/" + rest.lstrip("/")) if scheme == "file" else location.rstrip("/")

"""Queries that run on this host: one note per query in the directory of its application's slots."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from millpond.files.locations.opening import same_place
from millpond.slot.process.identity import Process
from millpond.slot.process.lifecycle import SlotDirectory

_FOLDER = "queries"


class QueryRecord(msgspec.Struct, frozen=True):
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


def record_query(directory: SlotDirectory, record: QueryRecord) -> None:
    """Write the record of a running query, replacing that of an earlier run.

    Args:
        directory: the existing directory of the application's slots on this host.
        record: the query.
    """
    folder = directory.path / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    # Write and rename, so that readers never see a partial record.
    fresh = folder / f".{record.query}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.encode(record))
    fresh.rename(folder / record.query)


def remove_query(directory: SlotDirectory, query: str, run: str) -> None:
    """Remove the record of a query whose run has ended, unless it belongs to a newer run."""
    path = directory.path / _FOLDER / query
    record = _read(path)
    # A newer run of the query may have replaced the record already.
    if record is not None and record.run == run:
        path.unlink(missing_ok=True)


def find_running_query(location: str) -> tuple[SlotDirectory, QueryRecord] | None:
    """Find this user's query that runs on this host with its state at `location`.

    Returns:
        The directory of its application's slots, and its record; None if there is no such query.
    """
    for path in Path(tempfile.gettempdir(), f"millpond-{os.getuid()}").glob(f"*/{_FOLDER}/[!.]*"):
        record = _read(path)
        if record is not None and same_place(record.location, location) and record.process.alive():
            return SlotDirectory(path.parent.parent), record
    return None


def _read(path: Path) -> QueryRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=QueryRecord)
    except (OSError, msgspec.DecodeError):  # the query has just ended
        return None

"""Garbage that is looked for from outside: `millpond state gc`."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

from millpond.checkpoint.forks.parents import read_parents
from millpond.checkpoint.retention.needs import read_needs
from millpond.checkpoint.retention.orphans import Orphans, find_orphans
from millpond.errors import StateDamagedError, UsageError
from millpond.files.backends.filesystem import FileSystem, MissingFileError, open_filesystem
from millpond.files.backends.forked import parse_shared
from millpond.query.ledger.copying import check_finished
from millpond.query.ledger.finding import find_state
from millpond.query.ledger.ledger import Ledger
from millpond.slot.reading.reader import StateReader


def orphans_of(checkpoint: str, *, now: float | None = None) -> tuple[FileSystem, Orphans]:
    """What nobody needs of a query's state, and where that lies; what is needed and is not there, too.

    Args:
        checkpoint: path or URL of the query's checkpoint location.
        now: seconds since the epoch.

    Raises:
        UsageError: there is no ledger of Spark's, or no state.
        StateDamagedError: the state is not that of the ledger, or a commit cannot be read: nothing is known for sure.
    """
    if not checkpoint.strip():
        raise UsageError("The location of the checkpoint is empty.", action="Give the query's checkpointLocation.")
    ledger_files = open_filesystem(checkpoint)
    ledger = Ledger(ledger_files)
    if ledger.query_id() is None:
        check_finished(ledger_files)
        raise UsageError(
            "There is no ledger of Spark's here, which tells what may be needed.",
            action="Give the query's checkpointLocation, also if its state lies elsewhere.",
            file=ledger_files.url,
        )
    # In this order: a batch that Spark commits later needs nothing older.
    planned, committed = ledger.written("offsets"), ledger.last("commits")
    reader = StateReader(find_state(checkpoint))
    if committed >= 0 and not any(reader.is_whole(version) for version in reader.known() if version >= committed):
        raise StateDamagedError(
            f"Spark has committed batch {committed}, and no version from {committed} on is whole: what else is needed "
            "is not known, and nothing is removed.",
            action="`millpond state verify` names what is damaged.",
            file=reader.files.url,
        )
    return reader.files, find_orphans(reader.files, planned, now=now)


def still_shared(files: FileSystem, orphans: Orphans) -> dict[str, int]:
    """How many objects of which other checkpoints a fork still needs.

    Args:
        files: the fork's `millpond/` folder. orphans: what is not needed there.
    """
    parents = read_parents(files)
    if parents is None:
        return {}
    unneeded = {info.name for infos in orphans.found.values() for info in infos}
    needed: set[str] = set()
    for info in files.list("commits/"):
        if info.name not in unneeded:
            with suppress(MissingFileError):  # the query's own collection was faster
                needed |= read_needs(files, info)
    counts = Counter(
        at.parent for at in map(parse_shared, needed) if at is not None and at.parent not in orphans.parents
    )
    return {parents.parents[number].location: count for number, count in sorted(counts.items())}

"""State that is not there, though Spark has committed batches: deleted, elsewhere, or in Spark's own state store."""

from __future__ import annotations

import re

from millpond.checkpoint.generation import begun
from millpond.checkpoint.pinned import NAME, PinnedQuery
from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem, join_url, open_filesystem, same_place
from millpond.query.ledger.ledger import Ledger
from millpond.query.ledger.ownership import state_of_last_run
from millpond.words import counted

_FOLDER = "millpond/"
_ANEW = "start with a new checkpointLocation, which reads the source from its beginning"
_STORES = re.compile(r"state/(\d+)/\d+/(?!_metadata/)")
"""The files of an operator that Spark keeps the state of, but for notes of what operators there are."""


def missing(
    files: FileSystem, ledger: Ledger, ledger_files: FileSystem, query: PinnedQuery, left: int | None
) -> StateDamagedError | StateIncompatibleError:
    """The error for a start without `query.json`, after batches that Spark has committed.

    Args:
        files: where the state should be. ledger, ledger_files: Spark's checkpoint. query: that is started.
        left: how many operators of it have their state on Spark; None if none of its operators has any.
    """
    operators = ", ".join(repr(operator.name) for operator in query.operators)
    done = f"Spark has committed {counted(ledger.last('commits') + 1, 'batch', 'batches')} ({ledger_files.url})"
    elsewhere = state_of_last_run(ledger_files)
    if elsewhere is not None and not same_place(join_url(elsewhere, _FOLDER), files.url):
        if _is_there(elsewhere):
            return StateIncompatibleError(
                f"{done}, but there is no state here: the last run had it at {elsewhere}.",
                action="Set spark.millpond.state.location as it was, or to where that folder lies now.",
                file=files.locate(NAME),
            )
        files = open_filesystem(join_url(elsewhere, _FOLDER))
    elif elsewhere is None and ledger_files.exists(f"{_FOLDER}{NAME}"):
        return StateIncompatibleError(
            f"{done}, but there is no state here: the last run had it in the checkpoint.",
            action="Unset spark.millpond.state.location: state in a checkpoint does not move to another location.",
            file=files.locate(NAME),
        )
    if files.list("commits/") or begun(files):
        return StateDamagedError(
            f"{done}, and the file {NAME}, which says what the state of {operators} looks like, is gone.",
            action=f"Put it back from a backup of the checkpoint, or {_ANEW}.",
            file=files.locate(NAME),
        )
    found = {match[1] for info in ledger_files.list("state/") if (match := _STORES.match(info.name))}
    if elsewhere is None and (left is None or len(found) > left):
        return StateIncompatibleError(
            f"{done}, but there is no state of Millpond's: the checkpoint was made by Spark's own state store.",
            action="Take it over (millpond.import_checkpoint), start with a new checkpointLocation, or go on with "
            "spark.millpond.enabled=false.",
            file=files.locate(NAME),
        )
    last = ledger.last("commits")
    moved = "if it was moved, set spark.millpond.state.location to the folder above it; " if elsewhere else ""
    return StateDamagedError(
        f"{done}, and the state of {operators} that they made is gone: there is nothing at {files.url}.",
        action=f"Put that folder back as it was after batch {last}, or the whole checkpoint from one backup; {moved}or "
        f"{_ANEW}.",
        version=last + 1,
        file=files.url,
    )


def _is_there(location: str) -> bool:
    """Whether there is state; also if that cannot be found out."""
    try:
        return open_filesystem(join_url(location, _FOLDER)).exists(NAME)
    except (MillpondError, OSError):
        return True

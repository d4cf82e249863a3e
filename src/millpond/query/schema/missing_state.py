"""Errors for missing state after committed batches: it was deleted, moved, or is in Spark's own state store."""

from __future__ import annotations

import re

from millpond.checkpoint.formats.commit import only_commits
from millpond.checkpoint.generation import generations_with_base
from millpond.checkpoint.state_schema import QUERY_FILE, StateSchema
from millpond.errors import MillpondError, StateDamagedError, StateIncompatibleError
from millpond.files.backends.filesystem import FileSystem
from millpond.files.locations.opening import join_url, open_filesystem, same_place
from millpond.humanize import counted
from millpond.query.checkpoints.ownership import state_of_last_run
from millpond.query.logs.query_logs import QueryLogs

_FOLDER = "millpond/"
_NEW_CHECKPOINT = "start with a new checkpointLocation, which reads the source from its beginning"
_SPARK_STATE_FILE = re.compile(r"state/(\d+)/\d+/(?!_metadata/)")
"""State files of an operator on Spark, without Spark's metadata about operators."""


def missing_state_error(
    files: FileSystem, query_logs: QueryLogs, checkpoint_files: FileSystem, query: StateSchema, on_spark: int | None
) -> StateDamagedError | StateIncompatibleError:
    """Return the error for a start without `query.json` after Spark has committed batches.

    Args:
        files: the folder where the state should be.
        query_logs: Spark's logs in the checkpoint.
        checkpoint_files: the checkpoint.
        query: the state schema of the query that starts.
        on_spark: the number of operators with state on Spark; None if no operator of the query has state.
    """
    operators = ", ".join(repr(operator.name) for operator in query.operators)
    done = f"Spark has committed {counted(query_logs.last_committed + 1, 'batch', 'batches')} ({checkpoint_files.url})"
    # The last run may have had its state at another place, which the checkpoint records.
    elsewhere = state_of_last_run(checkpoint_files)
    if elsewhere is not None and not same_place(join_url(elsewhere, _FOLDER), files.url):
        if _has_state(elsewhere):
            return StateIncompatibleError(
                f"{done}, but there is no state here: the last run had it at {elsewhere}.",
                action="Set spark.millpond.state.location as it was, or to where that folder lies now.",
                file=files.locate(QUERY_FILE),
            )
        files = open_filesystem(join_url(elsewhere, _FOLDER))
    elif elsewhere is None and checkpoint_files.exists(f"{_FOLDER}{QUERY_FILE}"):
        return StateIncompatibleError(
            f"{done}, but there is no state here: the last run had it in the checkpoint.",
            action="Unset spark.millpond.state.location: state in a checkpoint does not move to another location.",
            file=files.locate(QUERY_FILE),
        )
    if only_commits(files.list("commits/")) or generations_with_base(files):
        return StateDamagedError(
            f"{done}, and the file {QUERY_FILE}, which says what the state of {operators} looks like, is gone.",
            action=f"Put it back from a backup of the checkpoint, or {_NEW_CHECKPOINT}.",
            file=files.locate(QUERY_FILE),
        )
    native_operators = {
        match[1] for info in checkpoint_files.list("state/") if (match := _SPARK_STATE_FILE.match(info.name))
    }
    if elsewhere is None and (on_spark is None or len(native_operators) > on_spark):
        return StateIncompatibleError(
            f"{done}, but there is no state of Millpond's: the checkpoint was made by Spark's own state store.",
            action="Take it over (millpond.import_checkpoint), start with a new checkpointLocation, or go on with "
            "spark.millpond.enabled=false.",
            file=files.locate(QUERY_FILE),
        )
    last = query_logs.last_committed
    moved = "if it was moved, set spark.millpond.state.location to the folder above it; " if elsewhere else ""
    return StateDamagedError(
        f"{done}, and the state of {operators} that they made is gone: there is nothing at {files.url}.",
        action=f"Put that folder back as it was after batch {last}, or the whole checkpoint from one backup; {moved}or "
        f"{_NEW_CHECKPOINT}.",
        version=last + 1,
        file=files.url,
    )


def _has_state(location: str) -> bool:
    """Return whether a location has state; True if that cannot be determined."""
    try:
        return open_filesystem(join_url(location, _FOLDER)).exists(QUERY_FILE)
    except (MillpondError, OSError):
        return True

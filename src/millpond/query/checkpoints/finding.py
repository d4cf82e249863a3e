"""Lookup of the location of a query's state from its checkpoint."""

from __future__ import annotations

from millpond.files.locations.opening import open_filesystem
from millpond.query.checkpoints.ownership import state_of_last_run
from millpond.query.logs.copying import check_finished


def find_state(location: str) -> str:
    """Find the location of a query's state, for `StateReader`, which raises an error if there is no state.

    Args:
        location: path or URL of the query's checkpoint, or of the folder of its state outside of the checkpoint.

    Raises:
        SettingError: the location cannot be opened.
        StateIncompatibleError: the checkpoint is a fork or an import that was interrupted.
    """
    if not location.strip():
        return location
    files = open_filesystem(location)
    check_finished(files)
    return state_of_last_run(files) or location

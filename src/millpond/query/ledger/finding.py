"""Where the state of a query lies, told by what its user knows: the checkpoint."""

from __future__ import annotations

from millpond.files.backends.filesystem import open_filesystem
from millpond.query.ledger.copying import check_finished
from millpond.query.ledger.ownership import state_of_last_run


def find_state(location: str) -> str:
    """The location of a query's state, for `StateReader`, which says so if there is none.

    Args:
        location: path or URL of the query's checkpoint, or of the folder that its state has elsewhere.

    Raises:
        SettingError: it cannot be opened.
        StateIncompatibleError: the checkpoint was to go on from another, and its making was interrupted.
    """
    if not location.strip():
        return location
    files = open_filesystem(location)
    check_finished(files)
    return state_of_last_run(files) or location

"""The error of retracting a row that is not in the state."""

from __future__ import annotations

from millpond.errors import StateDamagedError


def unknown_retraction() -> StateDamagedError:
    """Return the error of an operator that is to retract a row that it does not have."""
    return StateDamagedError(
        "A retraction names a row that the state does not have.",
        action="Check that your functions between the query's stateful operators always return the same result for "
        "the same row, and start with a new checkpointLocation.",
    )

"""What is wrong when a row is taken back that an operator does not have."""

from __future__ import annotations

from millpond.errors import StateDamagedError


def unknown_retraction() -> StateDamagedError:
    """The error of an operator that is told to take back a row that it does not have."""
    return StateDamagedError(
        "A row is to be taken back that was never there.",
        action="See that functions of yours between the query's stateful operators always give the same for the same "
        "row, and start with a new checkpointLocation.",
    )

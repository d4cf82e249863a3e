"""Opens sessions: their rows are folded as they come, or kept."""

from __future__ import annotations

from millpond.operators.kind import Opening
from millpond.operators.protocol import Operator
from millpond.operators.sessions.buffered import BufferedSessions
from millpond.operators.sessions.operator import SessionOperator
from millpond.spec.kinds.session import SessionSpec


def open_sessions(spec: SessionSpec, opening: Opening) -> Operator:
    """Open the operator that a spec describes."""
    return (BufferedSessions if spec.keeps_rows else SessionOperator)(spec, opening.make_table)

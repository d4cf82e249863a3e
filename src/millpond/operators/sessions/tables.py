"""The tables of sessions: a row for each, and the rows that are kept until it closes."""

from __future__ import annotations

from millpond.layout import Column
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.sessions.row_lists import Lists
from millpond.operators.tables.bound import accumulators, bind, state_columns
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type

ORDINAL = Field("__ordinal", "bigint")
"""What tells the sessions of a key from each other."""

BOUNDARY = Field("__boundary", "bigint")
"""The last key column of rows of sessions: the initial boundary of the list that they are in, in microseconds."""

SESSION = tuple((Column(name, "word"), False) for name in ("start", "end", "expiry", "sessions"))
"""Value columns of a session: start and end (microseconds), the time at which it is closed (milliseconds), and in the
session with ordinal 0 how many there are of its key."""


def main_table(spec: SessionSpec) -> tuple[Keyed, list[Accumulator]]:
    """The table of sessions and the accumulators, bound to its columns; of rows that are kept, their lists."""
    made: list[Accumulator] = [Lists()] if spec.keeps_rows else accumulators(spec.calls, spec.inputs)
    columns = [*SESSION, *state_columns(made)]
    table = keyed((*spec.key_fields, ORDINAL), columns, parse_type(spec.window.type))
    bind(made, table.values[len(SESSION) :])
    return table, made


def kept_rows(spec: SessionSpec) -> StoredRows:
    """How the rows of sessions are kept until these close."""
    return StoredRows((*spec.key_fields, BOUNDARY), spec.inputs)

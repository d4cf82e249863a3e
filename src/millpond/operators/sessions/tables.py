"""The tables of sessions: a row for each session, and the rows that are kept until it closes."""

from __future__ import annotations

from millpond.layout import Column
from millpond.operators.functions.accumulators import Accumulator
from millpond.operators.sessions.row_lists import RowLists
from millpond.operators.tables.bound import accumulators, bind, state_columns
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import Keyed, keyed
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import Field
from millpond.spec.types import parse_type

ORDINAL = Field("__ordinal", "bigint")
"""The key column that distinguishes the sessions of a key."""

BOUNDARY = Field("__boundary", "bigint")
"""The last key column of the rows of sessions: the initial boundary of their list, in microseconds."""

SESSION = tuple((Column(name, "word"), False) for name in ("start", "end", "expiry", "sessions"))
"""The value columns of a session.

`start` and `end` are in microseconds, and `expiry`, when the session closes, in milliseconds. `sessions` of the session
with ordinal 0 counts the sessions of its key.
"""


def main_table(spec: SessionSpec) -> tuple[Keyed, list[Accumulator]]:
    """Return the table of sessions, and the accumulators bound to it; if rows are kept, their lists instead."""
    bound: list[Accumulator] = [RowLists()] if spec.keeps_rows else accumulators(spec.calls, spec.inputs)
    columns = [*SESSION, *state_columns(bound)]
    table = keyed((*spec.key_fields, ORDINAL), columns, parse_type(spec.window.type))
    bind(bound, table.values[len(SESSION) :])
    return table, bound


def kept_rows(spec: SessionSpec) -> StoredRows:
    """Return the encoding of the rows that are kept until their session closes."""
    return StoredRows((*spec.key_fields, BOUNDARY), spec.inputs)

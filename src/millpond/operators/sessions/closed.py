"""Closed sessions: takes their rows from the unaligned append store, and aggregates them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from millpond.errors import StateDamagedError
from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.event_time.sessions import head_rows
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, META, NULLS, Column, Ints, RowLayout, Rows, Words
from millpond.operators.aggregate.groups import Groups
from millpond.operators.protocol import MAIN, MakeRmwTable
from millpond.operators.sessions.row_lists import RowLists
from millpond.operators.sessions.tables import BOUNDARY
from millpond.operators.tables.input_rows import StoredRows
from millpond.operators.tables.keyed import Keyed, decode_rows, keyed
from millpond.spec.kinds.aggregate import AggregateSpec
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.operators import Field

if TYPE_CHECKING:
    from millpond.stores.rmw.table import RmwTable
    from millpond.stores.unaligned.table import UnalignedTable

_NUMBER = Field("__session", "bigint")
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 8192
_TIME_SHIFT = np.uint64(16)


class _SessionRows(NamedTuple):
    """Rows of closed sessions, and for each row the number of its session."""

    rows: Rows
    sessions: Ints

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return self.rows.words.nbytes + self.rows.heap.nbytes


class ClosedSessions:
    """A set of closed sessions.

    Args:
        spec: the sessions' spec.
        main: the main table of the operator.
        lists: the accumulator with the lists of each session.
        stored: the encoding of the sessions' rows.
        row_store: the store of these rows.
        make_scratch: opens a temporary table.
        sessions: rows of the main table.
    """

    def __init__(
        self,
        spec: SessionSpec,
        main: Keyed,
        lists: RowLists,
        stored: StoredRows,
        row_store: UnalignedTable,
        make_scratch: MakeRmwTable,
        sessions: Rows,
    ) -> None:
        self._spec = spec
        self._main = main
        self._lists = lists
        self._stored = stored
        self._row_store = row_store
        self._make_scratch = make_scratch
        self._sessions = sessions
        self._expected = lists.rows(sessions)
        self._received = np.zeros(sessions.count, np.int64)
        self._buffered: list[_SessionRows] = []

    def results(self) -> Iterator[pa.RecordBatch]:
        """Yield the sessions with their results, and remove their rows from the store.

        Raises:
            StateDamagedError: the store does not have the expected number of rows.
        """
        names = keyed((*self._main.fields[:-1], BOUNDARY), [(Column("session", "word"), False)])
        table = self._make_scratch(MAIN, names.layout.schema, names.initial)
        try:
            table.begin(0)
            yield from self._take(names, table)
        finally:
            table.close()

    def _take(self, names: Keyed, table: RmwTable) -> Iterator[pa.RecordBatch]:
        collisions: list[Rows] = []
        buffered = 0
        flush_at = self._row_store.portion_bytes
        for rows in self._row_store.take(*self._record_lists(names, table)):
            sessions = self._sessions_of(rows, names, table)
            known = sessions >= 0
            if not known.all():  # rows of another key with the same hash and boundary
                collisions.append(_copy_rows(rows, ~known, self._stored.layout))
                rows, sessions = _copy_rows(rows, known, self._stored.layout), sessions[known]
            self._received += np.bincount(sessions, minlength=len(self._received))
            self._buffered.append(_SessionRows(rows, sessions))
            buffered += self._buffered[-1].bytes
            if buffered >= flush_at:
                yield from self._aggregate()
                buffered = sum(session_rows.bytes for session_rows in self._buffered)
                # Incomplete sessions stay buffered, so the next aggregation waits for another portion of rows.
                flush_at = buffered + self._row_store.portion_bytes
        if (self._received != self._expected).any():
            raise StateDamagedError(
                "The log does not have the rows of all sessions that it should.",
                action="Restart from an older checkpoint.",
                file=self._row_store.place,
            )
        yield from self._aggregate()
        # Rows of other keys, whose sessions are open, go back: the store finds lists by hash and boundary alone.
        for rows in collisions:
            self._row_store.append(rows, (rows.words[:, META] >> _TIME_SHIFT).astype(np.int64))

    def _record_lists(self, names: Keyed, table: RmwTable) -> tuple[Words, Ints]:
        """Record the session of each list, and return the lists by hash and boundary."""
        main = self._main.layout
        heads = self._sessions.span(0, main.key_stop)
        head_rows(heads, self._main.keys[-1].offset)
        owners, boundaries = self._lists.of(self._sessions)
        words = _key_words(heads[owners], main, names.layout)
        words[:, names.keys[-1].offset] = boundaries.view(np.uint64)
        value = names.values[0].offset
        for start in range(0, len(words), _BLOCK):
            rows = table.upsert(Rows(words[start : start + _BLOCK], self._sessions.heap), 0).rows
            # Zero is the value of a fresh row, that is, of a list of no session in this set.
            table.words[rows, value] = owners[start : start + _BLOCK].view(np.uint64) + np.uint64(1)
        return words[:, HASH], boundaries

    def _sessions_of(self, rows: Rows, names: Keyed, table: RmwTable) -> Ints:
        """Return the session of each row, −1 if it is of no session of this set."""
        words = _key_words(rows.words, self._stored.layout, names.layout)
        value = names.values[0].offset
        out = np.empty(len(words), np.int64)
        for start in range(0, len(words), _BLOCK):
            ids = table.upsert(Rows(words[start : start + _BLOCK], rows.heap), 0).rows
            out[start : start + _BLOCK] = table.words[ids, value].view(np.int64)
        return out - 1

    def _aggregate(self) -> Iterator[pa.RecordBatch]:
        """Yield the results of sessions whose rows are complete, and release their rows."""
        whole = self._received == self._expected
        parts = [(session_rows, whole[session_rows.sessions]) for session_rows in self._buffered]
        self._buffered = [
            _select(session_rows, ~chosen, self._stored.layout) for session_rows, chosen in parts if not chosen.all()
        ]
        parts = [(session_rows, chosen) for session_rows, chosen in parts if chosen.any()]
        if not parts:
            return
        spec = AggregateSpec((_NUMBER,), self._spec.inputs, self._spec.calls, "update")
        groups = Groups(spec, self._make_scratch, whole=True)
        try:
            groups.begin(0)
            for session_rows, chosen in parts:
                groups.fold(self._batch(_select(session_rows, chosen, self._stored.layout)))
            del parts
            for rows in groups.scan():
                yield from self._decoded(groups, rows)
        finally:
            groups.close()

    def _batch(self, session_rows: _SessionRows) -> pa.RecordBatch:
        """Build a batch for the groups: rows keyed by the number of their session."""
        hashes = (session_rows.sessions.view(np.uint64) * _HASH_MULTIPLIER).view(np.int64)
        columns = [pa.array(hashes), pa.array(session_rows.sessions), *self._stored.inputs(session_rows.rows)]
        names = ["__hash", _NUMBER.name, *(field.name for field in self._spec.inputs)]
        return pa.RecordBatch.from_arrays(columns, names=names)

    def _decoded(self, groups: Groups, rows: Rows) -> Iterator[pa.RecordBatch]:
        fields = self._spec.output_fields
        before = len(self._spec.keys) + 1
        for batch in decode_rows(groups.main, groups.calls, (_NUMBER, *fields[before:]), rows):
            numbers = np.asarray(batch.column(0))
            start = 0
            sessions = self._sessions.take(numbers)
            for keys in decode_rows(self._main, [], fields[:before], sessions):
                results = batch.slice(start, keys.num_rows).columns[1:]
                start += keys.num_rows
                yield pa.RecordBatch.from_arrays([*keys.columns, *results], names=[field.name for field in fields])


def _key_words(words: Words, source: RowLayout, target: RowLayout) -> Words:
    """Copy the keys of rows to a layout with the same keys."""
    out = np.zeros((len(words), target.key_stop), np.uint64)
    out[:, HASH] = words[:, HASH]
    nulls = (1 << min(64, len(target.schema.keys) - 1)) - 1  # the last key is never null, and there are at most 65
    out[:, NULLS] = words[:, NULLS] & np.uint64(nulls)
    out[:, target.key_start :] = words[:, source.key_start : source.key_stop]
    return out


def _copy_rows(rows: Rows, which: np.ndarray, layout: RowLayout) -> Rows:
    """Copy the chosen rows, with no more heap than they need."""
    rows_at, heaps_at = addresses(rows.words, rows.heap)
    return Rows(*gather_rows(rows_at[which], heaps_at[which], layout.width, kernel_layout(layout).blobs))


def _select(session_rows: _SessionRows, which: np.ndarray, layout: RowLayout) -> _SessionRows:
    return (
        session_rows
        if which.all()
        else _SessionRows(_copy_rows(session_rows.rows, which, layout), session_rows.sessions[which])
    )


def concatenate(pieces: Sequence[Rows], layout: RowLayout) -> Rows:
    """Concatenate pieces."""
    if len(pieces) == 1:
        return pieces[0]
    pieces = [piece.packed() for piece in pieces]
    pointers = [addresses(*piece) for piece in pieces]
    rows_at, heaps_at = (np.concatenate([pointer[part] for pointer in pointers]) for part in (0, 1))
    return Rows(*gather_rows(rows_at, heaps_at, layout.width, kernel_layout(layout).blobs))

"""Sessions that have closed: their rows are taken from the unaligned append store, and aggregated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from millpond.errors import StateDamagedError
from millpond.files.formats.blocks import shape_of
from millpond.kernels.event_time.sessions import head_rows
from millpond.kernels.runs.gather import addresses, gather_rows
from millpond.layout import HASH, META, NULLS, Column, Ints, RowLayout, Rows, Words
from millpond.operators.aggregate.groups import Groups
from millpond.operators.protocol import MAIN, MakeRows
from millpond.operators.sessions.row_lists import Lists
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
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 8192
_TIME_SHIFT = np.uint64(16)


class _Taken(NamedTuple):
    """Rows of closed sessions, and the number of the session that each is of."""

    rows: Rows
    sessions: Ints

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return self.rows.words.nbytes + self.rows.heap.nbytes


class ClosedSessions:
    """Some closed sessions.

    Args:
        spec, main, lists, stored: of the operator. kept: the store of their rows.
        make_scratch: opens a table that lives for a moment.
        sessions: rows of the main table.
    """

    def __init__(
        self,
        spec: SessionSpec,
        main: Keyed,
        lists: Lists,
        stored: StoredRows,
        kept: UnalignedTable,
        make_scratch: MakeRows,
        sessions: Rows,
    ) -> None:
        self._spec = spec
        self._main = main
        self._lists = lists
        self._stored = stored
        self._kept = kept
        self._make_scratch = make_scratch
        self._sessions = sessions
        self._wanted = lists.rows(sessions)
        self._seen = np.zeros(sessions.count, np.int64)
        self._held: list[_Taken] = []

    def results(self) -> Iterator[pa.RecordBatch]:
        """The sessions with their results; they leave the store.

        Raises:
            StateDamagedError: there are not as many rows as there should be.
        """
        names = keyed((*self._main.fields[:-1], BOUNDARY), [(Column("session", "word"), False)])
        table = self._make_scratch(MAIN, names.layout.schema, names.initial)
        try:
            table.begin(0)
            yield from self._take(names, table)
        finally:
            table.close()

    def _take(self, names: Keyed, table: RmwTable) -> Iterator[pa.RecordBatch]:
        strangers: list[Rows] = []
        held = 0
        most = self._kept.portion
        for rows in self._kept.take(*self._name(names, table)):
            sessions = self._sessions_of(rows, names, table)
            ours = sessions >= 0
            if not ours.all():  # another key's, of the same hash and boundary
                strangers.append(_some(rows, ~ours, self._stored.layout))
                rows, sessions = _some(rows, ours, self._stored.layout), sessions[ours]
            self._seen += np.bincount(sessions, minlength=len(self._seen))
            self._held.append(_Taken(rows, sessions))
            held += self._held[-1].bytes
            if held >= most:
                yield from self._aggregate()
                held = sum(taken.bytes for taken in self._held)
                most = held + self._kept.portion
        if (self._seen != self._wanted).any():
            raise StateDamagedError(
                "The log does not have the rows of all sessions that it should.",
                action="Restart from an older checkpoint.",
                file=self._kept.place,
            )
        yield from self._aggregate()
        for rows in strangers:
            self._kept.append(rows, (rows.words[:, META] >> _TIME_SHIFT).astype(np.int64))

    def _name(self, names: Keyed, table: RmwTable) -> tuple[Words, Ints]:
        """Note of which session each list is; the lists by hash and boundary."""
        main = self._main.layout
        heads = np.ascontiguousarray(self._sessions.words[:, : main.key_stop])
        head_rows(heads, self._main.keys[-1].offset)
        of, boundaries = self._lists.of(self._sessions)
        words = _key_words(heads[of], main, names.layout)
        words[:, names.keys[-1].offset] = boundaries.view(np.uint64)
        value = names.values[0].offset
        for start in range(0, len(words), _BLOCK):
            rows = table.upsert(Rows(words[start : start + _BLOCK], self._sessions.heap), 0).rows
            table.words[rows, value] = of[start : start + _BLOCK].view(np.uint64) + np.uint64(1)
        return words[:, HASH], boundaries

    def _sessions_of(self, rows: Rows, names: Keyed, table: RmwTable) -> Ints:
        """Of which session each row is, −1 if of none of these."""
        words = _key_words(rows.words, self._stored.layout, names.layout)
        value = names.values[0].offset
        out = np.empty(len(words), np.int64)
        for start in range(0, len(words), _BLOCK):
            at = table.upsert(Rows(words[start : start + _BLOCK], rows.heap), 0).rows
            out[start : start + _BLOCK] = table.words[at, value].view(np.int64)
        return out - 1

    def _aggregate(self) -> Iterator[pa.RecordBatch]:
        """The results of the sessions all of whose rows have come in, which are let go."""
        whole = self._seen == self._wanted
        parts = [(taken, whole[taken.sessions]) for taken in self._held]
        self._held = [_left(taken, ~chosen, self._stored.layout) for taken, chosen in parts if not chosen.all()]
        parts = [(taken, chosen) for taken, chosen in parts if chosen.any()]
        if not parts:
            return
        spec = AggregateSpec((_NUMBER,), self._spec.inputs, self._spec.calls, "update")
        groups = Groups(spec, self._make_scratch, whole=True)
        try:
            groups.begin(0)
            for taken, chosen in parts:
                groups.fold(self._batch(_left(taken, chosen, self._stored.layout)))
            del parts
            for rows in groups.scan():
                yield from self._decoded(groups, rows)
        finally:
            groups.close()

    def _batch(self, taken: _Taken) -> pa.RecordBatch:
        """Rows as the groups take them: keyed by the number of their session."""
        hashes = (taken.sessions.view(np.uint64) * _SPREAD).view(np.int64)
        columns = [pa.array(hashes), pa.array(taken.sessions), *self._stored.inputs(taken.rows)]
        names = ["__hash", _NUMBER.name, *(field.name for field in self._spec.inputs)]
        return pa.RecordBatch.from_arrays(columns, names=names)

    def _decoded(self, groups: Groups, rows: Rows) -> Iterator[pa.RecordBatch]:
        fields = self._spec.output_fields
        before = len(self._spec.keys) + 1
        for batch in decode_rows(groups.main, groups.calls, (_NUMBER, *fields[before:]), rows):
            numbers = np.asarray(batch.column(0))
            start = 0
            named = Rows(self._sessions.words[numbers], self._sessions.heap)
            for keys in decode_rows(self._main, [], fields[:before], named):
                results = batch.slice(start, keys.num_rows).columns[1:]
                start += keys.num_rows
                yield pa.RecordBatch.from_arrays([*keys.columns, *results], names=[field.name for field in fields])


def _key_words(words: Words, source: RowLayout, target: RowLayout) -> Words:
    """Rows of only keys, in a layout with the same keys."""
    out = np.zeros((len(words), target.key_stop), np.uint64)
    out[:, HASH] = words[:, HASH]
    nulls = (1 << min(64, len(target.schema.keys) - 1)) - 1  # the last key is never null, and there are at most 65
    out[:, NULLS] = words[:, NULLS] & np.uint64(nulls)
    out[:, target.key_start :] = words[:, source.key_start : source.key_stop]
    return out


def _some(rows: Rows, which: np.ndarray, layout: RowLayout) -> Rows:
    """Copies of some rows, with no more heap than they need."""
    rows_at, heaps_at = addresses(rows.words, rows.heap)
    return Rows(*gather_rows(rows_at[which], heaps_at[which], layout.width, shape_of(layout).blobs))


def _left(taken: _Taken, which: np.ndarray, layout: RowLayout) -> _Taken:
    return taken if which.all() else _Taken(_some(taken.rows, which, layout), taken.sessions[which])


def together(pieces: Sequence[Rows], layout: RowLayout) -> Rows:
    """Pieces as one."""
    if len(pieces) == 1:
        return pieces[0]
    pieces = [Rows(np.ascontiguousarray(piece.words), piece.heap) for piece in pieces]
    at = [addresses(*piece) for piece in pieces]
    rows_at, heaps_at = (np.concatenate([each[part] for each in at]) for part in (0, 1))
    return Rows(*gather_rows(rows_at, heaps_at, layout.width, shape_of(layout).blobs))

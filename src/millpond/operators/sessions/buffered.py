"""Session windows that keep rows until the watermark closes them, for functions that need all rows at once.

The sessions themselves are in the main table, as in every session operator. They record which lists of the unaligned
append store hold their rows (`row_lists.py`). When sessions close, their lists are taken from the store. Complete
sessions are aggregated like a small batch, in tables of their own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from millpond.kernels.event_time import sessions as kernels
from millpond.layout import HASH, Ints, Rows
from millpond.operators.protocol import MAIN, ROWS, MakeTable, Times, scratch
from millpond.operators.sessions.closed import ClosedSessions, concatenate
from millpond.operators.sessions.operator import SessionOperator
from millpond.operators.sessions.row_lists import RowLists
from millpond.operators.sessions.tables import kept_rows
from millpond.spec.kinds.session import SessionSpec
from millpond.stores.memory.spooled import spool_pieces

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta, Writable
    from millpond.stores.rmw.expiry import Expiry

_SESSIONS_PER_READ = 65_536  # maximum closed sessions whose rows are taken together


class BufferedSessions(SessionOperator):
    """A `SessionSpec` in append mode on one partition, which keeps rows until their sessions close.

    Args:
        spec: keys, inputs and calls.
        make_table: opens the partition's tables, and temporary ones for closed sessions.
    """

    def __init__(self, spec: SessionSpec, make_table: MakeTable) -> None:
        super().__init__(spec, make_table)
        self._make_scratch = scratch(make_table)
        self._stored = kept_rows(spec)
        (lists,) = self._calls
        assert isinstance(lists, RowLists)
        self._lists = lists
        layout = self._stored.layout
        self._row_store = make_table(ROWS, layout.schema, self._stored.initial, kind="unaligned")
        self._boundary = layout.offsets[len(layout.schema.keys) - 1]
        self.tables[ROWS] = self._row_store
        self._rows = Rows(np.empty((0, layout.width), np.uint64), np.empty(0, np.uint8))

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        super().begin(version, times)
        self._row_store.begin(version)

    def _close_early(self, earliest: int) -> None:
        """Close nothing ahead of the batch's rows, because results could not be put back."""

    def _load(self, batch: pa.RecordBatch, order: Ints) -> None:
        first = 1 + len(self._key_types)
        columns = batch.columns
        columns[first : first + self._bounds] = [pa.array(np.zeros(batch.num_rows, np.int64))]
        names = ["__hash", *(field.name for field in self._stored.fields)]
        rows = self._stored.encode(pa.RecordBatch.from_arrays(columns, names=names))
        self._rows = rows.take(order)

    def _update(self, target: Writable, rows: Ints, bounds: Ints) -> None:
        if not len(rows):
            return
        offset, words = self._session, target.words
        starts, ends = (words[rows, offset + i].view(np.int64) for i in (0, 1))
        counts = np.diff(bounds)
        boundaries = self._lists.add(target, rows, starts, counts)
        row_words = self._rows.words[bounds[0] : bounds[-1]]
        row_words[:, self._boundary] = np.repeat(boundaries, counts).view(np.uint64)
        times = -(-ends // 1000)
        self._row_store.append(Rows(row_words, self._rows.heap), np.repeat(times, counts))
        merged = self._lists.with_several_lists(words, rows)
        if len(merged):
            # The store expects a list when the session that began it would have ended; merged sessions end later.
            sessions, first = np.unique(rows[merged], return_index=True)
            self._postpone(sessions, times[merged[first]])

    def _postpone(self, rows: Ints, times: Ints) -> None:
        """Postpone the expected read of the sessions' other lists in the store to the end of the session."""
        table = self._table
        sessions = Rows(table.words[rows], table.heap.data)
        owners, boundaries = self._lists.of(sessions)
        heads = sessions.span(0, self._layout.key_stop)
        kernels.head_rows(heads, self._ordinal)
        self._row_store.postpone(heads[owners, HASH], boundaries, times[owners])

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: take out closed sessions, aggregate them, and seal the tables."""
        assert self._expiry is not None
        # Releases the memory of the batch's last rows.
        self._rows = Rows(self._rows.words[:0].copy(), self._rows.heap[:0].copy())
        self._table.unrestrict()
        # Before the seal: the delta of the row store names the lists that closed sessions have taken.
        self._closed = spool_pieces(self._results(self._expiry), self._table.portion_bytes)
        return {MAIN: self._table.seal(), ROWS: self._row_store.seal()}

    def _results(self, expiry: Expiry) -> Iterator[list[Any]]:
        """Yield the results of the sessions that the watermark has passed, each batch as an Arrow stream."""
        with closing(self._closed_groups(expiry)) as pieces:
            for sessions in pieces:
                closed = ClosedSessions(
                    self.spec, self._main, self._lists, self._stored, self._row_store, self._make_scratch, sessions
                )
                for batch in closed.results():
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, batch.schema) as writer:
                        writer.write_batch(batch)
                    yield [sink.getvalue()]

    def _closed_groups(self, expiry: Expiry) -> Generator[Rows]:
        """Yield closed sessions, as many as are taken together: one scan of the store's indexes finds them all."""
        waiting: list[Rows] = []
        count = 0
        for rows in self._take_closed(expiry):
            waiting.append(rows)
            count += rows.count
            if count >= _SESSIONS_PER_READ:
                yield concatenate(waiting, self._layout)
                waiting, count = [], 0
        if waiting:
            yield concatenate(waiting, self._layout)

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the sessions that the watermark has closed."""
        for buffer in self._closed:
            with pa.BufferReader(buffer) as source:
                while source.tell() < source.size():
                    yield from pa.ipc.open_stream(source)

    def close(self) -> None:
        """Release all memory."""
        super().close()
        self._row_store.close()

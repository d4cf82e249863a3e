"""Session windows with functions that depend on the order of rows.

Spark orders what it merges into a session by start: the batch's rows by their own, stored sessions by theirs. So a row
that comes in a later batch counts before the stored session if it starts before it.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.files.formats.blocks import kernel_layout
from millpond.kernels.event_time import sessions as kernels
from millpond.layout import INLINE, LENGTH, Ints, Rows
from millpond.operators.columns.encode import Mask, hashes_of, numbers, plain, portions
from millpond.operators.columns.offsets import bounds_of
from millpond.operators.sessions.closed import concatenate
from millpond.operators.sessions.operator import SessionOperator
from millpond.operators.sessions.pieces import Pieces, merged_together, parts_within


class RowOrderSessions(SessionOperator):
    """A `SessionSpec` on one partition with functions that depend on the order of rows.

    Rows that extend a stored session are folded into it unless one of them starts before it. Stored sessions that start
    after such a row are taken out. They, and the rows between their starts, are partial results, which are combined in
    the order of their starts.
    """

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch by start, then by end (see `SessionOperator.process`)."""
        sizes = [part.num_rows for part in portions(batch, self._table.portion_bytes, self._table.portion_keys)]
        if len(sizes) <= 1 and self.spec.gap is not None:
            # `Pieces.of` sorts each portion by start; with one gap for all, that is also by end.
            super().process(batch)
            return
        first = 1 + len(self._key_types)
        bounds = [numbers(plain(column), self._bound_type) for column in batch.columns[first : first + self._bounds]]
        hashes = hashes_of(batch)
        order = np.lexsort([*reversed(bounds), hashes])
        # A sorted copy of the whole batch may not fit in memory. Portions end where a key ends: the rows of a key that
        # start before a stored session have to meet it together.
        key_ends = np.append(np.flatnonzero(np.diff(hashes[order])) + 1, len(order))
        cuts = key_ends[np.searchsorted(key_ends, np.cumsum(sizes))]
        for rows in np.split(order, np.unique(cuts)[:-1]):
            self._process_portion(batch.take(pa.array(rows)))

    def _classify(self, rows: Ints, keys: Ints, pieces: Pieces, stored: Ints, simple: Mask) -> None:
        super()._classify(rows, keys, pieces, stored, simple)
        starts = self._table.words[rows, self._session].view(np.int64)
        simple[keys] &= (stored[keys] == 0) | (starts <= pieces.starts[pieces.keys[keys]])

    def _merge_rows(self, heads: Rows, stored: Ints, pieces: Pieces, starts: Ints, ends: Ints) -> None:
        for part in merged_together(stored, pieces.keys):
            part_heads, part_stored, part_pieces = heads.take(part), stored[part], pieces.of_key_range(part)
            rows, later = self._find_later(part_heads, part_stored, part_pieces)
            if not later.any():
                super()._merge_rows(part_heads, part_stored, part_pieces, starts, ends)
                continue
            sizes = np.zeros(len(rows), np.int64)
            sizes[later] = self._copy_bytes(rows[later])
            key_sizes = np.diff(bounds_of(sizes)[bounds_of(part_stored)])
            for keys in parts_within(key_sizes, self._table.portion_bytes):
                self._combine(part_heads.take(keys), part_stored[keys], part_pieces.of_key_range(keys), starts, ends)

    def _combine(self, heads: Rows, stored: Ints, pieces: Pieces, starts: Ints, ends: Ints) -> None:
        """Combine partial results in the order of their starts (see `_merge_rows`)."""
        # Found again: combining earlier keys may have moved rows.
        rows, later = self._find_later(heads, stored, pieces)
        session_keys = np.repeat(np.arange(len(stored)), stored)[later]
        # Sessions beside others are only marked; the merge in `_merge_sessions` removes them.
        sessions, _ = self._take(rows[later])
        partials = pieces.cut(session_keys, sessions.ints(self._session), starts, ends)
        places = np.arange(len(partials.starts))
        words = np.tile(self._main.initial, (len(places), 1))
        key_stop = self._layout.key_stop
        words[:, :key_stop] |= np.repeat(heads.words[:, :key_stop], np.diff(partials.keys), axis=0)
        with closing(self._table.scratch()) as scratch:
            scratch.replace(Rows(words, heads.heap))
            kernels.put_sessions(scratch.words, places, self._session, partials.starts, partials.ends)
            self._update(scratch, places, partials.rows)
            # Of equal starts that of the stored session is first, as on Spark.
            partial_results = concatenate([sessions, scratch.rows], self._layout)
        self._merge_sessions(partial_results)

    def _find_later(self, heads: Rows, stored: Ints, pieces: Pieces) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the row ids of stored sessions, and whether each starts after a piece that meets it."""
        stamp = int(self._stamps(pieces.ends[pieces.keys[0] : pieces.keys[-1]].max(keepdims=True))[0])
        rows = self._find_sessions(heads, bounds_of(stored), stamp)
        starts = self._table.words[rows, self._session].view(np.int64)
        return rows, pieces.find_later(np.repeat(np.arange(len(stored)), stored), starts)

    def _copy_bytes(self, rows: Ints) -> Ints:
        """Return the bytes of a copy of each row, with its long values."""
        lengths = self._table.words[rows[:, None], kernel_layout(self._layout).blobs] & LENGTH
        sizes: Ints = np.where(lengths > INLINE, lengths, 0).sum(axis=1).astype(np.int64)
        return sizes + 8 * self._layout.width

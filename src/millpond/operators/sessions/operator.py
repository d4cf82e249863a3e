"""Session windows: aggregate rows of a key that follow each other closely, in whatever order they come.

A key's sessions are in the main table under the key and an ordinal, 0 to n − 1, in no order. The one with ordinal 0
holds their number. Nearly always there is one, which the batch extends: then its row is found, and folded into, as in
any grouping. Keys with more sessions are read whole, merged, and written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.files.formats.segment import decode_rows as decode_segment
from millpond.files.formats.segment import encode_rows
from millpond.kernels.event_time import sessions as kernels
from millpond.layout import HashRange, Ints, Rows, Words
from millpond.operators.columns.encode import ALL, Mask, is_true, numbers, operand, plain, portions
from millpond.operators.columns.offsets import bounds_of
from millpond.operators.functions.accumulators import BLOCK
from millpond.operators.protocol import MAIN, MAX_OUTPUT_ROWS, NO_EXTRA_METRICS, MakeTable, Times
from millpond.operators.sessions.pieces import MAX_MERGED_SESSIONS, Pieces, merged_together, own_windows
from millpond.operators.sessions.tables import main_table
from millpond.operators.tables.keyed import decode_rows
from millpond.operators.tables.partial_rows import partial_rows
from millpond.spec.functions import count_only_inputs
from millpond.spec.kinds.session import SessionSpec
from millpond.spec.types import DataType, parse_type
from millpond.stores.memory.spooled import spool_pieces
from millpond.stores.rmw.expiry import Expiry

if TYPE_CHECKING:
    from millpond.stores.protocol import Table, TableDelta, Writable

Fold = Callable[[Ints, int, int], None]

_LONG = DataType("bigint")


class SessionOperator:
    """A `SessionSpec` on one partition."""

    extra_metrics = NO_EXTRA_METRICS

    def __init__(self, spec: SessionSpec, make_table: MakeTable) -> None:
        self.spec = spec
        self._main, self._calls = main_table(spec)
        self._layout = self._main.layout
        self._table = make_table(MAIN, self._layout.schema, self._main.initial)
        self.tables: dict[str, Table] = {MAIN: self._table}
        self._ordinal = self._main.keys[-1].offset
        self._session = self._main.values[0].offset
        self._expiry = self._table.expire_by(self._session + 2) if spec.output_mode == "append" else None
        self._key_types = self._main.types[:-1]
        self._bound_type = parse_type(spec.window_bounds[0].type)
        self._bounds = len(spec.window_bounds)
        self._input_types = [parse_type(field.type) for field in spec.inputs]
        self._used = {position for call in spec.calls for position in call.inputs}
        self._counted = count_only_inputs(spec.calls)
        self._filters = {call.filter for call in spec.calls if call.filter is not None}
        self._version = 0
        self._times = Times()
        self._closed: list[Any] = []
        # Whether sessions were closed ahead of the batch's rows; None until the first rows decide.
        self._closed_early: bool | None = None
        self.late_rows = 0

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._times = times
        self._closed = []
        self._closed_early = None
        self.late_rows = 0
        self._table.begin(version)
        for call in self._calls:
            call.begin(version)

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        return self._table.passes(rows)

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys (see `Prefetchable`)."""
        self._table.prefetch(hashes, needed, needed)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        if self._closed_early is None:
            self._closed_early = False  # closing scans the whole range
        self._table.restrict(range_)

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then the input columns of the spec."""
        for portion in portions(batch, self._table.portion_bytes, self._table.portion_keys):
            self._process_portion(portion)

    def _process_portion(self, portion: pa.RecordBatch) -> None:
        first = 1 + len(self._key_types)
        bounds = [numbers(plain(column), self._bound_type) for column in portion.columns[first : first + self._bounds]]
        # A row is late by the end of its own window, as in Spark, not by its time.
        starts, ends = own_windows(bounds, self.spec.gap)
        on_time = ends > self._times.late * 1000
        # Without a watermark no row is late, whatever its time.
        if self.spec.lag_ms is not None and not on_time.all():
            self.late_rows += int(np.count_nonzero(~on_time))
            portion, starts, ends = portion.filter(pa.array(on_time)), starts[on_time], ends[on_time]
        if portion.num_rows:
            self._close_early(int(starts.min()))
            self._fold(portion, starts, ends)

    def adopt(self, batch: pa.RecordBatch) -> None:
        """Adopt sessions: `__hash`, the keys, start and end in microseconds, and the state columns of all calls."""
        first = 1 + len(self._key_types)
        for portion in portions(batch, self._table.portion_bytes, MAX_MERGED_SESSIONS):
            places = self._main.keys[:-1]
            rows = partial_rows(portion, self._main, self._key_types, places, self._calls, skipped=2)
            for number in (0, 1):
                rows.words[:, self._session + number] = numbers(plain(portion.column(first + number)), _LONG).view(
                    np.uint64
                )
            rows.words[:, self._ordinal] = 0
            self._merge_sessions(rows)

    def _close_early(self, earliest: int) -> None:
        """Close what the watermark has passed ahead of rows that start too late to change it, as nearly all do.

        Few keys then have sessions left beside those that the batch makes. If an earlier row follows, the closed
        sessions are put back.
        """
        if self._expiry is None:
            return
        reached = earliest <= self._times.closed * 1000
        if self._closed_early is None:
            # Decided by the first rows: closing early pays only while no row reaches back to closed sessions.
            self._closed_early = not reached
            if self._closed_early:
                self._close_all(self._expiry)
        elif self._closed_early and reached:
            self._closed_early = False
            for rows in self._closed_rows():
                for piece in rows.pieces(MAX_MERGED_SESSIONS):
                    self._merge_sessions(piece)
            self._closed = []

    def _merge_sessions(self, sessions: Rows) -> None:
        """Merge sessions that are not in the table with those that are.

        Args:
            sessions: closed or adopted sessions, or partial results of sessions.
        """
        keys = sessions.leading(self._layout.key_stop)
        kernels.head_rows(keys.words, self._ordinal)
        starts, ends = (sessions.ints(self._session + i) for i in (0, 1))
        pieces = Pieces.of(keys, starts, ends, self._layout)
        heads = keys.take(pieces.leaders)
        rows = self._find(heads, self._stamps(pieces.ends[pieces.keys[1:] - 1]), slice(None))
        stored = self._table.words[rows, self._session + 3].view(np.int64)

        def fold(rows: Ints, low: int, high: int) -> None:
            bounds = pieces.rows[low : high + 1]
            source = sessions.take(pieces.order[bounds[0] : bounds[-1]])
            # A piece may consist of several partial results.
            spread = np.repeat(rows, np.diff(bounds))
            for call in self._calls:
                call.combine(self._table, spread, source)

        self._merge(heads, stored, pieces, fold)

    def _fold(self, batch: pa.RecordBatch, starts: Ints, ends: Ints) -> None:
        keys = self._main.encode(batch, range(len(self._key_types)))
        keys.words[:, self._ordinal] = 0
        pieces = Pieces.of(keys, starts, ends, self._layout)
        heads = keys.take(pieces.leaders)
        stamps = self._stamps(pieces.ends[pieces.keys[1:] - 1])
        count = len(heads.words)
        ids, stored, simple = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint8)
        self._table.preload(heads, stamps)
        epoch = self._table.row_id_epoch
        which = np.arange(count)
        for chosen in self._blocks(which):
            ids[chosen] = rows = self._find(heads, stamps, chosen)
            self._classify(rows, chosen, pieces, stored, simple)
        simple_keys = count
        if not simple.all():
            which = np.argsort(simple == 0, kind="stable")
            simple_keys = int(np.count_nonzero(simple))
            pieces = pieces.select(which)
        self._load(batch, pieces.order)
        for start in range(0, simple_keys, BLOCK):
            chosen = which[start : min(start + BLOCK, simple_keys)]
            stop = start + len(chosen)
            # Row ids are only valid as long as the table's epoch does not change.
            rows = ids[chosen] if self._table.row_id_epoch == epoch else self._find(heads, stamps, chosen)
            kernels.extend(self._table.words, rows, self._session, pieces.starts[start:stop], pieces.ends[start:stop])
            self._mark_changed(rows, rows)
            self._update(self._table, rows, pieces.rows[start : stop + 1])
        if simple_keys < count:
            merged_keys = which[simple_keys:]
            pieces = pieces.of_key_range(slice(simple_keys, count))
            self._merge_rows(heads.take(merged_keys), stored[merged_keys], pieces, starts, ends)

    def _classify(self, rows: Ints, keys: Ints, pieces: Pieces, stored: Ints, simple: Mask) -> None:
        """Find the keys whose stored session, if any, is extended by the batch's rows (see `kernels.classify`)."""
        times = (pieces.keys, pieces.starts, pieces.ends)
        kernels.classify(self._table.words, rows, keys, self._session, *times, stored, simple)

    def _merge_rows(self, heads: Rows, stored: Ints, pieces: Pieces, starts: Ints, ends: Ints) -> None:
        """Merge the stored sessions of keys with the batch's rows.

        Args:
            heads: as for `_merge_keys`.
            stored: as for `_merge_keys`.
            pieces: the pieces of the keys.
            starts: the starts of the batch's rows, in microseconds.
            ends: their ends.
        """

        def fold(rows: Ints, low: int, high: int) -> None:
            self._update(self._table, rows, pieces.rows[low : high + 1])

        self._merge(heads, stored, pieces, fold)

    def _blocks(self, keys: Ints) -> Iterator[Ints]:
        """Yield keys, which are in hash order, in blocks.

        If the index may have to grow, each block is spread over all keys: new keys in hash order would crowd one place
        of an index that has not grown yet.
        """
        if len(keys) <= self._table.index_room:
            yield from (keys[start : start + BLOCK] for start in range(0, len(keys), BLOCK))
            return
        blocks = -(-len(keys) // BLOCK)
        yield from (np.ascontiguousarray(keys[number::blocks]) for number in range(blocks))

    def _find(self, heads: Rows, stamps: Ints, which: Any) -> Ints:
        return self._table.upsert(heads.take(which), stamps[which], "created").rows

    def _stamps(self, ends: Ints) -> Ints:
        if self._expiry is None:
            return np.full(len(ends), self._version)
        # Rounded up: a session closes when the watermark, in milliseconds, has reached its end.
        return Expiry.stamps(-(-ends // 1000))

    def _mark_changed(self, touched: Ints, filed: Ints) -> None:
        self._table.touch(touched)
        if self._expiry is not None:
            self._expiry.file(filed)

    def _load(self, batch: pa.RecordBatch, order: Ints) -> None:
        first = 1 + len(self._key_types) + self._bounds
        places = pa.array(order)
        columns = {p: batch.column(first + p).take(places) for p in self._used | self._filters}
        operands = {
            p: operand(column, self._input_types[p], nulls_only=p in self._counted) for p, column in columns.items()
        }
        for call, spec in zip(self._calls, self.spec.calls, strict=True):
            counts = ALL
            if spec.filter is not None:
                counts = is_true(operands[spec.filter])
            call.load([operands[position] for position in spec.inputs], counts)

    def _update(self, target: Writable, rows: Ints, bounds: Ints) -> None:
        """Fold the rows of pieces into rows of `target`.

        Args:
            target: the table, or scratch rows.
            rows: the row id of each piece's session in `target`.
            bounds: the first row of each piece, with the end of the last.
        """
        spread = np.repeat(rows, np.diff(bounds))
        for start in range(0, len(spread), BLOCK):
            for call in self._calls:
                call.update(target, spread[start : start + BLOCK], int(bounds[0]) + start)

    # Keys with several sessions

    def _merge(self, heads: Rows, stored: Ints, pieces: Pieces, fold: Fold) -> None:
        """Merge the stored sessions of keys with the pieces of the keys, and fold these in.

        Args:
            heads: as for `_merge_keys`.
            stored: as for `_merge_keys`.
            pieces: the pieces.
            fold: folds the pieces between two numbers into the given rows.
        """
        keys = pieces.keys
        for part in merged_together(stored, keys):
            low, high = int(keys[part.start]), int(keys[part.stop])
            times = pieces.starts[low:high], pieces.ends[low:high]
            first_pieces = keys[part.start : part.stop + 1] - low
            fold(self._merge_keys(heads.take(part), stored[part], first_pieces, *times), low, high)

    def _merge_keys(self, heads: Rows, stored: Ints, first: Ints, starts: Ints, ends: Ints) -> Ints:
        """Merge sessions.

        Args:
            heads: key rows of the keys' first sessions.
            stored: the number of stored sessions of each key.
            first: the first piece of each key to merge in.
            starts: the starts of these pieces, in microseconds.
            ends: the ends of these pieces, in microseconds.

        Returns:
            The row id of each piece's session.
        """
        table, offset = self._table, self._session
        stamp = int(self._stamps(ends.max(initial=self._times.closed * 1000, keepdims=True))[0])
        bounds = bounds_of(stored)
        old = self._find_sessions(heads, bounds, stamp)
        old_starts, old_ends = (table.words[old, offset + i].view(np.int64) for i in (0, 1))
        of_stored, stays = np.empty(len(old), np.int64), np.empty(len(old), np.uint8)
        of_piece, sizes = np.empty(len(starts), np.int64), np.empty(len(stored), np.int64)
        capacity = len(old) + len(starts)
        key, slot, new_starts, new_ends = (np.empty(capacity, np.int64) for _ in range(4))
        changed = np.empty(capacity, np.uint8)
        count = kernels.merge_sessions(
            *(bounds, old_starts, old_ends, first, starts, ends, key, slot, new_starts, new_ends),
            *(of_stored, stays, of_piece, changed, sizes),
        )
        key, slot, changed = key[:count], slot[:count], changed[:count]
        leaving = np.flatnonzero(stays == 0)
        merged = leaving[of_stored[leaving] >= 0]
        # Copied before they are removed: rows that are created below may take their places.
        copies = table.copy(old[merged])
        table.remove(old[leaving])
        rows = table.upsert(self._ordinal_keys(heads, key, slot), stamp, "created").rows
        kernels.put_sessions(table.words, rows, offset, new_starts[:count], new_ends[:count])
        head = np.flatnonzero(slot == 0)
        table.words[rows[head], offset + 3] = sizes[key[head]]
        # The first session of a key holds their number, so it changes with that, too.
        changed[head] |= sizes[key[head]] != stored[key[head]]
        for call in self._calls:
            call.combine(table, rows[of_stored[merged]], copies)
        self._mark_changed(rows[changed != 0], rows)
        return rows[of_piece]

    def _find_sessions(self, heads: Rows, bounds: Ints, stamp: int) -> Ints:
        """Return the row ids of the stored sessions of keys.

        Args:
            heads: key rows of the keys' first sessions.
            bounds: offsets of each key's sessions in the result, with the end of the last.
            stamp: access time of the rows.
        """
        which = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        numbered = self._ordinal_keys(heads, which, np.arange(bounds[-1]) - bounds[which])
        return self._table.upsert(numbered, stamp, "created").rows

    def _ordinal_keys(self, heads: Rows, which: Ints, ordinals: Ints) -> Rows:
        words = np.empty((len(which), heads.words.shape[1]), np.uint64)
        kernels.number_rows(heads.words, which, ordinals, self._ordinal, words)
        return Rows(words, heads.heap)

    # Closing

    def _close_all(self, expiry: Expiry) -> None:
        """Take the sessions that the watermark has passed out of the table."""
        closed = (encode_rows(rows, self._layout, False) for rows in self._take_closed(expiry))
        self._closed = spool_pieces(closed, self._table.portion_bytes)

    def _take_closed(self, expiry: Expiry) -> Iterator[Rows]:
        """Take out the sessions that the watermark has passed, and yield them."""
        table = self._table
        # Closed sessions that wait to be taken out: memory holds their keys until then.
        max_waiting = max(MAX_MERGED_SESSIONS, table.portion_bytes // (8 * self._layout.key_stop))
        done = False
        while not done:
            epoch = table.row_id_epoch
            marked: list[Ints] = []
            marked_keys: list[Rows] = []
            waiting = 0
            done = True
            with closing(expiry.due(self._times.closed)) as due:
                for ids in due:
                    rows, is_marked = self._take(ids)
                    marked.append(ids[is_marked])
                    waiting += len(marked[-1])
                    marked_keys.append(Rows(rows.words[is_marked, : self._layout.key_stop], rows.heap))
                    yield rows
                    if waiting >= max_waiting:
                        # Renumbering changes the table, which must not happen while `due` runs; so the search begins
                        # again.
                        done = False
                        break
            if waiting:
                self._remove_closed(marked_keys, np.concatenate(marked) if table.row_id_epoch == epoch else None)

    def _take(self, ids: Ints) -> tuple[Rows, NDArray[np.bool_]]:
        """Take sessions out of the table.

        A session beside others is only marked as closed: to remove it at once would leave a gap in the ordinals.

        Returns:
            Copies of the sessions, and for each whether it is only marked.
        """
        table = self._table
        copies = table.copy(ids)
        alone = np.empty(len(ids), np.uint8)
        kernels.mark_closed(table.words, ids, self._session, self._ordinal, alone)
        table.remove(ids[alone == 1])
        marked = ids[alone == 0]
        self._mark_changed(marked, marked)
        return copies, alone == 0

    def _remove_closed(self, closed_keys: Sequence[Rows], marked: Ints | None) -> None:
        """Remove sessions that are marked as closed.

        Args:
            closed_keys: their keys.
            marked: the ids of their rows, if these are still in memory.
        """
        table = self._table
        epoch = table.row_id_epoch
        heads = [self._find_heads(keys) for keys in closed_keys]
        if marked is not None and table.row_id_epoch == epoch:
            # Mostly all sessions of a key have been closed: then no session needs a new ordinal.
            rows, places, counts = np.unique(np.concatenate(heads), return_inverse=True, return_counts=True)
            whole = (counts == table.words[rows, self._session + 3].view(np.int64))[places]
            table.remove(marked[whole])
            bounds = bounds_of(np.array([len(ids) for ids in heads]))
            closed_keys = [keys.take(~whole[bounds[i] : bounds[i + 1]]) for i, keys in enumerate(closed_keys)]
        for keys in closed_keys:
            self._renumber(keys)

    def _find_heads(self, keys: Rows) -> Ints:
        """Return the row ids of the keys' first sessions; turns `keys` into the key rows of these."""
        kernels.head_rows(keys.words, self._ordinal)
        stamp = int(self._stamps(np.array([self._times.closed * 1000]))[0])
        ids = [self._table.upsert(block, stamp, "created").rows for block in keys.pieces(BLOCK)]
        return np.concatenate([np.empty(0, np.int64), *ids])

    def _renumber(self, keys: Rows) -> None:
        """Remove the sessions that are marked as closed, and number the others of their keys.

        Args:
            keys: key rows of the keys' first sessions.
        """
        table = self._table
        stamp = int(self._stamps(np.array([self._times.closed * 1000]))[0])
        for block in keys.pieces(BLOCK):
            rows, created = table.upsert(block, stamp, "created")
            rows, places = np.unique(rows, return_index=True)
            empty = created[places]  # the key's closed sessions were all its sessions, and have been removed already
            table.remove(rows[empty])
            rows, places = rows[~empty], places[~empty]
            stored = table.words[rows, self._session + 3].view(np.int64)
            nothing = np.empty(0, np.int64)
            pieces = Pieces(nothing, np.zeros(1, np.int64), nothing, nothing, np.zeros(len(rows) + 1, np.int64))
            self._merge(block.take(places), stored, pieces, lambda rows, low, high: None)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: take out closed sessions, and seal the table."""
        if self._expiry is not None and not self._closed_early:
            # Sessions close in the whole range of hashes, not only in that of the last pass.
            self._table.unrestrict()
            self._close_all(self._expiry)
        return {MAIN: self._table.seal()}

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the sessions that the watermark has closed, or in complete mode all sessions."""
        fields = self.spec.output_fields
        for rows in self._table.scan() if self._expiry is None else self._closed_rows():
            for part in rows.pieces(MAX_OUTPUT_ROWS):
                yield from decode_rows(self._main, self._calls, fields, part)

    def _closed_rows(self) -> Iterator[Rows]:
        if self._closed:
            data = self._closed[0] if len(self._closed) == 1 else b"".join(self._closed)
            yield from decode_segment(data, self._layout, "closed sessions")

    def close(self) -> None:
        """Release all memory."""
        self._table.close()

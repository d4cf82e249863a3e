"""Top-N: the first rows of every key in an order, and the changes that a batch makes among them.

Rows that are equal in the order are ranked by the batch in which they came, earlier first, then by their other columns;
where rows can be retracted, by their other columns alone. The changes follow Flink's retraction model
(docs/architecture/11-changelog.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.pointers import address, data_of
from millpond.kernels.ranking import changes as rank_changes
from millpond.kernels.ranking import top_n as ranking
from millpond.kernels.ranking.grouping import KeyBlock, group
from millpond.kernels.ranking.packed_rows import INSERTED_AT, find_empty, long_slots, put_best, read_slots, write_slots
from millpond.layout import HashRange, Rows, Words
from millpond.operators.columns.encode import portions
from millpond.operators.protocol import MAIN, MAX_OUTPUT_ROWS, NO_EXTRA_METRICS, MakeRmwTable, Times
from millpond.operators.ranking.packed_rows import MAX_BYTES, PackedRows, key_too_large
from millpond.operators.ranking.tables import rank_table
from millpond.operators.retraction import unknown_retraction
from millpond.operators.tables.removed import RemovedKeys
from millpond.spec.kinds.rank import RankSpec

if TYPE_CHECKING:
    from millpond.stores.protocol import TableDelta
    from millpond.stores.rmw.table import RmwTable

BLOCK = 8192
"""Rows processed at a time."""

FUNCTIONS = {"row_number": ranking.ROW_NUMBER, "rank": ranking.RANK, "dense_rank": ranking.DENSE_RANK}


class TopNOperator:
    """A `RankSpec` on one partition."""

    extra_metrics = NO_EXTRA_METRICS
    late_rows = 0

    def __init__(self, spec: RankSpec, make_table: MakeRmwTable) -> None:
        self.spec = spec
        self._main = rank_table(spec)
        self._table = make_table(MAIN, self._main.layout.schema, self._main.initial)
        self.tables: dict[str, RmwTable] = {MAIN: self._table}
        self._removed = RemovedKeys(self._main.layout, self._table)
        self._slots = PackedRows(spec.columns, spec.order)
        self._slots_offset = self._main.values[0].offset
        # Rows that leave the ranking stay as tombstones for the batch, since the changes need their old ranks.
        tombstones = spec.changes or spec.retracts or spec.function != "row_number"
        flags = ranking.ALL_ROWS * spec.retracts | ranking.TOMBSTONES * tombstones
        ranking_args = (spec.limit, FUNCTIONS[spec.function], flags)
        self._ranking = np.array([(*self._slots.order, *ranking_args)], ranking.RANKING)
        self._bytes = np.zeros(self._slots.layout.width, dtype=np.int64)
        for offset in self._slots.blobs:
            self._bytes[offset : offset + 2] = 1
        self._scratch = np.zeros(4 * BLOCK, dtype=np.int64)
        self._shows_deletions = spec.changes
        self._has_deletions = False  # in this batch
        self._version = 0

    def begin(self, version: int, times: Times) -> None:
        """Start the batch that reads state `version`."""
        self._version = version
        self._has_deletions = False
        self._removed.clear()
        self._table.begin(version)

    def passes(self, rows: int) -> int:
        """Return the number of passes over hash ranges that a batch of `rows` rows takes."""
        count: int = self._table.passes(rows)
        return count

    def prefetch(self, hashes: Words, needed: int) -> None:
        """Prefetch the state of keys (see `Prefetchable`)."""
        self._table.prefetch(hashes, needed, needed)

    def restrict(self, range_: HashRange) -> None:
        """Restrict the rows that follow to a hash range, until the next call or the next batch."""
        self._table.restrict(range_)

    def process(self, batch: pa.RecordBatch) -> None:
        """Fold in rows of the batch: the column `__hash`, then those of the spec."""
        for portion in portions(batch, self._table.portion_bytes, self._table.portion_keys):
            self._fold(portion)

    def _fold(self, batch: pa.RecordBatch) -> None:
        columns = batch.columns[1 : 1 + len(self.spec.columns)]
        keys = self._main.encode(batch, self.spec.keys)
        rows = self._slots.pack(columns, batch.num_rows)
        signs = np.empty(0, dtype=np.int8)
        if self.spec.retracts:
            signs = np.sign(batch.column(batch.num_columns - 1).to_numpy())
            self._has_deletions |= bool((signs < 0).any())
        self._table.preload(keys, self._version)
        rank_block = self._rank_block_single if self.spec.single else self._rank_block
        for start in range(0, batch.num_rows, BLOCK):
            piece = slice(start, start + BLOCK)
            rank_block(keys.take(piece), rows.take(piece), signs[piece])

    def _group(self, keys: Rows) -> tuple[KeyBlock, NDArray[np.bool_]]:
        # Existing rows do not count as changed yet: `_touch` marks only the groups that the block changes.
        located = self._table.upsert(keys, self._version, touch="created")
        count = len(located.rows)
        groups, members = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        starts = np.empty(count + 1, dtype=np.int64)
        self._scratch[:] = 0
        count_ = group(located.rows, self._scratch, groups, starts, members)
        return KeyBlock(groups[:count_], starts[: count_ + 1], members), located.created

    def _touch(
        self,
        keys: Rows,
        block: KeyBlock,
        firsts: NDArray[np.int64],
        changed: NDArray[np.int64],
        created: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Mark changed groups and return their row ids.

        The table may grow here, so addresses that were read from it before are stale.

        Args:
            keys: the key rows of the block.
            block: the block's rows by key.
            firsts: the first row of each group.
            changed: the numbers of the changed groups.
            created: for each row, whether it created its group.
        """
        first = firsts[changed]
        if created[first].all():
            return block.groups[changed]
        rows: NDArray[np.int64] = self._table.upsert(keys.take(first), self._version).rows
        return rows

    def _slab(self) -> tuple[int, int]:
        words = self._table.words
        return data_of(words), words.strides[0]

    def _rank_block(self, keys: Rows, rows: Rows, signs: NDArray[np.int8]) -> None:
        slots = self._slots
        block, created = self._group(keys)
        stored = int(self._table.words[block.groups, self._slots_offset + 2].sum())
        entries = ranking.Entries(
            np.empty(stored + rows.count, dtype=np.int64),
            np.empty(stored + rows.count, dtype=np.int8),
            np.empty(len(block.groups), dtype=np.int64),
            np.empty(len(block.groups), dtype=np.int64),
        )
        # `decide` sorts `members`, so the first row of each group is read before.
        firsts = block.members[block.starts[:-1]]
        slab = (*self._slab(), data_of(self._table.heap.data), self._slots_offset)
        heap = data_of(rows.heap)
        room = np.empty(rows.count, dtype=np.int64), np.empty(rows.count, dtype=np.int64)
        kernel_args = *slab, block, data_of(rows.words), heap
        changes = ranking.decide(*kernel_args, signs, self._ranking, slots.blobs, self._version, *room, entries)
        if changes < 0:
            raise unknown_retraction()
        if not changes:
            return
        changed = np.flatnonzero(entries.sizes)
        lengths = np.maximum(entries.sizes[changed], 0)
        too_large = np.flatnonzero(lengths > MAX_BYTES)
        if len(too_large):
            raise key_too_large(self._main, keys.take(firsts[changed[too_large[:1]]]))
        ids = self._touch(keys, block, firsts, changed, created)
        places = np.concatenate([[0], np.cumsum(lengths)])
        out = np.empty(int(places[-1]) + 8, dtype=np.uint8)
        pairs = np.empty((len(changed), 2), dtype=np.uint64)
        begins = np.concatenate([[0], entries.ends[:-1]])
        # `_touch` may have moved the table, so its addresses are read again.
        slab = (*self._slab(), data_of(self._table.heap.data), self._slots_offset)
        write_slots(
            *(*slab, changed, ids, begins, entries.ends, entries.fates, entries.sources),
            *(data_of(rows.words), slots.stride, heap, slots.blobs, self._version, address(out), pairs, places),
        )
        self._table.put_bytes(ids, self._slots_offset, pairs, out)
        self._table.words[ids, self._slots_offset + 2] = (entries.ends - begins)[changed]

    def _rank_block_single(self, keys: Rows, rows: Rows, signs: NDArray[np.int8]) -> None:
        slots = self._slots
        block, created = self._group(keys)
        winners = np.empty(len(block.groups), dtype=np.int64)
        rows_at = data_of(rows.words)
        slab = (*self._slab(), data_of(self._table.heap.data), self._slots_offset)
        changes = ranking.best(*slab, block, rows_at, data_of(rows.heap), self._ranking, self._version, winners)
        if not changes:
            return
        changed = np.flatnonzero(winners >= 0)
        ids = self._touch(keys, block, block.members[block.starts[:-1]], changed, created)
        winners = winners[changed]
        put_best(*self._slab(), self._slots_offset, ids, winners, rows_at, slots.stride, self._bytes, self._version)
        for offset in slots.blobs:
            pairs = rows.words[winners, offset : offset + 2]
            self._table.put_bytes(ids, self._slots_offset + offset, pairs, rows.heap)

    def finish(self) -> dict[str, TableDelta]:
        """End the batch: remove the keys that have lost all their rows, and seal the table."""
        if self._has_deletions:
            self._removed.remove(self._is_empty, self._version, keep=self._shows_deletions)
        return {MAIN: self._table.seal()}

    def _is_empty(self, rows: Rows) -> NDArray[np.bool_]:
        """Return a mask of the keys without rows."""
        empty = np.empty(rows.count, dtype=np.bool_)
        find_empty(rows.packed().words, data_of(rows.heap), self._slots_offset, self._slots.stride, empty)
        return empty

    def output(self) -> Iterator[pa.RecordBatch]:
        """Yield the new images of the rows that the batch changed; with `changes`, also the old ones."""
        for rows in self._changed_keys():
            yield from self._inserted_rows(rows) if self.spec.single else self._changes(rows)

    def _changed_keys(self) -> Iterator[Rows]:
        """Yield the table rows of the keys that the batch removed, if deletions are shown, and of those it changed."""
        yield from self._removed.rows()
        yield from self._table.touched()

    def _inserted_rows(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        words = rows.words[:, self._slots_offset :]
        words = words[words[:, INSERTED_AT] == np.uint64(self._version + 1)]
        if len(words):
            ranks = pa.array(np.ones(len(words), dtype=np.int32))
            yield from self._slots.unpack(Rows(words, rows.heap), [ranks], self.spec.output_fields)

    def _changes(self, rows: Rows) -> Iterator[pa.RecordBatch]:
        slots, spec = self._slots, self.spec
        words = rows.packed().words
        # Each stored row has at most an old image and a new one.
        max_changes = 2 * int(words[:, self._slots_offset + 2].sum())
        owners, which = np.empty(max_changes, dtype=np.int64), np.empty(max_changes, dtype=np.int64)
        ranks, kinds = np.empty(max_changes, dtype=np.int32), np.empty(max_changes, dtype=np.int8)
        heap = data_of(rows.heap)
        total = rank_changes.changes(
            *(words, heap, self._slots_offset, self._ranking, self._version, spec.changes, owners, which, ranks, kinds)
        )
        for start in range(0, total, MAX_OUTPUT_ROWS):
            stop = min(start + MAX_OUTPUT_ROWS, total)
            piece = (words, heap, self._slots_offset, slots.stride, slots.blobs, owners[start:stop], which[start:stop])
            out = np.empty((stop - start, slots.layout.width), dtype=np.uint64)
            values = np.empty(long_slots(*piece), dtype=np.uint8)
            read_slots(*piece, out, values)
            more = [pa.array(ranks[start:stop])]
            if spec.changes:
                more.append(pa.array(kinds[start:stop]))
            yield from slots.unpack(Rows(out, values), more, spec.output_fields)

    def close(self) -> None:
        """Release all memory."""
        self._table.close()

"""Rows changed by a batch: encoding them as its delta, and reading them back for the output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from millpond.files.formats.segment import decode_rows, encode_rows
from millpond.kernels.hot_table.state import TOMBSTONE, TOUCHED
from millpond.layout import META, HashRange, RowLayout, Rows
from millpond.stores.memory.spooled import concatenate, spool_pieces
from millpond.stores.protocol import TableDelta
from millpond.stores.rmw.hot.table import HotTable
from millpond.stores.rmw.memory_manager import MemoryManager
from millpond.stores.rmw.scan import merge_hot_and_runs


class BatchChanges:
    """Rows changed by the running batch, or by the last one.

    Before the batch is sealed, they are read from the hot table and from rows that left memory. Afterwards, they are
    read from the copies that the delta was made of, if these are small. If the copies are large and rows left memory,
    the delta itself is read: the runs may be in a remote store, the delta never is.

    Args:
        layout: of the rows. hot: rows in memory. memory: records the rows that left memory in this batch.
        range_: the hash range of the table.
    """

    def __init__(self, layout: RowLayout, hot: HotTable, memory: MemoryManager, range_: HashRange) -> None:
        self._layout = layout
        self._hot = hot
        self._memory = memory
        self._range = range_
        self._copies: list[Rows] | None = None
        self._segments: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Drop the changes of the last batch."""
        if self._memory.spilled:
            # `_merged` reads rows without clearing their flags; copies for a delta without spilled rows have cleared
            # them.
            self._hot.clear_touched()
            self._memory.spilled.clear()
        self._hot.reset_touched()
        self._copies, self._segments = None, ()

    def encode(self, size: int, keep: int) -> tuple[TableDelta, int]:
        """Encode the changed rows, removed keys included.

        Args:
            size: rows in a piece. keep: bytes of copies to keep for `read`, at most.

        Returns:
            The delta, and the bytes of its rows in memory.
        """
        count = held = 0
        kept: list[Rows] = []

        def encoded() -> Iterator[list[Any]]:
            nonlocal count, held
            for rows in self._with_tombstones(size):
                piece = encode_rows(rows, self._layout, True)
                count += rows.count
                held += rows.words.nbytes + rows.heap.nbytes
                if held <= keep:
                    kept.append(rows)
                else:
                    # All copies are kept, or none: `read` has to yield every changed row.
                    kept.clear()
                yield piece
            if not count:
                yield encode_rows(self._hot.copy(np.empty(0, np.uint32)), self._layout, True)

        pieces = spool_pieces(encoded(), keep)
        self._copies = kept if held <= keep else None
        self._segments = tuple(pieces) if held > keep and self._memory.spilled else ()
        return TableDelta(count, pieces), held

    def read(self, size: int, piece: int) -> Iterator[Rows]:
        """Yield the changed rows in their current state, each key once, without removed keys.

        Args:
            size: rows in a piece. piece: bytes decoded at a time.
        """
        sealed = iter(self._copies) if self._copies is not None else None
        if self._segments:
            sealed = decode_rows(concatenate(self._segments), self._layout, "what a batch changed", piece)
        if sealed is not None:
            for rows in sealed:
                dead = (rows.words[:, META] & np.uint64(TOMBSTONE)) != 0
                yield from (rows.take(~dead) if dead.any() else rows).pieces(size)
            return
        if self._memory.spilled:
            yield from self._merged(size)
            return
        ids = self._hot.live(self._hot.touched_ids())
        for start in range(0, len(ids), size):
            yield self._hot.copy(ids[start : start + size], compact=False)

    def _with_tombstones(self, size: int) -> Iterator[Rows]:
        if self._memory.spilled:
            yield from self._merged(size, tombstones=True)
            return
        ids = self._hot.touched_ids()
        for start in range(0, len(ids), size):
            # Copying clears the flags, so that `begin` only has to reset the list of touched rows.
            yield self._hot.copy(ids[start : start + size], keep=TOMBSTONE, clear=TOUCHED)

    def _merged(self, size: int, *, tombstones: bool = False) -> Iterator[Rows]:
        # Spilled runs are oldest first; a merge takes the newest first.
        spilled = [evicted.run.view for evicted in reversed(self._memory.spilled)]
        return merge_hot_and_runs(self._hot, spilled, self._range, size, touched=True, tombstones=tombstones)

"""The read-modify-write store: a hot table over hash-ordered runs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from millpond.errors import UsageError
from millpond.files.blocks import HashRange
from millpond.files.refs import TableManifest
from millpond.files.segment import encode_rows
from millpond.kernels.hot_state import TOUCHED
from millpond.kernels.upsert import TOUCH_ALL, TOUCH_CREATED
from millpond.layout import Bytes, RowLayout, Rows, TableSchema, Words
from millpond.stores.budget import MemoryBudget
from millpond.stores.heap import Heap
from millpond.stores.hot import HotTable
from millpond.stores.protocol import Located, Runs, TableDelta

PIECE = 65536
"""Rows in a piece of a scan or a delta, at most."""
_CHUNK = 65536  # keys that are made room for at once


class RmwTable:
    """One table of one partition: associative state by key, read and written a block of keys at a time.

    Not thread-safe: one writer. Row ids are valid until the next `upsert`, `load`, `begin` or `seal`.

    Args:
        schema: the stored columns.
        initial: a whole row (`width` words): what a fresh row holds in its null bits and value columns.
        runs: the runs behind the hot table.
        budget: the memory that the table shares with the others of its slot.
        background: runs the writing of files.
        range_: the hashes that the table holds.

    Attributes:
        layout: of the rows.
        words: the hot rows, `words[row_id, word]`; the array's address never changes.
        heap: what long byte values in `words` point into.
    """

    def __init__(
        self,
        schema: TableSchema,
        initial: Words,
        runs: Runs,
        budget: MemoryBudget,
        background: Executor,
        range_: HashRange = HashRange(),  # noqa: B008
    ) -> None:
        self.layout = RowLayout(schema)
        self._runs = runs
        self._background = background
        self._hot = HotTable(self.layout, initial, range_, 2 * budget.total)
        self.words: Words = self._hot.words
        self.heap: Heap = self._hot.heap
        self._account = budget.open()
        self._version = 0
        self._sealed = False
        self._room = 0  # keys that may be upserted without asking whether there is room

    # A batch

    def begin(self, version: int) -> None:
        """Start the batch that reads `version`."""
        if not self._sealed and len(self._hot.touched_ids()):
            raise UsageError(
                f"The batch on version {self._version} was not sealed.", action="Open the table anew.", version=version
            )
        self._version = version
        self._sealed = False
        self._hot.forget_touched()

    def upsert(self, keys: Rows, stamps: NDArray[np.int64] | int, touch: Literal["all", "created"] = "all") -> Located:
        """Find the rows of some keys, in memory or in runs, and make fresh ones for those that are new.

        Best called with 2,048 to 16,384 keys at a time: then what is done with the rows finds them in the cache.

        Args:
            keys: rows of which the words hash, nulls and key columns are filled; more words are ignored.
            stamps: event times in milliseconds (0 to 2⁴⁸), one a key or one for all: when the row was last used.
            touch: which rows the batch is said to change: all of them, or those created.

        Returns:
            The row ids; and for each key whether it is the first occurrence of one that was nowhere.
        """
        if keys.words.strides[1] != 8 or keys.words.strides[0] % 8:
            keys = Rows(np.ascontiguousarray(keys.words), keys.heap)
        count = len(keys.words)
        mode = TOUCH_ALL if touch == "all" else TOUCH_CREATED
        self._make_room(count, self._hot.long_key_bytes(keys))
        search = self._runs.rows > 0
        located, pending = self._hot.upsert(keys, stamps, mode, search)
        if search and len(pending):
            positions, found = self._runs.lookup(keys, pending)
            self._hot.settle(located, pending, positions, found, mode)
        return located

    def put_bytes(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values into a column of given rows.

        Args:
            rows: row ids. offset: the first of the column's two words.
            values: two words a row, as in the row layout. heap: what long values point into.
        """
        values = values if values.strides[1] == 8 and values.strides[0] % 8 == 0 else np.ascontiguousarray(values)
        self.heap.put(rows, offset, values, heap)

    def touched(self, size: int = PIECE) -> Iterator[Rows]:
        """The rows that the batch changed, each key once, as they are now.

        Long values stay in the table's own heap: use a piece before the table changes.
        """
        ids = self._hot.touched_ids()
        for start in range(0, len(ids), size):
            yield self._hot.copy(ids[start : start + size], compact=False)

    def scan(self, size: int = PIECE) -> Iterator[Rows]:
        """The whole state in hash order, in pieces of at most `size` rows; use a piece before the table changes."""
        for ids in self._hot.walk(size):
            yield self._hot.copy(ids, compact=False)

    def seal(self) -> TableDelta:
        """End the batch: what it changed, encoded. `touched` may still be asked until the next `begin`."""
        ids = self._hot.touched_ids()
        pieces = []
        for start in range(0, len(ids), PIECE):
            pieces += encode_rows(self._hot.copy(ids[start : start + PIECE], clear=TOUCHED), self.layout, False)
        self._sealed = True
        self._version += 1
        return TableDelta(len(ids), pieces)

    def load(self, delta_rows: Rows) -> None:
        """Apply rows of a delta, in recovery: they replace what the table knows of their keys."""
        words = delta_rows.words
        if words.strides[1] != 8 or words.strides[0] % 8:
            words = np.ascontiguousarray(words)
        for start in range(0, len(words), _CHUNK):
            piece = Rows(words[start : start + _CHUNK], delta_rows.heap)
            self._make_room(len(piece.words), self._hot.long_bytes(piece))
            self._hot.load(piece)

    # Memory

    def _make_room(self, keys: int, long_bytes: int) -> None:
        hot = self._hot
        if keys > hot.index_room():
            hot.grow_index(keys)
        if long_bytes:
            hot.heap.reserve(long_bytes)

    # The rest

    def hint(self, hashes: NDArray[np.uint64], stamps: NDArray[np.int64]) -> None:
        """Announce keys that will be needed at given times, so that they are kept (or brought) in memory."""

    def manifest(self) -> TableManifest:
        """The runs that hold the state together with the deltas of later versions."""
        return TableManifest()

    def stats(self) -> dict[str, int]:
        """Figures: rows and bytes in memory, dirty rows, rows in runs."""
        return {
            "hot_rows": self._hot.count,
            "hot_bytes": self._hot.memory,
            "dirty_rows": self._hot.dirty,
            "run_rows": self._runs.rows,
        }

    def close(self) -> None:
        """Give all memory back."""
        self._hot.close()
        self._account.close()

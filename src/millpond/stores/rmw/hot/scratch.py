"""Scratch rows with a table's layout, for states that are combined, output and discarded."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.errors import SettingError
from millpond.kernels.hot_table import state as hs
from millpond.kernels.pointers import address
from millpond.layout import Bytes, RowLayout, Rows, Words
from millpond.stores.memory.heap import Heap


class Scratch:
    """Rows outside any table that accumulators can write to like rows of a table.

    Args:
        layout: of the rows. space: bytes of address space for long values.

    Attributes:
        words: the rows. heap: their long values.
    """

    def __init__(self, layout: RowLayout, space: int) -> None:
        self._columns = layout.bytes_columns
        self.words: Words = np.empty((0, layout.width), np.uint64)
        self._state = np.zeros(hs.SIZE, np.int64)
        self.heap = Heap(self._state, space if self._columns else 0)

    @property
    def rows(self) -> Rows:
        """The current rows, valid until the next `replace`."""
        return Rows(self.words, self.heap.data)

    def replace(self, rows: Rows) -> None:
        """Replace the rows by these. Their words are written to; their heap is no longer needed."""
        self.words = rows.words
        if not self._columns:
            return
        self._state[hs.SLAB] = address(self.words)
        self._state[hs.STRIDE] = self.words.strides[0]
        self.heap.switch_half()
        self.heap.release_old_half()
        ids = np.arange(len(rows.words))
        for offset in self._columns:
            values = rows.words[:, offset : offset + 2].copy()
            self.words[:, offset : offset + 2] = 0
            self.put_bytes(ids, offset, values, rows.heap)

    def put_bytes(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values into a column of rows, as `RmwTable.put_bytes`."""
        more = self.heap.size_of(values)
        if self.heap.used + more > self.heap.capacity:
            raise SettingError(
                "Windows whose panes are put together outgrew the memory.", action="Raise spark.millpond.slot.memory."
            )
        self.heap.reserve(more)
        self.heap.put(rows, offset, values, heap)

    def close(self) -> None:
        """Release all memory."""
        self.heap.close()

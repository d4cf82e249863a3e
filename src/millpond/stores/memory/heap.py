"""The arena for long byte values of a hot table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.hot_table.arena import ARENA_START, CLASSES, long_bytes, put_values
from millpond.kernels.hot_table.state import HEAP, HEAP_FREE, HEAP_TOP
from millpond.kernels.pointers import address
from millpond.layout import Bytes, Words
from millpond.stores.memory.reserved_mapping import ReservedMapping

_FIRST = np.zeros(1, np.int64)


class Heap:
    """Values too long for a row, at offsets that never change while a row refers to them.

    Args:
        state: the table's state array. size: bytes of address space for values.

    Attributes:
        data: the bytes; the array's address never changes.
    """

    def __init__(self, state: NDArray[np.int64], size: int) -> None:
        # Two halves: packing copies values from one to the other, so the mapping's address never changes.
        self._mapping = ReservedMapping(2 * size)
        self._start = ARENA_START  # start of the half in use
        self._state = state
        self.data: Bytes = self._mapping.view(np.uint8)
        self.lists = np.zeros(CLASSES, np.int64)
        state[HEAP] = self._mapping.address
        state[HEAP_TOP] = ARENA_START
        state[HEAP_FREE] = 0

    @property
    def capacity(self) -> int:
        """Bytes of values, at most."""
        return self._mapping.size // 2 - ARENA_START

    @property
    def used(self) -> int:
        """Bytes in use, freed chunks included."""
        return int(self._state[HEAP_TOP]) - self._start

    @property
    def free(self) -> int:
        """Bytes of freed chunks, which values of similar length reuse."""
        return int(self._state[HEAP_FREE])

    def reserve(self, more: int) -> None:
        """Prepare for up to `more` additional bytes."""
        self._mapping.advise_huge_pages(int(self._state[HEAP_TOP]) + more)

    def size_of(self, values: Words) -> int:
        """Return the arena bytes that byte values (two words each) take, at most."""
        return int(long_bytes(address(values), len(values), values.strides[0] // 8, _FIRST))

    def put(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values into column word `offset` of rows, freeing the previous values."""
        put_values(self._state, self.lists, rows, offset, address(values), values.strides[0] // 8, address(heap))

    def switch_half(self) -> None:
        """Start to fill the other half of the address space; values in the old half stay until `release_old_half`."""
        self._old = self._start, int(self._state[HEAP_TOP])
        self._start = ARENA_START if self._start >= self.capacity else self.capacity + ARENA_START
        self._state[HEAP_TOP] = self._start
        self._state[HEAP_FREE] = 0
        # Free lists refer to chunks of the old half.
        self.lists[:] = 0

    def release_old_half(self) -> None:
        """Release the old half, all values of which have been copied."""
        self._mapping.release(*self._old)

    def close(self) -> None:
        """Release the memory."""
        self._mapping.close()

"""The arena of long byte values of a hot table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.arena import ARENA_START, CLASSES, put_values
from millpond.kernels.hot_state import HEAP, HEAP_FREE, HEAP_TOP
from millpond.kernels.pointers import address
from millpond.layout import Bytes, Words
from millpond.stores.mapping import Mapping


class Heap:
    """Values longer than a row holds, at offsets that never change while a row refers to them.

    Attributes:
        data: the bytes; the array's address never changes.
    """

    def __init__(self, state: NDArray[np.int64], size: int) -> None:
        self._mapping = Mapping(size)
        self._state = state
        self.data: Bytes = self._mapping.view(np.uint8)
        self.lists = np.zeros(CLASSES, np.int64)
        state[HEAP] = self._mapping.address
        state[HEAP_TOP] = ARENA_START
        state[HEAP_FREE] = 0

    @property
    def capacity(self) -> int:
        """Bytes of address space."""
        return self._mapping.size

    @property
    def used(self) -> int:
        """Bytes that take memory, freed chunks included."""
        return int(self._state[HEAP_TOP])

    @property
    def free(self) -> int:
        """Bytes of freed chunks, which values of like length will use again."""
        return int(self._state[HEAP_FREE])

    def reserve(self, more: int) -> None:
        """Say that up to `more` bytes will be added."""
        self._mapping.using(self.used + more)

    def put(self, rows: NDArray[np.int64], offset: int, values: Words, heap: Bytes) -> None:
        """Write byte values into column word `offset` of rows, freeing what was there."""
        put_values(self._state, self.lists, rows, offset, address(values), values.strides[0] // 8, address(heap))

    def close(self) -> None:
        """Give the memory back."""
        self._mapping.close()

"""The memory of a hot table's index, and how it grows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.hot_table import state as hs
from millpond.kernels.hot_table.index import migrate
from millpond.stores.memory.reserved_mapping import ReservedMapping

_MAX_LOAD = 0.7  # highest load of the index
_LOAD_AFTER_GROWTH = 0.47  # load after growing
_MAX_OLD_LOAD = 0.8  # highest load of the old index while its entries move
_MIN_SLOTS = 64  # slots of a new index
_STEPS_PER_KEY = 8  # slots moved to the grown index for each key looked up
_NEXT_WORDS = (hs.NEXT_ENTRIES, hs.NEXT_SLOTS, hs.NEXT_SCALE, hs.FRONTIER, hs.CURSOR, hs.NEXT_STOP)


class HotIndex:
    """An index that grows incrementally: each call moves some entries to the larger index, so that no call pauses.

    Args:
        state: the table's state array, with the hash range to index.
    """

    def __init__(self, state: NDArray[np.int64]) -> None:
        self._state = state
        self._next: ReservedMapping | None = None
        self._entries, scale = self._map(_MIN_SLOTS)
        state[hs.ENTRIES] = self._entries.address
        state[hs.SLOTS] = _MIN_SLOTS
        state[hs.SCALE] = scale

    def _map(self, slots: int) -> tuple[ReservedMapping, int]:
        # Displaced entries spill beyond the last slot, in the worst case all of them, so twice the slots are mapped.
        mapping = ReservedMapping((2 * slots + 64) * 8)
        mapping.advise_huge_pages(slots * 8)
        return mapping, self._scale(slots)

    def _scale(self, slots: int) -> int:
        return (slots << 32) // (int(self._state[hs.LAST]) + 1)

    @property
    def memory(self) -> int:
        """Bytes of memory that the index takes, or will take once it has grown."""
        return 8 * int(self._state[hs.SLOTS] + self._state[hs.NEXT_SLOTS])

    @property
    def room(self) -> int:
        """Number of keys that can be added before the index has to grow (further)."""
        slots = self._state[hs.SLOTS] if self._next is None else self._state[hs.NEXT_SLOTS]
        return int(slots * _MAX_LOAD) - int(self._state[hs.COUNT])

    def home(self, hash_: int) -> int:
        """Return the slot at which the search for a hash begins; the index must not be growing."""
        state = self._state
        low = int(state[hs.LOW : hs.LOW + 1].view(np.uint64)[0])
        return ((max(0, hash_ - low) >> int(state[hs.SHIFT])) * int(state[hs.SCALE])) >> 32

    def growth_bytes(self, keys: int) -> int:
        """Return the bytes that `grow` would allocate."""
        return 8 * self._slots_for(keys)

    def _slots_for(self, keys: int) -> int:
        count = int(self._state[hs.COUNT])
        return max(int((count + keys) / _MAX_LOAD * 1.02) + _MIN_SLOTS, int(count / _LOAD_AFTER_GROWTH))

    def grow(self, keys: int) -> None:
        """Begin to grow for `keys` more keys, or to shrink if few rows are left."""
        self.finish_growing()
        state = self._state
        slots = self._slots_for(keys)
        self._next, scale = self._map(slots)
        state[hs.NEXT_ENTRIES] = self._next.address
        state[hs.NEXT_SLOTS] = slots
        state[hs.NEXT_SCALE] = scale
        # Keys beyond the frontier still go to the old index, which must not overfill before they move.
        if int(state[hs.COUNT]) + keys > int(state[hs.SLOTS]) * _MAX_OLD_LOAD:
            self.finish_growing()

    def rescale(self) -> None:
        """Spread the slots over the hash range in the state array. The index must be empty."""
        self.finish_growing()
        self._state[hs.SCALE] = self._scale(int(self._state[hs.SLOTS]))

    def advance(self, keys: int) -> None:
        """Move entries in proportion to the keys looked up."""
        if self._next is not None:
            self._move(_STEPS_PER_KEY * keys)

    def finish_growing(self) -> None:
        """Finish growing at once."""
        if self._next is not None:
            self._move(int(self._state[hs.SLOTS]) + 1)

    def shrink(self) -> None:
        """Release memory if the index has far more slots than rows."""
        if int(self._state[hs.SLOTS]) > 4 * self._slots_for(0):
            self.grow(0)
            self.finish_growing()

    def _move(self, slots: int) -> None:
        state = self._state
        if migrate(state, slots):
            assert self._next is not None
            self._entries.close()
            self._entries, self._next = self._next, None
            for current, following in (
                (hs.ENTRIES, hs.NEXT_ENTRIES),
                (hs.SLOTS, hs.NEXT_SLOTS),
                (hs.SCALE, hs.NEXT_SCALE),
            ):
                state[current] = state[following]
            for number in _NEXT_WORDS:
                state[number] = 0

    def close(self) -> None:
        """Release the memory."""
        self._entries.close()
        if self._next is not None:
            self._next.close()
